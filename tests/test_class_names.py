"""A class name means one thing."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "src").rglob("*.py"))
PORTS = {"CacheAdmin", "Engine", "Pictures", "Recorder", "Runner"}
"""Each of these is a port and the class that implements it."""
SAME_IDEA = {"TakenTokens"}
"""A token that a row picked: the engine's protocol, and the class in models."""


def classes(tree: ast.Module) -> list[str]:
    return [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def test_a_class_name_means_one_thing() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in SOURCES:
        for name in classes(ast.parse(path.read_text(encoding="utf-8"))):
            if not name.startswith("_"):
                places[name].append(str(path.relative_to(ROOT)))
    twice = {name: where for name, where in places.items() if len(where) > 1}
    assert set(twice) == PORTS | SAME_IDEA, twice
