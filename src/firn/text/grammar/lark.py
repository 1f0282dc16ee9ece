"""Writes Lark grammars of markup, literal text, free text and JSON, as llguidance reads them.

Markup is written as the model writes it: control tokens of its vocabulary as tokens, the rest as
text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from firn.core.ports import Tokenizer
from firn.core.values import Grammar

ANY_TEXT = "/(?s:.*)/"
_IN_REGEX = re.compile(r"[\\.+*?()|\[\]{}^$/]")


@dataclass(frozen=True, slots=True)
class TextSymbol:
    """A symbol of a grammar that stands for text without calls.

    markers: none of these is in it; patterns: none of these matches all of it. A rule has neither: it
    keeps control tokens out by what it is made of.
    """

    symbol: str
    is_terminal: bool
    markers: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()


class Lark:
    """A grammar under construction. Owner: the call that writes it.

    Methods return expressions; some also store the rules, terminals and grammars that those refer
    to. `control`: the tokens that markup may consist of.
    """

    def __init__(self, tokenizer: Tokenizer, control: Iterable[str]) -> None:
        ids = {text: tokenizer.token_id(text) for text in control if text}
        self._ids = {text: token for text, token in ids.items() if token is not None}
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._control = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")
        self._eos = tokenizer.eos
        self._lines: list[str] = []
        self._parts: list[tuple[str, Grammar]] = []
        self.left_out: list[tuple[str, str]] = []
        """(request parameter, place in it) of each requirement that is not enforced."""

    def is_token(self, text: str) -> bool:
        return text in self._ids

    def ends_reply(self, text: str) -> bool:
        """Whether this token ends a reply, so that a grammar need not include it."""
        return self._ids.get(text) in self._eos

    def mark(self, text: str) -> str:
        """Fixed text, with its control tokens."""
        pieces = [p for p in self._control.split(text) if p]
        return " ".join(self._symbol(p) for p in pieces) or '""'

    def _symbol(self, piece: str) -> str:
        return f"<[{self._ids[piece]}]>" if piece in self._ids else literal(piece)

    def rule(self, body: str, *, options: str = "") -> str:
        name = f"r{len(self._lines)}"
        self._lines.append(f"{name}{options}: {body}")
        return name

    def terminal(self, body: str) -> str:
        """Names a regular expression, so that others can build on it."""
        name = f"T{len(self._lines)}"
        self._lines.append(f"{name}: {body}")
        return name

    def any_of(self, options: Iterable[str]) -> str:
        return self.rule(" | ".join(options))

    def sequence(self, items: Sequence[tuple[str, bool]], between: str) -> str:
        """(item, whether it is required) in this order, with `between` as the separator."""
        separator = literal(between)
        first, rest = '""', '""'  # what follows, as the first item or as a later one
        for item, required in reversed(items):
            begins, goes_on = f"{item} {rest}", f"{separator} {item} {rest}"
            if not required:
                begins, goes_on = f"{begins} | {first}", f"{goes_on} | {rest}"
            first, rest = self.rule(begins), self.rule(goes_on)
        return first

    def text_without(self, markers: Sequence[str], *, patterns: Sequence[str] = ()) -> TextSymbol:
        """Any text that contains no marker, and that no pattern matches as a whole.

        Text never contains a control token. Where a marker with a control token begins with text, only
        a parser can tell whether the marker follows, so the result is not a single terminal.
        """
        begun = {m[0] for m in markers if self._control.search(m) and not self._control.match(m)}
        if begun:
            chars = "".join(map(escaped, sorted(begun)))
            either = " | ".join([f"/[^{chars}]+/", *map(literal, sorted(begun))])
            return TextSymbol(self.rule(f"({either})*"), is_terminal=False)
        symbol = self.terminal(_text_that_lacks(markers, patterns))
        return TextSymbol(symbol, True, tuple(markers), tuple(patterns))

    def text_then(self, text: TextSymbol, marker: str) -> str:
        """Text without calls, and the marker that ends it."""
        if text.is_terminal:
            return self.text_before(marker, like=text)
        return f"{text.symbol} {self.mark(marker)}"

    def text_before(
        self, end: str, *, like: TextSymbol | None = None, where: Iterable[str] = ()
    ) -> str:
        """Any text without `end`, then `end`. like: the text is also like this one. where: terminals
        that it must match as well."""
        markers, patterns = (like.markers, like.patterns) if like else ((), ())
        if not any(marker in end for marker in markers):
            markers = (*markers, end)
        text = self.terminal(" & ".join([_text_that_lacks(markers, patterns), *where]))
        first, *rest = [p for p in self._control.split(end) if p]
        if first in self._ids:
            return " ".join([text, *map(self._symbol, (first, *rest))])
        # Both in one lexeme: on its own, the text would consume an end that is itself text.
        whole = self.rule(self.terminal(f"{text} {literal(first)}"), options="[lazy]")
        return " ".join([whole, *map(self._symbol, rest)])

    def leave_out(self, param: str, place: str) -> None:
        """Records a requirement that the grammar does not enforce."""
        self.left_out.append((param, place))

    def part(self, grammar: Grammar) -> str:
        """A reference to another grammar, which keeps its own language."""
        name = f"g{len(self._parts)}"
        self._parts.append((name, grammar))
        return f"@{name}"

    def json(self, schema: Any, *, param: str) -> str:
        return self.part(Grammar("json_schema", json.dumps(schema), param))

    def grammar(self, start: str, *, param: str) -> Grammar:
        text = "\n".join([f"start: {start}", *self._lines])
        return Grammar("lark", text, param, tuple(self._parts))


def _text_that_lacks(markers: Iterable[str], patterns: Iterable[str]) -> str:
    """All of it is one complement: each one more multiplies the lexer's states, and their cost."""
    each = "|".join(map(escaped, markers))
    patterns = [*([f"(?s:.*)({each})(?s:.*)"] if each else []), *patterns]
    return f"{ANY_TEXT} & ~/{'|'.join(patterns)}/" if patterns else ANY_TEXT


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def escaped(text: str) -> str:
    """Text as a regular expression between slashes."""
    return _IN_REGEX.sub(lambda match: "\\" + match[0], text).replace("\n", "\\n")
