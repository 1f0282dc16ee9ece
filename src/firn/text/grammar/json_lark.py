"""Rewrites a Lark grammar for texts inside a JSON string, where characters are escaped. Pure.

Where the grammar of a free-form tool has a line break, a model that writes its calls as JSON writes
a backslash and an n. Literals and regular expressions are rewritten one by one; the rules around
them are kept. A repetition of escaped characters becomes a rule: llguidance takes the longest match
of a terminal and never backtracks, so a terminal that may end before a backslash must not try to
match it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import regex

from firn.text.grammar.regex_tree import (
    RegexChar,
    RegexClass,
    RegexGroup,
    RegexItem,
    UnsupportedRegex,
    parse,
)

SPECIAL = {c: json.dumps(c)[1:-1] for c in ('"', "\\", *map(chr, range(32)))}
"""Characters that JSON escapes, with their escapes."""
_PLAIN = r'[^"\\\x00-\x1f]'
_TOKEN = re.compile(
    r"""(?P<comment>(?:\#|//)[^\n]*)
      | (?P<string>"(?:\\.|[^"\\])*"i?)
      | (?P<regex>/(?:\\.|[^/\\\n])+/[imslux]*)
      | (?P<imports>%import\s+common[^\n]*)
      | (?P<ignore>%ignore\b)
      | (?P<range>[ \t]*\.\.[ \t]*)
      | (?P<name>[?!_]?[A-Za-z][A-Za-z0-9_-]*)
      | (?P<other>\s+|->|[:|()\[\]{},*+?.0-9-])""",
    re.VERBOSE,
)
_COMMON = {
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\[^\n])*"',
}
"""Terminals of Lark's library that contain characters that JSON escapes."""
MAX_CHARS = 2**16
"""Length limit of a user's grammar: compile time is quadratic in its alternatives."""


class UnsupportedGrammar(ValueError):
    """Something in this grammar has no counterpart inside a JSON string."""


def for_json_string(definition: str) -> str:
    """This grammar, for texts between the quotes of a JSON string. Raises UnsupportedGrammar."""
    if len(definition) > MAX_CHARS:
        raise UnsupportedGrammar(f"it has more than {MAX_CHARS} characters")
    try:
        return _Quoting(definition).result()
    except UnsupportedRegex as e:
        raise UnsupportedGrammar(str(e)) from e
    except RecursionError:
        raise UnsupportedGrammar("its brackets are nested too deeply") from None


@dataclass(slots=True)
class _Statement:
    """A definition, or any other statement, which has no name."""

    name: str = ""
    pieces: list[tuple[str, str]] = field(default_factory=list)
    """(kind, text): names unchanged, the rest rewritten."""
    needs_rule: bool = False


class _Quoting:
    """Owner: one call of `for_json_string`."""

    def __init__(self, definition: str) -> None:
        self._tokens = list(_tokens(definition))
        self._sets: dict[str, str] = {}
        self._lines: list[str] = []

    def result(self) -> str:
        statements = [s for line in self._split() for s in self._rewritten(line)]
        as_rules = self._as_rules(statements)

        def shown(statement: _Statement) -> str:
            return "".join(
                as_rules.get(text, text) if kind == "name" else text
                for kind, text in statement.pieces
            )

        return "\n".join([*filter(None, map(str.strip, map(shown, statements))), *self._lines])

    def _split(self) -> Iterator[list[tuple[str, str]]]:
        """The tokens of each statement: one begins at a name before a colon, or at a percent sign."""
        current: list[tuple[str, str]] = []
        for (kind, text), ahead in zip(self._tokens, _next_words(self._tokens), strict=True):
            begins = kind in ("imports", "ignore") or (kind == "name" and ahead[:1] in (":", "["))
            starts_line = not current or "\n" in "".join(t for _, t in _tail_space(current))
            if begins and starts_line and current:
                yield current
                current = []
            current.append((kind, text))
        yield current

    def _rewritten(self, tokens: list[tuple[str, str]]) -> Iterator[_Statement]:
        statement = _Statement()
        tokens = [t for t in tokens if t[0] != "comment"]
        at = 0
        while at < len(tokens):
            kind, text = tokens[at]
            at += 1
            if kind == "imports":
                yield from self._import_names(text)
                continue
            if kind == "name" and not statement.name and not _has_colon(tokens[: at - 1]):
                statement.name = text
            elif kind == "string" and [k for k, _ in tokens[at : at + 1]] == ["range"]:
                high, at = "".join(t for _, t in tokens[at + 1 : at + 2]), at + 2
                kind, text = "regex", f"/[{_in_class(_literal(text))}-{_in_class(_literal(high))}]/"
            if kind == "string":
                text = _quoted_string(text)
            elif kind == "regex":
                text, needs_rule = self._regex(text)
                statement.needs_rule |= needs_rule
            elif kind == "ignore":
                statement.name = text
            statement.pieces.append((kind, text))
        if statement.name == "%ignore" and statement.needs_rule:
            raise UnsupportedGrammar("what %ignore names cannot be written inside a JSON string")
        yield statement

    def _as_rules(self, statements: list[_Statement]) -> dict[str, str]:
        """New names for terminals that become rules: those that must, and all that refer to one."""
        users: dict[str, list[str]] = {}
        for s in statements:
            if s.name.isupper():
                for name in {t for kind, t in s.pieces if kind == "name" and t != s.name}:
                    users.setdefault(name, []).append(s.name)
        renamed: dict[str, str] = {}
        left = [s.name for s in statements if s.name.isupper() and s.needs_rule]
        while left:
            name = left.pop()
            if name not in renamed:
                renamed[name] = f"q_{name.lower()}"
                left += users.get(name, [])
        ignored = [s for s in statements if s.name == "%ignore"]
        if any(kind == "name" and text in renamed for s in ignored for kind, text in s.pieces):
            raise UnsupportedGrammar("what %ignore names cannot be written inside a JSON string")
        return renamed

    def _import_names(self, statement: str) -> Iterator[_Statement]:
        """Definitions of the library's terminals that JSON escapes; the others are still imported."""
        listed = re.fullmatch(r"%import\s+common\s*\(([^)]*)\)\s*", statement)
        single = re.fullmatch(r"%import\s+common\.(\w+)(?:\s*->\s*(\w+))?\s*", statement)
        if not listed and not single:
            raise UnsupportedGrammar(f"{statement[:60]!r} is not supported")
        names = [n.strip() for n in listed[1].split(",")] if listed else []
        pairs = [(n, n) for n in names] if not single else [(single[1], single[2] or single[1])]
        for name, alias in pairs:
            if name in _COMMON:
                text, needs_rule = self._regex(f"/{_COMMON[name]}/")
                pieces = [("name", alias), ("other", f": {text}")]
                yield _Statement(alias, pieces, needs_rule)
            else:
                suffix = f" -> {alias}" if alias != name else ""
                yield _Statement("", [("other", f"%import common.{name}{suffix}")])

    # --- regular expressions -----------------------------------------------------------------

    def _regex(self, token: str) -> tuple[str, bool]:
        """The Lark expression for a regular expression, and whether only a rule may contain it."""
        body, _, flags = token[1:].rpartition("/")
        if set(flags) - set("is"):
            raise UnsupportedGrammar(
                f"the flags {flags!r} of a regular expression are not supported"
            )
        tree = parse(body.replace("\\/", "/"), any_line="s" in flags)
        if not _has_special(tree):
            return token, False
        if "i" in flags:
            raise UnsupportedGrammar("a regular expression that ignores case is not supported here")
        return f"({self._group(tree, is_last=True)})", _repeats_special(tree)

    def _group(self, group: RegexGroup, *, is_last: bool) -> str:
        if group.any_case:
            raise UnsupportedGrammar("a regular expression that ignores case is not supported here")
        options = [
            " ".join(self._item(item, is_last=is_last and item is items[-1]) for item in items)
            or '""'
            for items in group.options
        ]
        return " | ".join(options)

    def _item(self, item: RegexItem, *, is_last: bool) -> str:
        match item.atom:
            case RegexChar(char):
                shown = json.dumps(SPECIAL.get(char, char), ensure_ascii=False)
            case RegexClass(text) if is_last and item.repeat in ("*", "+"):
                shown = self._set(text, run="+")  # as greedy as it was
            case RegexClass(text):
                shown = self._set(text)
            case RegexGroup() as inner:
                # A group that repeats is followed by itself.
                shown = f"({self._group(inner, is_last=is_last and not item.repeat)})"
        return f"({shown}){item.repeat}" if item.repeat else shown

    def _set(self, chars: str, run: str = "") -> str:
        """A class of characters: some as they are, the others as JSON escapes them."""
        others = _special_of(chars)
        if not others:
            return f"/{_escape_slashes(chars)}{run}/"
        key = chars + run
        if key not in self._sets:
            self._sets[key] = f"q_chars{len(self._sets)}"
            shown = [json.dumps(SPECIAL[c]) for c in others]
            plain = f"/[{_escape_slashes(chars)}&&{_PLAIN}]{run}/"
            self._lines.append(f"{self._sets[key]}: {' | '.join([plain, *shown])}")
        return self._sets[key]


def _tokens(definition: str) -> Iterator[tuple[str, str]]:
    at = 0
    while at < len(definition):
        match = _TOKEN.match(definition, at)
        if match is None:
            raise UnsupportedGrammar(
                f"{definition[at : at + 12]!r} cannot be written inside a JSON string"
            )
        at = match.end()
        yield match.lastgroup or "other", match[0]


def _next_words(tokens: list[tuple[str, str]]) -> list[str]:
    """For each token the next one that is not a space; "" after the last."""
    following: list[str] = []
    ahead = ""
    for _, text in reversed(tokens):
        following.append(ahead)
        ahead = ahead if text.isspace() else text
    return following[::-1]


def _tail_space(tokens: list[tuple[str, str]]) -> list[tuple[str, str]]:
    n = 0
    while n < len(tokens) and tokens[-1 - n][1].isspace():
        n += 1
    return tokens[len(tokens) - n :]


def _has_colon(tokens: list[tuple[str, str]]) -> bool:
    return ("other", ":") in tokens


def _literal(token: str) -> str:
    """The text that a Lark literal stands for."""
    escaped = re.sub(r"\\x([0-9a-fA-F]{2})", r"\\u00\1", token.removesuffix("i"))
    try:
        return str(json.loads(escaped, strict=False))
    except ValueError:
        raise UnsupportedGrammar(f"{token[:40]} is not a literal") from None


def _quoted_string(token: str) -> str:
    text = _literal(token)
    any_case = token.endswith("i")
    if any_case and any(c in SPECIAL for c in text):
        raise UnsupportedGrammar(f"{token[:40]}: characters that JSON escapes cannot ignore case")
    inner = "".join(SPECIAL.get(c, c) for c in text)
    return json.dumps(inner, ensure_ascii=False) + ("i" if any_case else "")


def _in_class(char: str) -> str:
    if len(char) != 1:
        raise UnsupportedGrammar("a range needs a single character at each end")
    return _escape_slashes(re.escape(char))


def _escape_slashes(text: str) -> str:
    return text.replace("/", "\\/")


def _special_of(chars: str) -> list[str]:
    try:
        known = regex.compile(chars, regex.V1)
    except regex.error as e:
        raise UnsupportedGrammar(f"{chars[:40]}: {e}") from None
    return [c for c in SPECIAL if known.fullmatch(c)]


def _has_special(atom: RegexChar | RegexClass | RegexGroup) -> bool:
    match atom:
        case RegexChar(char):
            return char in SPECIAL
        case RegexClass(text):
            return bool(_special_of(text))
        case RegexGroup(options):
            return any(_has_special(item.atom) for items in options for item in items)


def _repeats_special(group: RegexGroup) -> bool:
    """Whether it must be a rule: it has a class of escaped characters, or a repetition of them."""
    for items in group.options:
        for item in items:
            atom = item.atom
            if not _has_special(atom):
                continue
            if item.repeat or isinstance(atom, RegexClass):
                return True
            if isinstance(atom, RegexGroup) and _repeats_special(atom):
                return True
    return False
