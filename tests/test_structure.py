"""The shape of the house: no import cycles, and devices that only their backends know.

Read from the syntax tree, like the directions of imports (`test_imports`).
"""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from tests.test_imports import SOURCES, all_places, imports_of

DEVICES = frozenset({"cuda", "metal", "nvidia", "few_shapes", "traced", "is_gpu", "on_cpu"})
"""Words by which code asks which device it runs on, whole or as a part of a name."""
DEVICE_WORDS = frozenset({*DEVICES, "cpu"})
"""As a text of its own, `cpu` counts, too; in a name it may be the processor's time or its options."""


# --- cycles --------------------------------------------------------------------------------


@cache
def edges() -> dict[str, frozenset[str]]:
    """Which modules each module names, under TYPE_CHECKING and inside functions, too."""
    places = set(all_places())
    found = {}
    for place in places:
        source = (SOURCES / f"{place}.py").read_text(encoding="utf-8")
        targets = {_place(item.target, places) for item in imports_of(source, place)}
        found[place] = frozenset(t for t in targets if t is not None and t != place)
    return found


def _place(target: str, places: set[str]) -> str | None:
    """The file that a dotted name stands for: a module, a package, or something in one of them."""
    parts = target.split(".")
    if parts[0] != "firn":
        return None
    for n in (len(parts), len(parts) - 1):
        name = "/".join(parts[1:n])
        for place in (name, f"{name}/__init__".lstrip("/")):
            if place in places:
                return place
    return None


def cycles(graph: dict[str, frozenset[str]]) -> list[list[str]]:
    """Modules that import each other in a circle (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph.get(node, ())):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            group = []
            while not group or group[-1] != node:
                group.append(stack.pop())
            if len(group) > 1:
                found.append(sorted(group))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert cycles(edges()) == []


def test_a_circle_is_seen() -> None:
    ring = {"a": frozenset({"b"}), "b": frozenset({"c"}), "c": frozenset({"a", "d"})}
    assert cycles(ring) == [["a", "b", "c"]]
    assert cycles({"a": frozenset({"b"}), "b": frozenset()}) == []


# --- devices -------------------------------------------------------------------------------


def devices_in(source: str) -> list[str]:
    """Names and texts of the code that are a device's, docstrings and messages aside."""
    found = []
    for node in ast.walk(ast.parse(source)):
        name = ""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value.lower() in DEVICE_WORDS:
                found.append(f"{node.lineno}: {node.value!r}")
            continue
        if isinstance(node, ast.Name):
            name = node.id
        elif isinstance(node, ast.Attribute):
            name = node.attr
        elif isinstance(node, ast.arg | ast.keyword):
            name = node.arg or ""
        elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.alias):
            name = node.name
        elif isinstance(node, ast.ImportFrom):
            name = node.module or ""
        words = {w.lower() for w in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}
        if words & DEVICES or any(device in name.lower() for device in ("few_shapes", "on_cpu")):
            found.append(f"{getattr(node, 'lineno', 0)}: {name}")
    return found


@pytest.mark.parametrize("place", [p for p in all_places() if not p.startswith("backends/")])
def test_only_backends_know_devices(place: str) -> None:
    source = (SOURCES / f"{place}.py").read_text(encoding="utf-8")
    assert devices_in(source) == []


@pytest.mark.parametrize(
    "source",
    [
        'if kind == "cuda": pass',
        "x = mx.metal.is_available()",
        "def is_cuda(): pass",
        "f(traced=None)",
        "from firn.backends.cuda import pool",
        'kind in ("cpu", "metal")',
        "if few_shapes: pass",
    ],
)
def test_a_question_about_the_device_is_seen(source: str) -> None:
    assert devices_in(source)


def test_the_processors_time_and_options_are_no_device() -> None:
    assert devices_in("cpu_s = process_time()\ncpu_dtype = 'auto'\n'on a cpu'") == []
