"""What is wrong with a JSON schema, and where: the smallest part of it that has the fault. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

MAX_LOOKS = 400
UNSATISFIABLE = "Unsatisfiable"

_SINGLE = ("items", "additionalProperties", "additionalItems", "contains", "propertyNames")
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED = ("properties", "patternProperties")
_SHARED = ("$defs", "definitions")

FaultOf = Callable[[Any], str]


def locate(schema: Any, fault: str, fault_of: FaultOf) -> tuple[str, str]:
    """(JSON pointer, what is wrong there). `fault_of` says what is wrong with a schema, "" if nothing.

    Goes down as long as a part has the same fault by itself; references are followed. Each part is
    judged with the definitions of the whole.
    """
    root = schema if isinstance(schema, dict) else {}
    shared = {k: root[k] for k in _SHARED if k in root}
    pointer, n_looks = "", 0
    seen = {""}
    is_deeper = True
    while is_deeper:
        is_deeper = False
        for at, child in _parts(schema, pointer, root, fault):
            n_looks += 1
            if at in seen or n_looks > MAX_LOOKS:
                continue
            seen.add(at)
            found = fault_of({**shared, **child})
            if found and _is_same(found, fault):
                pointer, schema, fault = at, child, found
                is_deeper = True
                break
    return pointer, fault


def is_endless(schema: Any) -> bool:
    """Every value would have to contain itself: no finite text is one."""
    root = schema if isinstance(schema, dict) else {}
    try:
        return not _Ends(root).ends(schema, frozenset())
    except RecursionError:
        return False


class _Ends:
    """Whether a schema has a finite value. What is not understood is taken to have one."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._n_looks = 0

    def ends(self, schema: Any, inside: frozenset[str]) -> bool:
        self._n_looks += 1
        if not isinstance(schema, dict) or self._n_looks > MAX_LOOKS:
            return True
        ref = schema.get("$ref")
        if isinstance(ref, str) and not self._ref_ends(ref, inside):
            return False
        for union in ("anyOf", "oneOf"):
            options = schema.get(union)
            if not isinstance(options, list) or not options:
                continue
            if not any(self.ends(option, inside) for option in options):
                return False
        every = schema.get("allOf")
        if isinstance(every, list) and not all(self.ends(part, inside) for part in every):
            return False
        return all(self.ends(part, inside) for part in _needed(schema))

    def _ref_ends(self, ref: str, inside: frozenset[str]) -> bool:
        if ref in inside:
            return False
        return self.ends(resolve(ref, self._root), inside | {ref})


def _needed(schema: dict[str, Any]) -> Iterator[Any]:
    """The parts that every value has, if it is an object or array and nothing else."""
    if schema.get("type") == "object":
        required, properties = schema.get("required"), schema.get("properties")
        if isinstance(required, list) and isinstance(properties, dict):
            yield from (properties[key] for key in required if key in properties)
    least = schema.get("minItems")
    if schema.get("type") == "array" and isinstance(least, int) and least > 0:
        yield schema.get("items")


def resolve(ref: str, root: dict[str, Any]) -> Any:
    """What a reference inside the schema points at; None for any other."""
    if not ref.startswith("#"):
        return None
    node: Any = root
    for step in ref.removeprefix("#").split("/")[1:]:
        if isinstance(node, list):
            node = node[int(step)] if step.isdigit() and int(step) < len(node) else None
        else:
            name = step.replace("~1", "/").replace("~0", "~")
            node = node.get(name) if isinstance(node, dict) else None
    return node


def _parts(
    schema: Any, pointer: str, root: dict[str, Any], fault: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(pointer, part) of every part that is a schema of its own."""
    found: list[tuple[str, Any]] = []
    for key in _SINGLE:
        found.append((f"{pointer}/{key}", schema.get(key)))
    for key in _LISTED:
        if isinstance(schema.get(key), list):
            found += [(f"{pointer}/{key}/{i}", part) for i, part in enumerate(schema[key])]
    for key in _NAMED:
        if isinstance(schema.get(key), dict):
            found += [
                (f"{pointer}/{key}/{_escape(name)}", part)
                for name, part in schema[key].items()
                if key != "properties" or _matters(name, schema, fault)
            ]
    ref = schema.get("$ref")
    if isinstance(ref, str):
        found.append((ref.removeprefix("#"), resolve(ref, root)))
    return ((at, part) for at, part in found if isinstance(part, dict))


def _matters(name: str, schema: dict[str, Any], fault: str) -> bool:
    """An optional property that cannot be satisfied is no fault: it is left out."""
    required = schema.get("required")
    return not fault.startswith(UNSATISFIABLE) or (isinstance(required, list) and name in required)


def _is_same(found: str, fault: str) -> bool:
    """What cannot be satisfied is told anew on each level; any other fault keeps its words."""
    return found == fault or (found.startswith(UNSATISFIABLE) and fault.startswith(UNSATISFIABLE))


def _escape(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
