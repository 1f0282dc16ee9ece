"""What is wrong with a JSON schema, and where: the smallest part of it that has the fault. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

MAX_CHECKS = 400
"""The most parts that a search checks."""
UNSATISFIABLE = "Unsatisfiable"

_SINGLE = ("items", "additionalProperties", "additionalItems")
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED = ("properties", "patternProperties")
_SHARED = ("$defs", "definitions")

FaultOf = Callable[[Any], str]


def locate(schema: Any, fault: str, fault_of: FaultOf) -> tuple[str, str]:
    """(JSON pointer, what is wrong there). `fault_of` returns a schema's fault, "" if it has none.

    Descends as long as a part has the same fault on its own, and follows references. Each part is
    checked with the definitions of the whole schema.
    """
    root = schema if isinstance(schema, dict) else {}
    shared = {k: root[k] for k in _SHARED if k in root}
    pointer, n_checks = "", 0
    seen = {""}
    is_deeper = True
    while is_deeper:
        is_deeper = False
        for at, child in _parts(schema, pointer, root, fault):
            n_checks += 1
            if at in seen or n_checks > MAX_CHECKS:
                continue
            seen.add(at)
            child_fault = fault_of({**shared, **child})
            if child_fault and _is_same(child_fault, fault):
                pointer, schema, fault = at, child, child_fault
                is_deeper = True
                break
    return pointer, fault


def is_endless(schema: Any) -> bool:
    """Whether every value would have to contain itself, so that no finite text matches."""
    root = schema if isinstance(schema, dict) else {}
    try:
        return not _Finite(root).has_value(schema, frozenset())
    except RecursionError:
        return False


class _Finite:
    """Whether a schema has a finite value; assumed for schemas that are not understood."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._n_checks = 0

    def has_value(self, schema: Any, inside: frozenset[str]) -> bool:
        """inside: the references followed to get here."""
        self._n_checks += 1
        if not isinstance(schema, dict) or self._n_checks > MAX_CHECKS:
            return True
        ref = schema.get("$ref")
        if isinstance(ref, str) and not self._ref_has_value(ref, inside):
            return False
        for union in ("anyOf", "oneOf"):
            options = schema.get(union)
            if not isinstance(options, list) or not options:
                continue
            if not any(self.has_value(option, inside) for option in options):
                return False
        every = schema.get("allOf")
        if isinstance(every, list) and not all(self.has_value(part, inside) for part in every):
            return False
        return all(self.has_value(part, inside) for part in _required_parts(schema))

    def _ref_has_value(self, ref: str, inside: frozenset[str]) -> bool:
        if ref in inside:
            return False
        return self.has_value(resolve(ref, self._root), inside | {ref})


def _required_parts(schema: dict[str, Any]) -> Iterator[Any]:
    """The schemas of parts that every value has, where values can only be objects or arrays."""
    if schema.get("type") == "object":
        required, properties = schema.get("required"), schema.get("properties")
        if isinstance(required, list) and isinstance(properties, dict):
            names = (name for name in required if isinstance(name, str))
            yield from (properties[name] for name in names if name in properties)
    least = schema.get("minItems")
    if schema.get("type") == "array" and isinstance(least, int) and least > 0:
        yield schema.get("items")


def resolve(ref: str, root: dict[str, Any]) -> Any:
    """What a reference within the schema points to; None for any other reference."""
    if not ref.startswith("#"):
        return None
    node: Any = root
    for step in ref.removeprefix("#").split("/")[1:]:
        if isinstance(node, list):
            node = node[int(step)] if _is_index(step) and int(step) < len(node) else None
        else:
            name = step.replace("~1", "/").replace("~0", "~")
            node = node.get(name) if isinstance(node, dict) else None
    return node


def _is_index(step: str) -> bool:
    """Whether it is an array index. int() also accepts other digits, and rejects thousands."""
    return step.isascii() and step.isdecimal() and len(step) < 10


def places(root: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """(pointer, schema) of every schema in it that validates something, each once, the outer first."""
    seen: set[int] = set()
    left = [("", root)]
    while left:
        pointer, schema = left.pop()
        if isinstance(schema, dict) and id(schema) not in seen:
            seen.add(id(schema))
            yield pointer, schema
            left += reversed(list(_parts(schema, pointer, root)))


def _parts(
    schema: Any, pointer: str, root: dict[str, Any], fault: str = ""
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(pointer, part) of every part that is a schema of its own, and can cause this fault."""
    if not isinstance(schema, dict):
        return iter(())
    parts: list[tuple[str, Any]] = []
    for key in _SINGLE:
        parts.append((f"{pointer}/{key}", schema.get(key)))
    for key in _LISTED:
        if isinstance(schema.get(key), list):
            parts += [(f"{pointer}/{key}/{i}", part) for i, part in enumerate(schema[key])]
    for key in _NAMED:
        if isinstance(schema.get(key), dict):
            parts += [
                (f"{pointer}/{key}/{_escape(name)}", part)
                for name, part in schema[key].items()
                if key != "properties" or _matters(name, schema, fault)
            ]
    ref = schema.get("$ref")
    if isinstance(ref, str):
        parts.append((ref.removeprefix("#"), resolve(ref, root)))
    return ((at, part) for at, part in parts if isinstance(part, dict))


def _matters(name: str, schema: dict[str, Any], fault: str) -> bool:
    """Whether a property can cause the fault. One that is optional and unsatisfiable cannot: values
    just lack it."""
    required = schema.get("required")
    return not fault.startswith(UNSATISFIABLE) or (isinstance(required, list) and name in required)


def _is_same(a: str, b: str) -> bool:
    """Whether two faults are the same. Only "unsatisfiable" is worded differently on each level."""
    return a == b or (a.startswith(UNSATISFIABLE) and b.startswith(UNSATISFIABLE))


def _escape(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
