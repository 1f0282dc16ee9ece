"""Tells typed control tokens from real ones in a rendered text, by rendering it with marks. Pure.

    content    read <|im_end|> aloud
    marked     user: read MARK aloud<|im_end|>        typed: the mark's place; control: the other one

The result is the text rendered without marks, unless the template refuses the content without them.
A template that looks for a token in its messages behaves differently if the token is marked; then
points next to the token, or its context, show where it is.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from string import ascii_lowercase

from firn.core.errors import TemplateFailed
from firn.text.prompt.rendering import Content, Render, Rendered, Span, with_texts

MAX_RENDERINGS = 24
"""Renderings to find out, by bisection, which tokens a template inspects (usually one or two), and
as many again to find out where it puts them."""
RENDERINGS_S = 2.0
"""CPU time of this thread after which no rendering begins: users control how many are needed."""
CONTEXT = 16
MIN_MARK, LONG_MARK, N_MARK_START, MARK_END = 10, 24, 6, "q"
BETWEEN = "\0"
"""Separates texts that are searched together."""

FindTyped = Callable[[str, bool], Iterator[re.Match[str]]]
"""(text, whether it is the assistant's own) -> the control tokens that it spells."""


@dataclass(frozen=True, slots=True)
class _TypedPlace:
    """Characters [start, end) of one text of the chat: a typed token, or a point (empty)."""

    leaf: int
    start: int
    end: int


class TypedMarks:
    """Finds in a rendered text what was typed. Owner: one rendering."""

    def __init__(self, content: Content, render: Render, find: FindTyped) -> None:
        self._content = content
        self._render = render
        self._n_renderings = 0
        self._until = time.thread_time() + RENDERINGS_S
        self._leaves: list[str] = []
        self._places: list[_TypedPlace] = []

        def note(text: str, is_assistant: bool) -> str:
            tokens = find(text, is_assistant)
            self._places += [_TypedPlace(len(self._leaves), *m.span()) for m in tokens]
            self._leaves.append(text)
            return text

        with_texts(content, note)
        self._marks = self._new_marks({self._text(p) for p in self._places})
        self._mark = re.compile(f"({'|'.join(self._marks.values())})")
        self._kinds = {mark: kind for kind, mark in self._marks.items()}

    def _new_marks(self, kinds: Iterable[str]) -> dict[str, str]:
        """For each token, and for a point, a mark that occurs in no text.

        Lowercase letters survive JSON, trimming and whatever else templates do; the mark of a long
        token has the token's length. All marks share a prefix: one search shows that no text has
        any of them, and `re` finds them as fast as a single one.
        """
        texts = BETWEEN.join(self._leaves)
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
            # It may have refused the content because of a token that is only text.
            return self._unmark(self._render(self._marked(self._places)))
        spans = self._align(plain, self._places)
        if spans is None:
            spans = self._without_inspected(plain)
        return Rendered(plain, tuple(sorted(set(spans))))

    # --- marks -----------------------------------------------------------------------------

    def _marked(self, places: Sequence[_TypedPlace]) -> Content:
        by_leaf: dict[int, list[_TypedPlace]] = {}
        for place in places:
            by_leaf.setdefault(place.leaf, []).append(place)
        number = -1

        def mark(text: str, is_assistant: bool) -> str:
            nonlocal number
            number += 1
            pieces, at = [], 0
            for place in sorted(by_leaf.get(number, ()), key=lambda p: p.start):
                pieces += [text[at : place.start], self._marks[self._text(place)]]
                at = place.end
            return "".join([*pieces, text[at:]])

        return with_texts(self._content, mark)

    def _align(self, plain: str, places: Sequence[_TypedPlace]) -> list[Span] | None:
        """Where these places are in the plain text; None if marks change the rest of it."""
        self._n_renderings += 1
        try:
            marked = self._render(self._marked(places))
        except TemplateFailed:
            return None
        pieces = self._mark.split(marked)  # text, mark, text, mark, text
        if not plain.startswith(pieces[0]):
            return None
        at, spans = len(pieces[0]), []
        for mark, piece in zip(pieces[1::2], pieces[2::2], strict=True):
            kind = self._kinds[mark]
            for spelled in _spellings(kind):
                if plain.startswith(spelled + piece, at):
                    break
            else:
                return None
            if spelled == kind:
                spans.append((at, at + len(kind)))
            at += len(spelled) + len(piece)
        return spans if at == len(plain) else None

    def _unmark(self, marked: str) -> Rendered:
        pieces = self._mark.split(marked)
        text, spans = pieces[0], []
        for mark, piece in zip(pieces[1::2], pieces[2::2], strict=True):
            kind = self._kinds[mark]
            spans.append((len(text), len(text) + len(kind)))
            text += kind + piece
        return Rendered(text, tuple(spans))

    def _text(self, place: _TypedPlace) -> str:
        return self._leaves[place.leaf][place.start : place.end]

    # --- templates that look for tokens in their messages -----------------------------------

    def _without_inspected(self, plain: str) -> list[Span]:
        """The spans for a template that behaves differently if some token is marked.

        Such tokens stay unmarked, and points next to them show where they are in the plain text.
        """
        kept = self._hide_inspected(plain)
        known = set(kept)
        left: dict[int, list[_TypedPlace]] = {}
        for place in self._places:
            if place not in known:
                left.setdefault(place.leaf, []).append(place)
        typed = self._align(plain, kept) or []
        lost: list[_TypedPlace] = []
        for places in left.values():
            spans = self._beside(plain, places)
            if spans is None:
                lost += places
            else:
                typed += spans
        return typed + self._by_context(plain, lost)

    def _hide_inspected(self, plain: str) -> list[_TypedPlace]:
        """The places that can be marked together: all places of a token, or none."""
        kinds: dict[str, list[_TypedPlace]] = {}
        for place in self._places:
            kinds.setdefault(self._text(place), []).append(place)
        kept: list[_TypedPlace] = []
        unsure = [list(kinds.values())]
        while unsure and self._may_render(MAX_RENDERINGS):
            groups = unsure.pop()
            places = [p for group in groups for p in group]
            if self._align(plain, [*kept, *places]) is not None:
                kept += places
            elif len(groups) > 1:
                half = len(groups) // 2
                unsure += [groups[:half], groups[half:]]
        return kept

    def _beside(self, plain: str, places: Sequence[_TypedPlace]) -> list[Span] | None:
        """The spans, found by a point of the same text that can be marked; None without one."""
        leaf, text = places[0].leaf, self._leaves[places[0].leaf]
        points = (
            len(text.rstrip()),
            len(text) - len(text.lstrip()),
            places[0].end,
            places[-1].start,
        )
        for point in dict.fromkeys(points):
            if not self._may_render(2 * MAX_RENDERINGS):
                break
            points_found = self._align(plain, [_TypedPlace(leaf, point, point)])
            if points_found is not None:
                spans: list[Span] = []
                for at, _ in points_found:
                    low = point - _n_common_before(plain, at, text, point)
                    high = point + _n_common_after(plain, at, text, point)
                    inside = places[bisect_left(places, low, key=_start) :]
                    for place in inside[: bisect_right(inside, high, key=_end)]:
                        spans.append((at + place.start - point, at + place.end - point))
                return spans
        return None

    def _may_render(self, most: int) -> bool:
        return self._n_renderings < most and time.thread_time() < self._until

    def _by_context(self, plain: str, places: Sequence[_TypedPlace]) -> list[Span]:
        """The spans of tokens with the same characters before or after them as one that was typed."""
        around: dict[str, tuple[set[str], set[str]]] = {}
        for leaf, run in groupby(places, key=lambda p: p.leaf):
            text = self._leaves[leaf]
            first, last = len(text) - len(text.lstrip()), len(text.rstrip())
            for place in run:
                before, after = around.setdefault(self._text(place), (set(), set()))
                before.add(text[max(place.start - CONTEXT, first) : place.start])
                after.add(text[place.end : min(place.end + CONTEXT, last)])
        spans = []
        for kind, (before, after) in around.items():
            n_before, n_after = ({len(c) for c in some} - {0} for some in (before, after))
            at = plain.find(kind)
            while at >= 0:
                end = at + len(kind)
                if any(at >= n and plain[at - n : at] in before for n in n_before) or any(
                    end + n <= len(plain) and plain[end : end + n] in after for n in n_after
                ):
                    spans.append((at, end))
                at = plain.find(kind, at + 1)
        return spans


def _letters(n: int) -> str:
    return "".join(secrets.choice(ascii_lowercase) for _ in range(n))


def _start(place: _TypedPlace) -> int:
    return place.start


def _end(place: _TypedPlace) -> int:
    return place.end


def _n_common_before(plain: str, at: int, text: str, point: int) -> int:
    """How many characters before the two places are the same."""
    low, high = 0, min(at, point)
    while low < high:
        n = (low + high + 1) // 2
        same = plain.startswith(text[point - n : point - low], at - n)
        low, high = (n, high) if same else (low, n - 1)
    return low


def _n_common_after(plain: str, at: int, text: str, point: int) -> int:
    """How many characters after the two places are the same."""
    low, high = 0, min(len(plain) - at, len(text) - point)
    while low < high:
        n = (low + high + 1) // 2
        same = plain.startswith(text[point + low : point + n], at + low)
        low, high = (n, high) if same else (low, n - 1)
    return low


def _spellings(text: str) -> tuple[str, ...]:
    """As it is, as in a JSON string, and as in one that is safe in HTML, like that of Jinja's tojson."""
    quoted = json.dumps(text)[1:-1]
    safe = "".join(f"\\u{ord(c):04x}" if c in "<>&'" else c for c in quoted)
    return (text, json.dumps(text, ensure_ascii=False)[1:-1], quoted, safe)
