"""Parses regular expressions, as far as grammars need it. Pure.

Look-around, back references and anchors raise UnsupportedRegex.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a", "0": "\0"}
_NAMED = re.compile(r"\?P?<\w+>")
_FLAGS = re.compile(r"\?([is]*)(?:-[is]+)?:")
_REPEAT = re.compile(r"(?:[*+?]|\{\d+(?:,\d*)?\})\??")
ANY, NOT_NEWLINE = r"[\s\S]", r"[^\n]"


class UnsupportedRegex(ValueError):
    """A grammar cannot express this regular expression."""


@dataclass(frozen=True, slots=True)
class RegexChar:
    char: str


@dataclass(frozen=True, slots=True)
class RegexClass:
    """One character out of a class, which is kept as written."""

    text: str


@dataclass(frozen=True, slots=True)
class RegexGroup:
    """Any of these sequences."""

    options: tuple[tuple[RegexItem, ...], ...]
    any_case: bool = False


@dataclass(frozen=True, slots=True)
class RegexItem:
    """`repeat` is "", or a quantifier: * + ? {2,5}."""

    atom: RegexChar | RegexClass | RegexGroup
    repeat: str = ""


def parse(pattern: str, *, any_line: bool = False) -> RegexGroup:
    """any_line: a dot also matches line breaks. Raises UnsupportedRegex."""
    reader = _RegexParser(pattern)
    tree = reader.group(any_line)
    if reader.at < len(pattern):
        raise UnsupportedRegex("an unmatched closing bracket")
    return tree


class _RegexParser:
    """Owner: one call of `parse`."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self.at = 0

    def _peek(self) -> str:
        return self._pattern[self.at : self.at + 1]

    def _next(self, n: int = 1) -> str:
        text = self._pattern[self.at : self.at + n]
        self.at += n
        return text

    def group(self, any_line: bool, any_case: bool = False) -> RegexGroup:
        options: list[tuple[RegexItem, ...]] = []
        items: list[RegexItem] = []
        while self._peek() not in ("", ")"):
            if self._peek() == "|":
                self.at += 1
                options.append(tuple(items))
                items = []
                continue
            atom = self._atom(any_line)
            repeat = _REPEAT.match(self._pattern, self.at)
            self.at = repeat.end() if repeat else self.at
            # Greedy or lazy makes a difference to a search, not to a language.
            times = repeat[0] if repeat else ""
            items.append(
                RegexItem(atom, times[:-1] if len(times) > 1 and times[-1] == "?" else times)
            )
        return RegexGroup((*options, tuple(items)), any_case)

    def _atom(self, any_line: bool) -> RegexChar | RegexClass | RegexGroup:
        char = self._next()
        match char:
            case "\\":
                return self._escape()
            case "[":
                return self._class()
            case "(":
                return self._inner(any_line)
            case ".":
                return RegexClass(ANY if any_line else NOT_NEWLINE)
            case "^" | "$":
                raise UnsupportedRegex("anchors are not supported here")
            case "*" | "+" | "?":
                raise UnsupportedRegex(f"nothing to repeat before {char}")
        return RegexChar(char)

    def _inner(self, any_line: bool) -> RegexGroup:
        any_case = False
        if self._peek() == "?":
            named, flags = (p.match(self._pattern, self.at) for p in (_NAMED, _FLAGS))
            if not named and not flags:
                raise UnsupportedRegex("this kind of group is not supported here")
            if flags:
                any_line, any_case = any_line or "s" in flags[1], "i" in flags[1]
            self.at = (named or flags).end()  # type: ignore[union-attr]
        group = self.group(any_line, any_case)
        if self._next() != ")":
            raise UnsupportedRegex("a group is not closed")
        return group

    def _escape(self) -> RegexChar | RegexClass:
        char = self._next()
        if char in ("p", "P"):
            return RegexClass(f"[\\{char}{self._braced() or self._next()}]")
        if char and char in "dDwWsS":
            return RegexClass(f"[\\{char}]")
        if char in ("x", "u", "U"):
            digits = self._braced().strip("{}") or self._next({"x": 2, "u": 4, "U": 8}[char])
            try:
                return RegexChar(chr(int(digits, 16)))
            except (ValueError, OverflowError):
                raise UnsupportedRegex(f"\\{char}{digits} is not a character") from None
        if not char or char in "bBAzZG" or (char.isdigit() and char != "0"):
            raise UnsupportedRegex(f"\\{char} is not supported here")
        return RegexChar(_ESCAPED.get(char, char))

    def _braced(self) -> str:
        end = self._pattern.find("}", self.at)
        return self._next(end + 1 - self.at) if self._peek() == "{" and end >= 0 else ""

    def _class(self) -> RegexClass:
        """Reads up to the bracket that closes the class; classes may contain classes."""
        start, depth = self.at - 1, 1
        self.at += self._peek() == "^"
        self.at += self._peek() == "]"
        while depth:
            char = self._next()
            if not char:
                raise UnsupportedRegex("a character class is not closed")
            self.at += char == "\\"
            depth += (char == "[") - (char == "]")
        return RegexClass(self._pattern[start : self.at])
