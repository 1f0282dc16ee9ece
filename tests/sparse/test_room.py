"""Sparse prefill keeps to its room: who imports it, who names it, who asks a prompt for positions."""

from __future__ import annotations

import ast
from pathlib import Path

import firn

SOURCES = Path(firn.__file__).parent
ASK_FOR_POSITIONS = {
    "core/values/prompt.py",  # answers with the identity
    "core/keys.py",  # tokens at other positions have other keys
    "engine/sequence.py",  # a prompt with gaps is read alone
}
NAME_IT = {
    "api/dialects/_openai.py",  # the field of requests
    "assembly/extras/__init__.py",  # lists the files beside it
    "assembly/extras/sparse.py",  # builds it
    "cli/options/compat.py",  # the flag to use instead of another server's
    "config/__init__.py",
    "config/engine.py",
    "config/sparse.py",  # its flags
    "config/tree.py",
    "models/load/selfcheck.py",  # layers that are sparse, which is something else
    "ranks/joining.py",  # the flag that several processes refuse
}


def outside() -> dict[str, str]:
    files = {p.relative_to(SOURCES).as_posix(): p for p in SOURCES.rglob("*.py")}
    texts = {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    return {name: text for name, text in texts.items() if not name.startswith("sparse/")}


def attributes_of(text: str) -> set[str]:
    """What is read of an object that a prompt may be: `prompt.positions`, `cursor.positions`."""
    nodes = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Attribute)]
    return {n.attr for n in nodes if n.attr in ("positions", "has_gaps", "marks")}


def test_only_its_extra_imports_it() -> None:
    importers = {name for name, text in outside().items() if "firn.sparse" in text}
    assert importers == {"assembly/extras/sparse.py"}


def test_few_modules_ask_for_positions() -> None:
    assert {name for name, text in outside().items() if attributes_of(text)} == ASK_FOR_POSITIONS


def test_few_modules_name_it() -> None:
    assert {name for name, text in outside().items() if "sparse" in text.lower()} == NAME_IT
