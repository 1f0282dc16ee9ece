"""Small decoders for untrusted JSON. Pure.

Each takes a value and its name, and returns the checked value or raises InvalidValue with that name.
Nothing is coerced: a boolean is not a number; "5" and 5.0 are not integers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from firn.core import units
from firn.core.bounds import INT_MAX
from firn.core.errors import InvalidValue


def integer(value: object, param: str, *, low: int, high: int = INT_MAX) -> int:
    if type(value) is not int:
        raise InvalidValue(param, f"must be an integer, not {kind(value)}")
    if not low <= value <= high:
        raise InvalidValue(param, f"must be between {low} and {high}")
    return value


def number(value: object, param: str, *, low: float, high: float, above_low: bool = False) -> float:
    """A finite number in [low, high], or in (low, high] if `above_low`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidValue(param, f"must be a number, not {kind(value)}")
    inside = low < value <= high if above_low else low <= value <= high
    if not inside or not math.isfinite(value):
        least = f"above {low:g}" if above_low else f"at least {low:g}"
        raise InvalidValue(param, f"must be {least} and at most {high:g}")
    return float(value)


def boolean(value: object, param: str) -> bool:
    if type(value) is not bool:
        raise InvalidValue(param, f"must be true or false, not {kind(value)}")
    return value


def string(value: object, param: str, *, max_chars: int | None = None, empty: bool = True) -> str:
    if type(value) is not str:
        raise InvalidValue(param, f"must be a string, not {kind(value)}")
    if not empty and not value:
        raise InvalidValue(param, "must not be empty")
    if max_chars is not None and len(value) > max_chars:
        raise InvalidValue(param, f"must have at most {max_chars} characters")
    return value


def array(value: object, param: str, *, low: int = 0, high: int | None = None) -> list[Any]:
    if type(value) is not list:
        raise InvalidValue(param, f"must be an array, not {kind(value)}")
    if len(value) < low:
        raise InvalidValue(param, f"must have at least {low} element{'s' if low != 1 else ''}")
    if high is not None and len(value) > high:
        raise InvalidValue(param, f"must have at most {high} elements")
    return value


def mapping(value: object, param: str) -> dict[str, Any]:
    if type(value) is not dict:
        raise InvalidValue(param, f"must be an object, not {kind(value)}")
    return value


def members(value: object, param: str) -> Fields:
    """The members of an object."""
    return Fields(mapping(value, param), param)


def objects(
    value: object, param: str, *, low: int = 0, high: int | None = None
) -> Iterator[Fields]:
    """The objects of an array, each checked when it is reached."""
    for i, item in enumerate(array(value, param, low=low, high=high)):
        yield members(item, f"{param}[{i}]")


def one_of(value: object, param: str, choices: Sequence[str]) -> str:
    if type(value) is not str or value not in choices:
        raise InvalidValue(param, f"must be one of {', '.join(map(repr, choices))}")
    return value


def page_limit(query: Mapping[str, str], *, default: int, high: int) -> int:
    """`limit` of a query string: how many entries a page may have."""
    limit = query.get("limit", str(default))
    is_number = limit.isascii() and limit.isdigit() and len(limit) < 10  # int() has a digit limit
    if not is_number or not 1 <= int(limit) <= high:
        raise InvalidValue("limit", f"must be between 1 and {high}")
    return int(limit)


def kind(value: object) -> str:
    """JSON's name for the type of this value, with an article."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "an array"
        case _:
            return "an object"


class Fields:
    """The members of one JSON object, read one by one. Null counts as absent.

    Remembers which were read, see `unread`. Owner: the decoder that made it.
    """

    def __init__(self, members: Mapping[str, Any], path: str = "") -> None:
        self._members = members
        self.path = path
        self._read: set[str] = set()
        self._nested: dict[str, Fields] = {}

    def name(self, member: str) -> str:
        return f"{self.path}.{member}" if self.path else member

    def get(self, member: str) -> Any:
        self._read.add(member)
        return self._members.get(member)

    def require(self, member: str) -> Any:
        value = self.get(member)
        if value is None:
            raise InvalidValue(self.name(member), "is required")
        return value

    def skip(self, *members: str) -> None:
        """Count these as read: firn knows them, but they have no effect."""
        self._read.update(members)

    def integer(self, member: str, *, low: int, high: int = INT_MAX) -> int | None:
        value = self.get(member)
        return None if value is None else integer(value, self.name(member), low=low, high=high)

    def number(
        self, member: str, default: float, *, low: float, high: float, above_low: bool = False
    ) -> float:
        value = self.get(member)
        if value is None:
            return default
        return number(value, self.name(member), low=low, high=high, above_low=above_low)

    def boolean(self, member: str, default: bool) -> bool:
        value = self.get(member)
        return default if value is None else boolean(value, self.name(member))

    def string(self, member: str, *, max_chars: int | None = None) -> str | None:
        value = self.get(member)
        return None if value is None else string(value, self.name(member), max_chars=max_chars)

    def object(self, member: str) -> Fields:
        """The members of a nested object; none if it is absent."""
        if member not in self._nested:
            value, name = self.get(member), self.name(member)
            nested = Fields({} if value is None else mapping(value, name), name)
            self._nested[member] = nested
        return self._nested[member]

    def require_object(self, member: str) -> Fields:
        return members(self.require(member), self.name(member))

    def objects(self, member: str, *, high: int | None = None) -> Iterator[Fields]:
        """The objects of an array; none if it is absent."""
        value = self.get(member)
        return iter(()) if value is None else objects(value, self.name(member), high=high)

    def unread_members(self) -> Iterator[tuple[Fields, str]]:
        """Members that no decoder has read, those of nested objects included, each with its owner."""
        for member, value in self._members.items():
            if value is not None and member not in self._read:
                yield self, member
        for nested in self._nested.values():
            yield from nested.unread_members()

    def unread(self) -> tuple[str, ...]:
        """Their names: firn does not know them."""
        return tuple(owner.name(member) for owner, member in self.unread_members())

    def refuse_unread(self) -> None:
        """For an object of firn's own, all of whose members were read by now. Raises InvalidValue."""
        for name in self.unread():
            raise InvalidValue(name, f"is not known; {self.path} has {_listed(sorted(self._read))}")


def keep_alive_s(body: Fields) -> float | None:
    """keep_alive in seconds; None: not given. Raises InvalidValue. LM Studio calls it ttl.

    A server of one model only checks it: its model stays loaded.
    """
    for name in ("keep_alive", "ttl"):
        stay = body.get(name)
        if stay is not None:
            try:
                return units.seconds(stay)
            except ValueError as e:
                raise InvalidValue(name, str(e)) from None
    return None


def _listed(names: Sequence[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
