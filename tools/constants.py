"""Counts the numeric constants of src/firn, by package: numbers at the top of a module.

    python tools/constants.py [FOLDER]

A constant is a name in capitals that is assigned a number, or numbers, outside functions and classes. A
tuple of names that is assigned a tuple of numbers counts as so many.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1] / "src" / "firn"


def numbers_in(value: ast.expr | None) -> bool:
    """Whether the value is made of numbers alone, perhaps calculated."""
    if value is None:
        return False
    leaves = [n for n in ast.walk(value) if isinstance(n, ast.Constant | ast.Name | ast.Call)]
    numbers = [
        n
        for n in leaves
        if isinstance(n, ast.Constant)
        and isinstance(n.value, int | float)
        and not isinstance(n.value, bool)
    ]
    others = [n for n in leaves if isinstance(n, ast.Call)]
    others += [n for n in leaves if isinstance(n, ast.Constant) and n not in numbers]  # type: ignore[misc]
    return bool(numbers) and not others


def constants_of(source: str) -> int:
    n = 0
    for node in ast.parse(source).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign):
            targets = [node.target]
        if not targets or not numbers_in(node.value):  # type: ignore[attr-defined]
            continue
        names = [n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)]
        n += sum(name.strip("_").isupper() for name in names)
    return n


def main() -> None:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT
    counts: Counter[str] = Counter()
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        package = "/".join(parts[:2] if parts[0] in ("models", "cache") else parts[:1])
        counts[package.removesuffix(".py")] += constants_of(path.read_text(encoding="utf-8"))
    for package, n in counts.most_common():
        if n:
            print(f"{n:5d}  {package}")
    print(f"{counts.total():5d}  in all")


if __name__ == "__main__":
    main()
