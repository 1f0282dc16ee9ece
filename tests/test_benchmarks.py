"""Every benchmark says what it measures and how to call it, and the README lists it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
SCRIPTS = sorted(p.relative_to(FOLDER).as_posix() for p in FOLDER.rglob("*.py"))
README = (FOLDER / "README.md").read_text(encoding="utf-8")


def docstring(name: str) -> str:
    return ast.get_docstring(ast.parse((FOLDER / name).read_text(encoding="utf-8"))) or ""


def is_command(name: str) -> bool:
    return "argparse" in (FOLDER / name).read_text(encoding="utf-8") and "/" not in name


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_first_lines_say_what_it_is(name: str) -> None:
    lines = docstring(name).splitlines()
    assert lines, "no docstring"
    assert lines[0].rstrip().endswith((".", "?")), "the first line is a sentence"


@pytest.mark.parametrize("name", [n for n in SCRIPTS if is_command(n)])
def test_a_command_shows_how_it_is_called(name: str) -> None:
    called = rf"benchmarks/{re.escape(name)}|`\w+\.py --[a-z-]+`"
    assert re.search(called, docstring(name)), "no example of a call"


def is_part(name: str) -> bool:
    """Whether it is part of another command, which its docstring then names first."""
    return docstring(name).startswith("`")


@pytest.mark.parametrize("name", [n for n in SCRIPTS if is_command(n) and not is_part(n)])
def test_a_command_says_how_long_it_takes(name: str) -> None:
    takes = r"\b[Tt]akes\b[^.]*\b(seconds?|minutes?|hours?)\b"
    assert re.search(takes, docstring(name)), "nothing says how long it takes"


@pytest.mark.parametrize("name", [n for n in SCRIPTS if "/" not in n])
def test_the_readme_knows_it(name: str) -> None:
    assert name in README


def test_the_readme_names_no_script_that_is_not_there() -> None:
    named = re.findall(r"benchmarks/([\w/]+\.py)", README)
    assert [n for n in named if n not in SCRIPTS] == []


def calls(text: str) -> list[tuple[str, str]]:
    """The script and each flag of every call in the text."""
    found = []
    for line in re.findall(r"benchmarks/[\w/]+\.py[^`#\n]*", text):
        script = line.split()[0].removeprefix("benchmarks/")
        found += [(script, flag) for flag in re.findall(r"(--[a-z][a-z-]*)", line)]
    return found


def knows(script: str, flag: str) -> bool:
    sources = [FOLDER / script, *FOLDER.glob(f"{script.removesuffix('.py')}_*.py")]
    return any(f'"{flag}"' in s.read_text(encoding="utf-8") for s in sources if s.exists())


@pytest.mark.parametrize("text", ["README.md", *SCRIPTS])
def test_the_flags_of_examples_are_real(text: str) -> None:
    shown = README if text == "README.md" else docstring(text)
    assert [call for call in calls(shown) if not knows(*call)] == []
