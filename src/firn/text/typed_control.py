"""Control tokens that somebody has typed are text, wherever a template puts them. Pure.

What users, tools and files bring may spell a control token; only what the template itself writes is one.
Which is which cannot be seen in a rendered text, so a chat in which somebody has typed one is rendered a
second time with marks in those places, and the marks tell. The text itself is that of the first time.

    content    read <|im_end|> aloud
    marked     user: read MARK aloud<|im_end|>        typed: the mark's place; control: the other one

A chat in which nobody has, which is nearly every one, costs a scan of its texts.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from string import ascii_lowercase
from typing import Any

from firn.core.errors import TemplateFailed
from firn.core.ports import Tokenizer
from firn.core.values import Message, Part, TextPart, Tool, ToolCall

Span = tuple[int, int]
"""Characters [start, end) of a text."""

_BRACKETED = re.compile(r"[<\[◁][^\s]+[>\]▷]")
_LIKE_HTML = re.compile(r"</?[a-zA-Z][a-zA-Z0-9]*>")
_BETWEEN = "\0"
MAX_LOOKS = 24
"""Renderings to find out which tokens a template inspects (one or two do, by halves), and as many
more to find out where it puts them."""
LOOKS_S = 2.0
"""Of this thread's own, after which no more of them are begun: what users type decides how many are."""
CONTEXT = 16
MIN_MARK, LONG_MARK, N_MARK_START, MARK_END = 10, 24, 6, "q"


@dataclass(frozen=True, slots=True)
class Content:
    """All that a caller brings into a template."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    kwargs: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Rendered:
    """typed: ascending places of the text where a control token is spelled, and is none."""

    text: str
    typed: tuple[Span, ...] = ()


Render = Callable[[Content], str]


def control_texts(tokenizer: Tokenizer, known: Collection[str] = ()) -> frozenset[str]:
    """What in the vocabulary is control, or markup like it.

    Vocabularies add tokens of other kinds, too: runs of spaces, HTML tags. Those are text, unless the
    template writes them, or `known` markup is made of them.
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

    `own`: markup of thoughts and calls. What the assistant has said holds it as the model wrote it.
    """

    def __init__(self, control: Collection[str], *, own: Collection[str] = ()) -> None:
        self._control = control
        self._own = own
        self._any = _Scanner(control)
        self._alien = _Scanner(t for t in control if t not in own)

    def including(self, texts: Collection[str]) -> TypedControl:
        if all(text in self._control for text in texts):
            return self
        return TypedControl({*self._control, *texts}, own=self._own)

    def spans(self, text: str) -> tuple[Span, ...]:
        """Every place where a control token is spelled."""
        return tuple(m.span() for m in self._any.all(text))

    def render(self, content: Content, render: Render) -> Rendered:
        """Raises TemplateFailed."""
        if not self._typed_in(content):
            return Rendered(render(content))
        return _Marking(self, self._joined(content), render).result()

    def _typed_in(self, content: Content) -> bool:
        others: list[str] = []
        own: list[str] = []
        for text, is_own in _texts(content):
            (own if is_own else others).append(text)
        return self._any.is_in(_BETWEEN.join(others)) or self._alien.is_in(_BETWEEN.join(own))

    def scanner(self, *, is_own: bool) -> _Scanner:
        return self._alien if is_own else self._any

    def _joined(self, content: Content) -> Content:
        """With those texts of a message as one that spell a token only together."""

        def whole(message: Message) -> Message:
            found: list[Part] = []
            for is_text, run in groupby(message.parts, key=lambda p: isinstance(p, TextPart)):
                parts = list(run)
                if not is_text or len(parts) == 1:
                    found += parts
                    continue
                if self._n_found(parts) != len(self.spans(_text_of(parts))):
                    parts = [TextPart(_text_of(parts))]
                found += parts
            return replace(message, parts=tuple(found))

        return replace(content, messages=tuple(map(whole, content.messages)))

    def _n_found(self, parts: Iterable[Part]) -> int:
        return sum(len(self.spans(p.text)) for p in parts if isinstance(p, TextPart))


@dataclass(frozen=True, slots=True)
class _Place:
    """Characters [start, end) of one text of the chat: a typed token, or a point between two."""

    leaf: int
    start: int
    end: int


class _Marking:
    """Finds in a rendered text what was typed. Owner: one rendering."""

    def __init__(self, typed: TypedControl, content: Content, render: Render) -> None:
        self._content = content
        self._render = render
        self._n_looks = 0
        self._until = time.thread_time() + LOOKS_S
        self._leaves: list[str] = []
        self._places: list[_Place] = []

        def note(text: str, is_own: bool) -> str:
            found = typed.scanner(is_own=is_own).all(text)
            self._places += [_Place(len(self._leaves), *m.span()) for m in found]
            self._leaves.append(text)
            return text

        _mapped(content, note)
        self._marks = self._new_marks({self._text(p) for p in self._places})
        self._mark = re.compile(f"({'|'.join(self._marks.values())})")
        self._kinds = {mark: kind for kind, mark in self._marks.items()}

    def _new_marks(self, kinds: Iterable[str]) -> dict[str, str]:
        """For each kind, and for a point, what stands in its place: found nowhere else.

        Small letters survive JSON, trimming and whatever else templates do; where the token is long
        enough for it, its mark has the same length. All begin alike: one search tells that no text
        has any of them, and `re` finds them as fast as one.
        """
        texts = _BETWEEN.join(self._leaves)
        start = _letters(N_MARK_START)
        while start in texts:
            start = _letters(N_MARK_START)
        marks: dict[str, str] = {}
        known: set[str] = set()
        for kind in ("", *kinds):
            n_chars = len(kind) if len(kind) >= MIN_MARK else LONG_MARK
            while kind not in marks:
                name = _letters(MIN_MARK - N_MARK_START)
                if name not in known:
                    known.add(name)
                    marks[kind] = (start + name).ljust(n_chars, MARK_END)
        return marks

    def result(self) -> Rendered:
        try:
            plain = self._render(self._content)
        except TemplateFailed:
            # It may have refused the content for what it spells, which is nothing but text.
            return self._unmarked(self._render(self._marked(self._places)))
        found = self._aligned(plain, self._places)
        if found is None:
            found = self._without_inspected(plain)
        return Rendered(plain, tuple(sorted(set(found))))

    # --- marks -----------------------------------------------------------------------------

    def _marked(self, places: Sequence[_Place]) -> Content:
        by_leaf: dict[int, list[_Place]] = {}
        for place in places:
            by_leaf.setdefault(place.leaf, []).append(place)
        number = -1

        def mark(text: str, is_own: bool) -> str:
            nonlocal number
            number += 1
            pieces, at = [], 0
            for place in sorted(by_leaf.get(number, ()), key=lambda p: p.start):
                pieces += [text[at : place.start], self._marks[self._text(place)]]
                at = place.end
            return "".join([*pieces, text[at:]])

        return _mapped(self._content, mark)

    def _aligned(self, plain: str, places: Sequence[_Place]) -> list[Span] | None:
        """Where these places are in the plain text; None where marks change the rest of it."""
        self._n_looks += 1
        try:
            marked = self._render(self._marked(places))
        except TemplateFailed:
            return None
        pieces = self._mark.split(marked)  # text, mark, text, mark, text
        if not plain.startswith(pieces[0]):
            return None
        at, found = len(pieces[0]), []
        for mark, piece in zip(pieces[1::2], pieces[2::2], strict=True):
            kind = self._kinds[mark]
            for spelled in _spellings(kind):
                if plain.startswith(spelled + piece, at):
                    break
            else:
                return None
            if spelled == kind:
                found.append((at, at + len(kind)))
            at += len(spelled) + len(piece)
        return found if at == len(plain) else None

    def _unmarked(self, marked: str) -> Rendered:
        pieces = self._mark.split(marked)
        text, spans = pieces[0], []
        for mark, piece in zip(pieces[1::2], pieces[2::2], strict=True):
            kind = self._kinds[mark]
            spans.append((len(text), len(text) + len(kind)))
            text += kind + piece
        return Rendered(text, tuple(spans))

    def _text(self, place: _Place) -> str:
        return self._leaves[place.leaf][place.start : place.end]

    # --- templates that look for tokens in what they are given -------------------------------

    def _without_inspected(self, plain: str) -> list[Span]:
        """A template that inspects a token does something else where it is marked.

        Such tokens stay as they are, and points beside them tell where they have gone.
        """
        kept = self._uninspected(plain)
        known = set(kept)
        left: dict[int, list[_Place]] = {}
        for place in self._places:
            if place not in known:
                left.setdefault(place.leaf, []).append(place)
        found = self._aligned(plain, kept) or []
        lost: list[_Place] = []
        for places in left.values():
            spans = self._beside(plain, places)
            if spans is None:
                lost += places
            else:
                found += spans
        return found + self._by_context(plain, lost)

    def _uninspected(self, plain: str) -> list[_Place]:
        """Of all places those that can be marked together, found kind by kind."""
        kinds: dict[str, list[_Place]] = {}
        for place in self._places:
            kinds.setdefault(self._text(place), []).append(place)
        kept: list[_Place] = []
        unsure = [list(kinds.values())]
        while unsure and self._may_look(MAX_LOOKS):
            groups = unsure.pop()
            places = [p for group in groups for p in group]
            if self._aligned(plain, [*kept, *places]) is not None:
                kept += places
            elif len(groups) > 1:
                half = len(groups) // 2
                unsure += [groups[:half], groups[half:]]
        return kept

    def _beside(self, plain: str, places: Sequence[_Place]) -> list[Span] | None:
        """By a point of the same text that the template does not care about; None if it has none."""
        leaf, text = places[0].leaf, self._leaves[places[0].leaf]
        points = (
            len(text.rstrip()),
            len(text) - len(text.lstrip()),
            places[0].end,
            places[-1].start,
        )
        for point in dict.fromkeys(points):
            if not self._may_look(2 * MAX_LOOKS):
                break
            found = self._aligned(plain, [_Place(leaf, point, point)])
            if found is not None:
                spans: list[Span] = []
                for at, _ in found:
                    low = point - _n_common_before(plain, at, text, point)
                    high = point + _n_common_behind(plain, at, text, point)
                    inside = places[bisect_left(places, low, key=_start) :]
                    for place in inside[: bisect_right(inside, high, key=_end)]:
                        spans.append((at + place.start - point, at + place.end - point))
                return spans
        return None

    def _may_look(self, most: int) -> bool:
        return self._n_looks < most and time.thread_time() < self._until

    def _by_context(self, plain: str, places: Sequence[_Place]) -> list[Span]:
        """By the characters before or behind it, of which there must be some."""
        around: dict[str, tuple[set[str], set[str]]] = {}
        for leaf, run in groupby(places, key=lambda p: p.leaf):
            text = self._leaves[leaf]
            first, last = len(text) - len(text.lstrip()), len(text.rstrip())
            for place in run:
                before, behind = around.setdefault(self._text(place), (set(), set()))
                before.add(text[max(place.start - CONTEXT, first) : place.start])
                behind.add(text[place.end : min(place.end + CONTEXT, last)])
        found = []
        for kind, (before, behind) in around.items():
            n_before, n_behind = ({len(c) for c in some} - {0} for some in (before, behind))
            at = plain.find(kind)
            while at >= 0:
                end = at + len(kind)
                if any(at >= n and plain[at - n : at] in before for n in n_before) or any(
                    end + n <= len(plain) and plain[end : end + n] in behind for n in n_behind
                ):
                    found.append((at, end))
                at = plain.find(kind, at + 1)
        return found


def _letters(n: int) -> str:
    return "".join(secrets.choice(ascii_lowercase) for _ in range(n))


def _start(place: _Place) -> int:
    return place.start


def _end(place: _Place) -> int:
    return place.end


def _n_common_before(plain: str, at: int, text: str, point: int) -> int:
    """How many characters before the two places are the same."""
    low, high = 0, min(at, point)
    while low < high:
        n = (low + high + 1) // 2
        same = plain.startswith(text[point - n : point - low], at - n)
        low, high = (n, high) if same else (low, n - 1)
    return low


def _n_common_behind(plain: str, at: int, text: str, point: int) -> int:
    """How many characters behind the two places are the same."""
    low, high = 0, min(len(plain) - at, len(text) - point)
    while low < high:
        n = (low + high + 1) // 2
        same = plain.startswith(text[point + low : point + n], at + low)
        low, high = (n, high) if same else (low, n - 1)
    return low


class _Scanner:
    """Finds any of many fixed texts, of those that begin together the longest. Immutable.

    One expression for each first character, which `re` looks for as fast as memory is read.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        kinds = sorted({t for t in texts if t})
        by_first = [list(run) for _, run in groupby(kinds, key=lambda t: t[0])]
        self._each = [re.compile(_trie(group)) for group in by_first]
        self._whole = re.compile("|".join(p.pattern for p in self._each) or "(?!)")

    def is_in(self, text: str) -> bool:
        return any(p.search(text) for p in self._each)

    def all(self, text: str) -> Iterator[re.Match[str]]:
        return self._whole.finditer(text) if self.is_in(text) else iter(())

    def sub(self, change: Callable[[re.Match[str]], str], text: str) -> str:
        return self._whole.sub(change, text) if self.is_in(text) else text


def _trie(texts: Sequence[str]) -> str:
    """An expression that shares what texts begin with: alternatives are tried one by one."""
    rest: dict[str, list[str]] = {}
    for text in texts:
        if text:
            rest.setdefault(text[0], []).append(text[1:])
    if not rest:
        return ""
    body = "|".join(re.escape(char) + _trie(tails) for char, tails in rest.items())
    return f"(?:{body})?" if "" in texts else f"(?:{body})" if len(rest) > 1 else body


def _spellings(text: str) -> tuple[str, ...]:
    """As it is; as a JSON string has it; as one that is safe in HTML has it, like Jinja's own."""
    quoted = json.dumps(text)[1:-1]
    safe = "".join(f"\\u{ord(c):04x}" if c in "<>&'" else c for c in quoted)
    return (text, json.dumps(text, ensure_ascii=False)[1:-1], quoted, safe)


def _text_of(parts: Iterable[Part]) -> str:
    return "".join(p.text for p in parts if isinstance(p, TextPart))


# --- the texts of a chat -------------------------------------------------------------------

Change = Callable[[str, bool], str]
"""(text, whether it is the assistant's own) -> text."""


def _texts(content: Content) -> Iterator[tuple[str, bool]]:
    """Every text with whether the assistant said it; texts of a message that touch, as one."""
    for message in content.messages:
        is_own = message.role == "assistant"
        for is_text, run in groupby(message.parts, key=lambda p: isinstance(p, TextPart)):
            if is_text:
                yield _text_of(run), is_own
        if message.reasoning is not None:
            yield message.reasoning, True
        yield from ((text, False) for text in (message.name, message.tool_call_id) if text)
        for call in message.tool_calls:
            yield from ((text, False) for text in (call.id, call.name, *_leaves(call.arguments)))
    for tool in content.tools:
        yield from ((text, False) for text in (tool.name, tool.description))
        yield from ((text, False) for text in _leaves(tool.parameters))
    yield from ((text, False) for text in _leaves(content.kwargs))


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield key
            yield from _leaves(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _leaves(inner)


def _mapped(content: Content, change: Change) -> Content:
    def plain(text: str) -> str:
        return change(text, False)

    return Content(
        tuple(_changed_message(m, change) for m in content.messages),
        tuple(
            replace(
                t,
                name=plain(t.name),
                description=plain(t.description),
                parameters=_changed(t.parameters, plain),
            )
            for t in content.tools
        ),
        _changed(content.kwargs, plain),
    )


def _changed_message(message: Message, change: Change) -> Message:
    is_own = message.role == "assistant"

    def plain(text: str | None) -> str | None:
        return None if text is None else change(text, False)

    def call(c: ToolCall) -> ToolCall:
        arguments = _changed(c.arguments, lambda text: change(text, False))
        return ToolCall(change(c.id, False), change(c.name, False), arguments)

    return replace(
        message,
        parts=tuple(
            TextPart(change(p.text, is_own)) if isinstance(p, TextPart) else p
            for p in message.parts
        ),
        tool_calls=tuple(map(call, message.tool_calls)),
        tool_call_id=plain(message.tool_call_id),
        name=plain(message.name),
        reasoning=None if message.reasoning is None else change(message.reasoning, True),
    )


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(k): _changed(v, change) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_changed(v, change) for v in value]
    return value
