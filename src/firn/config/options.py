"""Options: each is declared as one field of a frozen tree and read from text or TOML.

`option()` makes the field; `options_of()` turns a class of such fields into a table of `Option`s.
Nothing here knows where a value came from: BadValue says what is wrong with it, and the caller adds
the place.
"""

from __future__ import annotations

import math
import os
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


class BadValue(ValueError):
    """What is wrong with a value; the caller adds where the value came from."""


@dataclass(frozen=True, slots=True)
class Spec:
    """What an option's declaration states; its type and default are those of the field."""

    help: str
    flag: str | None
    env: str
    metavar: str
    low: float | None
    high: float | None
    words: Mapping[str, Any]
    secret: bool
    check: Callable[[Any], Any] | None


def option(
    default: T,
    help: str,
    *,
    flag: str | None = "",
    env: str = "",
    metavar: str = "",
    low: float | None = None,
    high: float | None = None,
    words: Mapping[str, Any] | None = None,
    secret: bool = False,
    check: Callable[[Any], Any] | None = None,
) -> T:
    """A field of the tree. `flag` and `env` default to its name; flag None: positional, no flag.

    `words` are texts that stand for values ("auto": 0). `check` returns the value to
    keep or raises BadValue. A Literal annotation is a choice, `tuple[X, ...]` a repeatable flag,
    `X | None` an option without a default.
    """
    spec = Spec(help, flag, env, metavar, low, high, words or {}, secret, check)
    return field(default=default, repr=not secret, metadata={"spec": spec})


_NEEDS = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    Path: "a path",
}
_METAVARS = {str: "TEXT", int: "N", float: "X", bool: "", Path: "PATH"}
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


@dataclass(frozen=True, slots=True)
class Option:
    """One setting with all that a source, a help text or a table needs to know about it."""

    section: str
    name: str
    scalar: type
    many: bool
    choices: tuple[Any, ...]
    default: Any
    spec: Spec

    @property
    def key(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def flag(self) -> str | None:
        """None: this one is a positional argument."""
        if self.spec.flag is None:
            return None
        return self.spec.flag or f"--{self.name.replace('_', '-')}"

    @property
    def env(self) -> str:
        word = (self.flag or self.name).lstrip("-").replace("-", "_")
        return self.spec.env or f"FIRN_{word.upper()}"

    @property
    def metavar(self) -> str:
        if self.choices:
            return "|".join(str(choice) for choice in self.choices)
        return self.spec.metavar or _METAVARS[self.scalar]

    def parse(self, text: str) -> Any:
        """A value from an environment variable, where commas separate the items of a list."""
        if not self.many:
            return self._parse_one(text)
        items = tuple(self._parse_one(item) for item in text.split(",") if item.strip())
        if not items:
            raise BadValue("is empty")
        return items

    def parse_flag(self, raw: str | bool | list[str]) -> Any:
        """A value from the command line: an on/off flag, a repeated one, or one text."""
        if isinstance(raw, bool):
            return raw
        if isinstance(raw, str):
            return self._parse_one(raw)
        return tuple(self._parse_one(text) for text in raw)

    def _parse_one(self, text: str) -> Any:
        text = text.strip()
        if not text:
            raise BadValue("is empty")
        if text.lower() in self.spec.words:
            return self.spec.words[text.lower()]
        return self._check(self._convert(text))

    def accept(self, value: object, *, base: Path) -> Any:
        """A value from a TOML file: it must have the right type. Paths are relative to `base`."""
        if not self.many:
            return self._accept_one(value, base=base)
        if not isinstance(value, list):
            raise BadValue(f"{self._shown(value)} is not a list")
        return tuple(self._accept_one(item, base=base) for item in value)

    def _accept_one(self, value: object, *, base: Path) -> Any:
        is_word = isinstance(value, str) and value.strip().lower() in self.spec.words
        if isinstance(value, str) and (is_word or self.scalar in (str, Path)):
            parsed = self._parse_one(value)
            return base / parsed if isinstance(parsed, Path) else parsed
        if self.scalar is float and type(value) is int:
            value = float(value)
        if type(value) is not self.scalar:
            raise BadValue(f"{self._shown(value)} is not {_NEEDS[self.scalar]}")
        return self._check(value)

    def _convert(self, text: str) -> Any:
        if self.scalar is bool:
            if text.lower() in _TRUE + _FALSE:
                return text.lower() in _TRUE
            raise BadValue(f"{self._shown(text)} is not true or false")
        if self.choices and self.scalar is str:
            text = text.lower()
        try:
            return self.scalar(os.path.expanduser(text) if self.scalar is Path else text)
        except ValueError:
            raise BadValue(f"{self._shown(text)} is not {_NEEDS[self.scalar]}") from None

    def _check(self, value: Any) -> Any:
        low, high = self.spec.low, self.spec.high
        if self.choices and value not in self.choices:
            listed = ", ".join(map(str, self.choices))
            raise BadValue(f"{self._shown(value)} is not one of {listed}")
        if isinstance(value, float) and not math.isfinite(value):
            raise BadValue(f"{value} is not a finite number")
        if low is not None and value < low:
            raise BadValue(f"{self._shown(value)} is too small; the minimum is {_number(low)}")
        if high is not None and value > high:
            raise BadValue(f"{self._shown(value)} is too large; the maximum is {_number(high)}")
        return value if self.spec.check is None else self.spec.check(value)

    def _shown(self, value: object) -> str:
        if self.spec.secret:
            return "the value"
        shown = str(value).lower() if isinstance(value, bool) else repr(value)
        return shown if len(shown) <= 80 else f"{shown[:60]}..."


def _number(bound: float) -> str:
    return str(int(bound)) if bound == int(bound) else str(bound)


def options_of(section: str, cls: type) -> Iterator[Option]:
    """The table of a class whose fields were all made by `option()`."""
    hints = get_type_hints(cls)
    for item in fields(cls):
        scalar, many, choices = _unwrap(hints[item.name])
        spec = item.metadata["spec"]
        yield Option(section, item.name, scalar, many, choices, item.default, spec)


def _unwrap(hint: Any) -> tuple[type, bool, tuple[Any, ...]]:
    """The scalar type, whether it is a list, and the choices, if there are any."""
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = (arg for arg in get_args(hint) if arg is not type(None))
    if get_origin(hint) is tuple:
        scalar, _, choices = _unwrap(get_args(hint)[0])
        return scalar, True, choices
    if get_origin(hint) is Literal:
        return type(get_args(hint)[0]), False, get_args(hint)
    return hint, False, ()
