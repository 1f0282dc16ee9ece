"""The documentation against the tree: links and anchors lead somewhere, flags and commands exist."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import pytest

from firn.config import OPTIONS

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"!?\[[^\]]*\]\(([^()\s]+)\)")
HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*$", re.MULTILINE)
SCRIPT = re.compile(r"(?:benchmarks|tools|tests)/[\w/.-]+\.(?:py|sh|md)\b")
FLAG = re.compile(r"`(--[a-z0-9-]+)[`= ]")
CODE_BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def pages() -> list[str]:
    """Every Markdown file that git knows or would add."""
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
    """The anchors that GitHub makes of a page's headings."""
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
