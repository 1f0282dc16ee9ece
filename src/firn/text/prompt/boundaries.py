"""Where the messages of a prompt end, in tokens: what a later prompt is likely to share. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

import numpy as np

from firn.core.ports import Tokenizer
from firn.core.values import Message, Prompt, TokenArray
from firn.text.prompt.arrange import strip_changing_lines
from firn.text.prompt.essential import Opener, Ranges, essential
from firn.text.prompt.rendering import Rendered

HEADER_TOKENS = 16
"""A reply's header is shorter than this. A message this short needs no boundary of its own."""

PIECE_WITHIN = 512
_PIECE = re.compile(r"[\w .,:;-]{16,64}")
"""Long enough to occur nowhere else, and without characters that templates escape."""


class Boundaries:
    """Immutable. `openers` are the tokens that begin a message."""

    def __init__(self, tokenizer: Tokenizer, openers: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self._openers = openers
        marks = sorted((tokenizer.decode([t]) for t in openers), key=len, reverse=True)
        self._opener = re.compile("|".join(map(re.escape, marks)) or "(?!)")

    def marked(
        self,
        prompt: Prompt,
        rendered: Rendered,
        messages: Sequence[Message],
        *,
        sent: Sequence[Message],
        keeps_header: bool,
    ) -> Prompt:
        """The prompt with the ends of its messages; the next turn shares it up to the last one.

        sent: the messages before they were arranged.
        """
        ids = prompt.ids
        starts = self._message_starts(ids)
        points = {int(p) for p in starts}
        if points and keeps_header:
            # All but the last token, which the tokenizer may merge with the reply's first.
            header, end = max(points), len(ids) - 1
            points = (points - {header} if end - header < HEADER_TOKENS else points) | {end}
        points.update(self._end_of_system(rendered.text, ids, sent))
        boundaries = tuple(sorted(p for p in points if 0 < p < len(ids)))
        return replace(prompt, boundaries=boundaries, hints=self._hints(rendered, starts, messages))

    def essential(self, prompt: Prompt, rendered: Rendered, messages: Sequence[Message]) -> Ranges:
        """The ranges of the prompt that must be read whatever else is skipped."""
        starts = self._message_starts(prompt.ids)
        typed = {start for start, _ in rendered.typed}
        matches = [m for m in self._opener.finditer(rendered.text) if m.start() not in typed]
        if len(matches) != len(starts):  # the tokenizer reads some of them as text
            return ((0, len(prompt)),)
        openers = [Opener(*m.span(), int(t)) for m, t in zip(matches, starts, strict=True)]

        def count(text: str) -> int:
            return len(self._tokenizer.encode(text, add_special=False))

        return essential(rendered.text, openers, messages, n_tokens=len(prompt), count=count)

    def _message_starts(self, ids: TokenArray) -> TokenArray:
        """Positions of the tokens that begin a message; the last one begins the reply's header."""
        if not self._openers:
            return np.empty(0, dtype=np.int64)
        return np.flatnonzero(np.isin(ids, self._openers)).astype(np.int64)

    def _hints(
        self, rendered: Rendered, starts: TokenArray, messages: Sequence[Message]
    ) -> tuple[int, ...]:
        """The ends of the messages that the caller has marked.

        Each message is searched for in the rendered text, after the previous one. The number of
        openers up to its end is the number of messages begun; the message ends at the next opener.
        """
        if not self._openers or not any(m.checkpoint for m in messages):
            return ()
        text = rendered.text
        typed = {start for start, _ in rendered.typed}
        ends: list[int] = []
        at = n_begun = 0
        for message in messages:
            words = message.text.strip()
            end = _end_of(words, text, at) if words else -1
            if end < 0:
                continue
            n_begun += sum(m.start() not in typed for m in self._opener.finditer(text, at, end))
            at = end
            if message.checkpoint and n_begun < len(starts):
                ends.append(int(starts[n_begun]))
        return tuple(dict.fromkeys(ends))

    def _end_of_system(
        self, text: str, ids: TokenArray, messages: Sequence[Message]
    ) -> Sequence[int]:
        """Where the system prompt ends if it is inside the first user message.

        Other chats share the prompt up to there, but no token marks the place: it is found by
        counting the bytes of the tokens. With a tokenizer that changes the text, there is no
        boundary.
        """
        leading = list(takewhile(lambda m: m.role == "system", messages))
        first = messages[len(leading) : len(leading) + 1]
        if not leading or not first or first[0].role != "user":
            return ()
        system, user = strip_changing_lines(leading[-1].text).strip(), first[0].text.strip()
        at = text.find(system) if system and user else -1
        if at < 0:
            return ()
        end = at + len(system)
        start = text.find(user, end)
        if start < 0 or self._has_opener(text[end:start]):
            return ()
        n_bytes = len(text[:end].encode())
        n_seen = 0
        for i, token in enumerate(ids):
            n_seen += len(self._tokenizer.token_bytes(int(token)))
            if n_seen > n_bytes:
                return (i,) if text.startswith(self._tokenizer.decode(ids[:i].tolist())) else ()
        return ()

    def _has_opener(self, text: str) -> bool:
        ids = self._tokenizer.encode(text, add_special=False)
        return any(t in self._openers for t in ids)


def _end_of(words: str, text: str, at: int) -> int:
    """Where a message's words end in the text after `at`; -1 if they are not there.

    If the template has escaped the words, the end of a piece that it left unchanged: otherwise, the
    search for each of many escaped messages would read the whole text.
    """
    piece = _PIECE.search(words, 0, PIECE_WITHIN)
    if piece is None:
        start = text.find(words, at)
        return start + len(words) if start >= 0 else -1
    start = text.find(piece[0], at)
    if start < 0:
        return -1
    begin = start - piece.start()
    is_whole = begin >= at and text.startswith(words, begin)
    return begin + len(words) if is_whole else start + len(piece[0])
