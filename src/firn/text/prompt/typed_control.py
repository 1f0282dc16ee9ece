"""Treats typed control tokens as text, wherever a template puts them. Pure.

Text from users, tools and files may spell a control token; only those that the template itself
writes are real. The rendered text does not show which is which, so a chat with typed ones is
rendered a second time, with marks in their places: see `typed_marks`. Nearly every chat has none,
and only costs a scan of its texts.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby, islice

from firn.core.errors import BadRequest
from firn.core.ports import Tokenizer
from firn.core.values import Message, MessagePart, TextPart
from firn.text.prompt.rendering import Content, Render, Rendered, Span, joined_text, texts_of
from firn.text.prompt.typed_marks import BETWEEN, TypedMarks

MAX_TYPED = 1 << 16
_BRACKETED = re.compile(r"[<\[◁][^\s]+[>\]▷]")
_LIKE_HTML = re.compile(r"</?[a-zA-Z][a-zA-Z0-9]*>")


class TextScanner:
    """Finds the longest of the texts that begin at the same place. Immutable.

    One expression for each first character: `re` searches for a fixed character at memory speed.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        kinds = sorted({t for t in texts if t})
        groups = [list(run) for _, run in groupby(kinds, key=lambda t: t[0])]
        self._by_first = [re.compile(_trie(group)) for group in groups]
        self._combined = re.compile("|".join(p.pattern for p in self._by_first) or "(?!)")

    def is_in(self, text: str) -> bool:
        return any(p.search(text) for p in self._by_first)

    def matches(self, text: str) -> Iterator[re.Match[str]]:
        return self._combined.finditer(text) if self.is_in(text) else iter(())


def _trie(texts: Sequence[str]) -> str:
    """One expression in which texts share their prefixes: `re` tries alternatives one by one."""
    rest: dict[str, list[str]] = {}
    for text in texts:
        if text:
            rest.setdefault(text[0], []).append(text[1:])
    if not rest:
        return ""
    body = "|".join(re.escape(char) + _trie(tails) for char, tails in rest.items())
    return f"(?:{body})?" if "" in texts else f"(?:{body})" if len(rest) > 1 else body


def control_texts(tokenizer: Tokenizer, known: Collection[str] = ()) -> frozenset[str]:
    """The added tokens of the vocabulary that are control tokens, or markup like them.

    Vocabularies also add other tokens: runs of spaces, HTML tags. Those are text, unless the
    template writes them or they are `known` markup.
    """
    template = tokenizer.chat_template or ""

    def is_control(text: str, token: int) -> bool:
        if token in tokenizer.special or text in known:
            return not text.isspace()
        if not _BRACKETED.fullmatch(text):
            return False
        return not _LIKE_HTML.fullmatch(text) or text in template

    return frozenset(t for t, token in tokenizer.added_tokens.items() if is_control(t, token))


class TypedControl:
    """Finds typed control tokens. Immutable.

    `own`: markup of reasoning and calls, which an assistant's message may contain as the model wrote it.
    `most`: how many a chat may spell: finding out where they are takes time and memory for each.
    """

    def __init__(
        self, control: Collection[str], *, own: Collection[str] = (), most: int = MAX_TYPED
    ) -> None:
        self._control = control
        self._own = own
        self._most = most
        self._any = TextScanner(control)
        self._foreign = TextScanner(t for t in control if t not in own)

    def including(self, texts: Collection[str]) -> TypedControl:
        if all(text in self._control for text in texts):
            return self
        return TypedControl({*self._control, *texts}, own=self._own, most=self._most)

    def spans(self, text: str) -> tuple[Span, ...]:
        """Every place where a control token is spelled."""
        return tuple(m.span() for m in self._any.matches(text))

    def render(self, content: Content, render: Render) -> Rendered:
        """Raises TemplateFailed, BadRequest."""
        if not self._typed_in(content):
            return Rendered(render(content))
        self._refuse_too_many(content)
        return TypedMarks(self._join(content), render, self._find).result()

    def _typed_in(self, content: Content) -> bool:
        others: list[str] = []
        own: list[str] = []
        for text, is_assistant in texts_of(content):
            (own if is_assistant else others).append(text)
        return self._any.is_in(BETWEEN.join(others)) or self._foreign.is_in(BETWEEN.join(own))

    def _refuse_too_many(self, content: Content) -> None:
        left = self._most
        for text, is_assistant in texts_of(content):
            left -= sum(1 for _ in islice(self._find(text, is_assistant), left + 1))
            if left < 0:
                raise BadRequest(
                    f"The texts spell more than {self._most} of the model's control tokens.",
                    param="messages",
                )

    def _find(self, text: str, is_assistant: bool) -> Iterator[re.Match[str]]:
        return (self._foreign if is_assistant else self._any).matches(text)

    def _join(self, content: Content) -> Content:
        """Joins adjacent texts of a message if they spell a token only together."""

        def whole(message: Message) -> Message:
            joined: list[MessagePart] = []
            for is_text, run in groupby(message.parts, key=lambda p: isinstance(p, TextPart)):
                parts = list(run)
                if not is_text or len(parts) == 1:
                    joined += parts
                    continue
                if self._n_spelled(parts) != len(self.spans(joined_text(parts))):
                    parts = [TextPart(joined_text(parts))]
                joined += parts
            return replace(message, parts=tuple(joined))

        return replace(content, messages=tuple(map(whole, content.messages)))

    def _n_spelled(self, parts: Iterable[MessagePart]) -> int:
        return sum(len(self.spans(p.text)) for p in parts if isinstance(p, TextPart))
