"""The documentation matches the tree: links and anchors have targets, flags and commands exist."""

from __future__ import annotations

import ast
import re
import subprocess
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import typer
from typer.core import TyperGroup

from firn.cli.commands import make_cli
from firn.config import OPTIONS

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"!?\[[^\]]*\]\(([^()\s]+)\)")
HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*$", re.MULTILINE)
SCRIPT = re.compile(r"(?:benchmarks|tools|tests)/[\w/.-]+\.(?:py|sh|md)\b")
FLAG = re.compile(r"`(--[a-z0-9-]+)[`= ]")
CODE_BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
SHELL_BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE_CODE = re.compile(r"`([^`]+)`")
FIRN_CALL = re.compile(r"(?<![\w.'/-])firn +([a-z].*)")
BENCHMARK_CALL = re.compile(r"(benchmarks/[\w/]+\.py)([^`#|]*)")
MAX_LINE = 140


def pages() -> list[str]:
    """Every Markdown file that git tracks or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    names = listed.stdout.split() if listed.returncode == 0 else []
    found = names or [
        str(p.relative_to(ROOT)) for p in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"))
    ]
    return sorted(name for name in found if (ROOT / name).exists())


every_page = pytest.mark.parametrize("page", pages())


@cache
def text_of(path: Path) -> str:
    """A page without its code blocks, in which brackets are not links."""
    return CODE_BLOCK.sub("", path.read_text(encoding="utf-8"))


@cache
def anchors(path: Path) -> frozenset[str]:
    """The anchors that GitHub makes from a page's headings."""
    seen: dict[str, int] = {}
    out = set[str]()
    for heading in HEADING.findall(text_of(path)):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        n = seen[slug] = seen.get(slug, -1) + 1
        out.add(f"{slug}-{n}" if n else slug)
    return frozenset(out)


@every_page
def test_links_lead_somewhere(page: str) -> None:
    here = ROOT / page
    broken = []
    for link in LINK.findall(text_of(here)):
        if "://" in link or link.startswith("mailto:"):
            continue
        name, _, anchor = unquote(link).partition("#")
        there = (here.parent / name).resolve() if name else here
        if not there.exists() or (anchor and anchor not in anchors(there)):
            broken.append(link)
    assert broken == []


@every_page
def test_scripts_that_are_named_exist(page: str) -> None:
    named = set(SCRIPT.findall((ROOT / page).read_text(encoding="utf-8")))
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


@every_page
def test_make_targets_that_are_named_exist(page: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    text = (ROOT / page).read_text(encoding="utf-8")
    named = set(re.findall(r"(?:`|^)make ([a-z]+)\b", text, re.MULTILINE))
    assert named <= targets


@cache
def firn() -> TyperGroup:
    command = typer.main.get_command(make_cli())
    assert isinstance(command, TyperGroup)
    return command


def unknown_words(call: str) -> list[str]:
    """Commands and flags in the arguments of a `firn` call that do not exist."""
    words = call.split()
    command: Any = firn()
    while isinstance(command, TyperGroup) and words and words[0][0].isalpha():
        name = words.pop(0)
        if name not in command.commands:
            return [name]
        command = command.commands[name]
    if "ignore_unknown_options" in command.context_settings:  # it accepts those of `firn serve`
        command = firn().commands["serve"]
    options = [(*param.opts, *param.secondary_opts) for param in command.params]
    known = {"--help", *chain.from_iterable(options)}
    flags = [word.strip("'\"[]").partition("=")[0] for word in words if word.startswith("--")]
    return [flag for flag in flags if flag not in known]


@every_page
def test_commands_that_are_shown_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = "".join(SHELL_BLOCK.findall(text)).replace("\\\n", " ")
    lines = [line.partition(" #")[0] for line in blocks.splitlines()]
    inline = [" ".join(code.split()) for code in INLINE_CODE.findall(text_of(ROOT / page))]
    shown = [part for line in (*lines, *inline) for part in re.split(r"[;()]", line)]
    calls = [call for part in shown for call in FIRN_CALL.findall(part)]
    assert [(call, unknown) for call in calls if (unknown := unknown_words(call))] == []


@every_page
def test_flags_of_benchmarks_that_are_shown_exist(page: str) -> None:
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    unknown = []
    for script, arguments in BENCHMARK_CALL.findall(text):
        path = ROOT / script
        parts = [path, *path.parent.glob(f"{path.stem}_*.py")]
        source = "".join(part.read_text(encoding="utf-8") for part in parts)
        flags = re.findall(r"(?<=\s)--[a-z][a-z-]*", arguments)
        unknown += [(script, flag) for flag in flags if f'"{flag}"' not in source]
    assert unknown == []


@every_page
def test_lines_are_short(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    prose = CODE_BLOCK.sub(lambda block: "\n" * block[0].count("\n"), text)
    lines = enumerate(prose.splitlines(), 1)
    long = [
        (n, len(line)) for n, line in lines if not line.startswith("|") and len(line) > MAX_LINE
    ]
    assert long == []


@pytest.mark.parametrize(
    ("page", "generator"),
    [
        ("docs/architectures.md", "tests/sweep/table.py"),
        ("docs/vision.md", "tests/models/vision/table.py"),
    ],
)
def test_a_written_page_begins_as_its_generator_says(page: str, generator: str) -> None:
    tree = ast.parse((ROOT / generator).read_text(encoding="utf-8"))
    assigned = {
        ast.unparse(node.targets[0]): node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
    }
    head = ast.literal_eval(assigned["HEAD"])
    assert (ROOT / page).read_text(encoding="utf-8").startswith(head)


def test_the_readme_is_short_and_leads_to_every_page() -> None:
    readme = ROOT / "README.md"
    assert len(readme.read_text(encoding="utf-8").splitlines()) <= 200
    linked = {link.partition("#")[0] for link in LINK.findall(text_of(readme))}
    assert {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")} <= linked


def test_every_flag_has_its_line_and_every_line_its_flag() -> None:
    page = ROOT / "docs" / "configuration.md"
    rows = [line for line in text_of(page).splitlines() if line.startswith("| `--")]
    named = {flag for row in rows for flag in FLAG.findall(row.split(" | ")[0])}
    known = {option.flag for option in OPTIONS if option.flag is not None}
    assert named == known | {"--config"}


# --- ARCHITECTURE.md -----------------------------------------------------------------------

ARCHITECTURE = ROOT / "docs" / "ARCHITECTURE.md"
SOURCES = ROOT / "src" / "firn"
MODULE = re.compile(r"`([a-z_0-9/]+/[a-z_0-9]+\.py)[:`]")
STOP = re.compile(r"`([a-z_0-9/]+\.py):([A-Za-z_0-9.]+)`")


def section(heading: str) -> str:
    """The text below this heading, up to the next one of the same or a higher level."""
    text = ARCHITECTURE.read_text(encoding="utf-8")
    level = heading.split(" ")[0]
    after = text.split(f"\n{heading}\n", 1)[1]
    return re.split(rf"^#{{1,{len(level)}}} ", after, maxsplit=1, flags=re.MULTILINE)[0]


@cache
def definitions(module: str) -> frozenset[str]:
    """Functions, classes and methods of a module, as `name` and `Class.name`."""
    tree = ast.parse((SOURCES / module).read_text(encoding="utf-8"))
    defined = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    out = set[str]()
    for node in tree.body:
        if isinstance(node, defined):
            out.add(node.name)
            inner = [each for each in node.body if isinstance(each, defined)]
            out |= {f"{node.name}.{each.name}" for each in inner}
    return frozenset(out)


@pytest.mark.parametrize(
    "walk",
    [
        "### A chat, from the socket and back",
        "### A record, from the row to the disk and back",
        "### A picture, from the request into the cache",
    ],
)
def test_every_stop_of_a_walk_exists(walk: str) -> None:
    stops = STOP.findall(section(walk))
    assert len(stops) >= 8
    missing = [
        f"{module}:{name}"
        for module, name in stops
        if not (SOURCES / module).exists() or name not in definitions(module)
    ]
    assert missing == []


@every_page
def test_modules_that_are_named_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    examples = set(re.findall(r"^`([\w./]+\.py)`[^\n]*:$", text, re.MULTILINE))
    named = set(MODULE.findall(text)) - examples
    folders = (SOURCES, ROOT, (ROOT / page).parent)
    missing = [name for name in named if not any((folder / name).exists() for folder in folders)]
    assert sorted(missing) == []


def test_every_package_is_described() -> None:
    folders = {f"{path.parent.relative_to(SOURCES)}/" for path in SOURCES.rglob("__init__.py")}
    described = set(re.findall(r"^\| `([a-z_/]+/)` \|", section("## Packages"), re.MULTILINE))
    assert described == (folders - {"./"}) | {"dashboard/"}


def test_every_module_at_the_top_is_described() -> None:
    text = section("## Packages")
    modules = {path.name for path in SOURCES.glob("*.py")} - {"__init__.py", "__main__.py"}
    assert [name for name in sorted(modules) if f"`{name}`" not in text] == []


def test_the_glossary_is_short() -> None:
    words = re.findall(r"^\| ([a-z ]+) \|", section("## Glossary"), re.MULTILINE)
    assert "cursor" in words
    assert len(words) - words.count("word") <= 25
