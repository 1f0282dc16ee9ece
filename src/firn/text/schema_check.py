"""Checks a value against its JSON schema, after a reply where no grammar could enforce it.

Bounded, because clients send the schemas and this runs on the thread that passes on all tokens:
time is limited, references lead only into the schema itself, and unknown keywords are ignored.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import regex

from firn.text.schema import resolve_reference, type_of

TIME_S = 0.1
"""CPU time of the thread, for one value."""
MAX_PATTERN_CHARS = 1000
"""A longer pattern is not checked: compiling it has no time limit."""
MAX_STEPS = 20_000
"""Subschemas checked for one value."""


class _Keyword(NamedTuple):
    """A value and one keyword of its schema: the keyword's argument, the whole schema, the place."""

    value: Any
    given: Any
    schema: Mapping[str, Any]
    at: str


Check = Callable[["_Checker", _Keyword], Iterator[str]]


class _OutOfTime(Exception):
    """The check has taken more time or steps than it may."""


def violations(value: Any, schema: Any, *, time_s: float = TIME_S) -> list[str]:
    """JSON pointers to the places of the schema that the value does not follow; empty if it follows all
    of it, or if checking takes longer than `time_s`."""
    try:
        return list(dict.fromkeys(_Checker(schema, time_s).violations(value, schema, "#")))
    except (_OutOfTime, RecursionError):
        return []


class _Checker:
    """Owner: one call of `violations`."""

    def __init__(self, root: Any, time_s: float) -> None:
        self._root = root if isinstance(root, Mapping) else {}
        self._n_steps = 0
        self._until = time.thread_time() + time_s

    def violations(self, value: Any, schema: Any, at: str) -> Iterator[str]:
        self._n_steps += 1
        if self._n_steps > MAX_STEPS or self._left_s() < 0:
            raise _OutOfTime
        if schema is False:
            yield at
        if not isinstance(schema, Mapping):
            return
        for keyword, given in schema.items():
            check = _CHECKS.get(keyword)
            if check is None:
                continue
            try:
                yield from check(self, _Keyword(value, given, schema, f"{at}/{keyword}"))
            except TypeError:
                continue  # a malformed keyword requires nothing

    def follows(self, value: Any, schema: Any) -> bool:
        return next(self.violations(value, schema, ""), None) is None

    def matches(self, text: str, pattern: Any) -> bool:
        """Whether the pattern matches; true if the pattern is malformed, too long or too slow."""
        left_s = self._left_s()
        if left_s < 0:
            raise _OutOfTime
        if not isinstance(pattern, str) or len(pattern) > MAX_PATTERN_CHARS:
            return True
        try:
            return regex.search(pattern, text, timeout=left_s) is not None
        except (regex.error, TimeoutError):
            return True

    def _left_s(self) -> float:
        return self._until - time.thread_time()

    def resolved(self, reference: str) -> Any:
        return resolve_reference(reference, self._root)


def _when(holds: Callable[[Any, Any], bool], *kinds: str) -> Check:
    """A check of values of these kinds (by default, any kind) against the keyword's argument."""

    def check(c: _Checker, k: _Keyword) -> Iterator[str]:
        if kinds and type_of(k.value) not in kinds:
            return
        try:
            is_fault = not holds(k.value, k.given)
        except (TypeError, ValueError, ArithmeticError):
            return  # a malformed keyword requires nothing
        if is_fault:
            yield k.at

    return check


def _is_type(value: Any, given: Any) -> bool:
    kinds = given if isinstance(given, list) else [given]
    kind = type_of(value)
    whole = isinstance(value, float) and value.is_integer()
    return (
        kind in kinds or ("number" in kinds and kind == "integer") or (whole and "integer" in kinds)
    )


def _equal(a: Any, b: Any) -> bool:
    """Whether two values are equal in JSON, where true is not 1, but 1.0 is."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)
    return bool(a == b)


def _unique(items: list[Any], wanted: Any) -> bool:
    if wanted is not True:
        return True
    return len({json.dumps(_plain(item), sort_keys=True) for item in items}) == len(items)


def _plain(value: Any) -> Any:
    """The value with 1 for 1.0, so that two values which are equal in JSON have the same text."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {name: _plain(member) for name, member in value.items()}
    return value


def _multiple(value: float, step: float) -> bool:
    quotient = value / step
    return abs(quotient - round(quotient)) < 1e-9


def _pattern(c: _Checker, k: _Keyword) -> Iterator[str]:
    if isinstance(k.value, str) and not c.matches(k.value, k.given):
        yield k.at


def _properties(c: _Checker, k: _Keyword) -> Iterator[str]:
    if isinstance(k.value, Mapping) and isinstance(k.given, Mapping):
        for name in k.given.keys() & k.value.keys():
            yield from c.violations(k.value[name], k.given[name], f"{k.at}/{name}")


def _pattern_properties(c: _Checker, k: _Keyword) -> Iterator[str]:
    if isinstance(k.value, Mapping) and isinstance(k.given, Mapping):
        for pattern, inner in k.given.items():
            for name in k.value:
                if c.matches(name, pattern):
                    yield from c.violations(k.value[name], inner, f"{k.at}/{pattern}")


def _additional(c: _Checker, k: _Keyword) -> Iterator[str]:
    if not isinstance(k.value, Mapping):
        return
    declared, patterns = k.schema.get("properties") or {}, k.schema.get("patternProperties") or {}
    for name in k.value:
        if name not in declared and not any(c.matches(name, p) for p in patterns):
            yield from ([k.at] if k.given is False else c.violations(k.value[name], k.given, k.at))


def _names(c: _Checker, k: _Keyword) -> Iterator[str]:
    if isinstance(k.value, Mapping):
        for name in k.value:
            yield from c.violations(name, k.given, k.at)


def _dependent(c: _Checker, k: _Keyword) -> Iterator[str]:
    """Both forms: names of members that must also be there, or a schema for the whole value."""
    if not isinstance(k.value, Mapping) or not isinstance(k.given, Mapping):
        return
    for name in k.given.keys() & k.value.keys():
        needed = k.given[name]
        if isinstance(needed, list):
            if any(other not in k.value for other in needed):
                yield f"{k.at}/{name}"
        else:
            yield from c.violations(k.value, needed, f"{k.at}/{name}")


def _items(c: _Checker, k: _Keyword) -> Iterator[str]:
    if not isinstance(k.value, list):
        return
    if isinstance(k.given, list):  # as in older drafts
        for item, inner in zip(k.value, k.given, strict=False):
            yield from c.violations(item, inner, k.at)
        return
    first = k.schema.get("prefixItems")
    for item in k.value[len(first) if isinstance(first, list) else 0 :]:
        yield from c.violations(item, k.given, k.at)


def _prefix(c: _Checker, k: _Keyword) -> Iterator[str]:
    if isinstance(k.value, list) and isinstance(k.given, list):
        for i, (item, inner) in enumerate(zip(k.value, k.given, strict=False)):
            yield from c.violations(item, inner, f"{k.at}/{i}")


def _contains(c: _Checker, k: _Keyword) -> Iterator[str]:
    if not isinstance(k.value, list):
        return
    n_matching = sum(c.follows(item, k.given) for item in k.value)
    least = _whole(k.schema.get("minContains"), 1)
    most = _whole(k.schema.get("maxContains"), n_matching)
    if not least <= n_matching <= most:
        yield k.at


def _whole(given: Any, default: float) -> float:
    """The number; the default if it is missing or malformed."""
    return given if _is_type(given, "integer") else default


def _all_of(c: _Checker, k: _Keyword) -> Iterator[str]:
    for i, inner in enumerate(k.given if isinstance(k.given, list) else ()):
        yield from c.violations(k.value, inner, f"{k.at}/{i}")


def _any_of(c: _Checker, k: _Keyword) -> Iterator[str]:
    if isinstance(k.given, list) and not any(c.follows(k.value, inner) for inner in k.given):
        yield k.at


def _one_of(c: _Checker, k: _Keyword) -> Iterator[str]:
    if isinstance(k.given, list) and sum(c.follows(k.value, inner) for inner in k.given) != 1:
        yield k.at


def _not(c: _Checker, k: _Keyword) -> Iterator[str]:
    if c.follows(k.value, k.given):
        yield k.at


def _if(c: _Checker, k: _Keyword) -> Iterator[str]:
    branch = "then" if c.follows(k.value, k.given) else "else"
    if branch in k.schema:
        yield from c.violations(k.value, k.schema[branch], f"{k.at.removesuffix('/if')}/{branch}")


def _ref(c: _Checker, k: _Keyword) -> Iterator[str]:
    if isinstance(k.given, str) and k.given.startswith("#"):
        yield from c.violations(k.value, c.resolved(k.given), k.given)


_NUMBERS = ("integer", "number")
_CHECKS: Mapping[str, Check] = {
    "type": _when(_is_type),
    "enum": _when(lambda value, given: any(_equal(value, allowed) for allowed in given)),
    "const": _when(_equal),
    "pattern": _pattern,
    "minLength": _when(lambda text, n: len(text) >= n, "string"),
    "maxLength": _when(lambda text, n: len(text) <= n, "string"),
    "minimum": _when(lambda x, low: x >= low, *_NUMBERS),
    "maximum": _when(lambda x, high: x <= high, *_NUMBERS),
    "exclusiveMinimum": _when(lambda x, low: low is True or x > low, *_NUMBERS),
    "exclusiveMaximum": _when(lambda x, high: high is True or x < high, *_NUMBERS),
    "multipleOf": _when(_multiple, *_NUMBERS),
    "minItems": _when(lambda items, n: len(items) >= n, "array"),
    "maxItems": _when(lambda items, n: len(items) <= n, "array"),
    "uniqueItems": _when(_unique, "array"),
    "minProperties": _when(lambda members, n: len(members) >= n, "object"),
    "maxProperties": _when(lambda members, n: len(members) <= n, "object"),
    "required": _when(lambda members, names: all(n in members for n in names), "object"),
    "properties": _properties,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional,
    "propertyNames": _names,
    "dependentRequired": _dependent,
    "dependentSchemas": _dependent,
    "dependencies": _dependent,
    "items": _items,
    "prefixItems": _prefix,
    "contains": _contains,
    "allOf": _all_of,
    "anyOf": _any_of,
    "oneOf": _one_of,
    "not": _not,
    "if": _if,
    "$ref": _ref,
}
