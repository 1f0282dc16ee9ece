"""`make mac` in its small form: with real servers, on whatever machine this is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tools import mac_report
from tools.mac_report import Report

from tests import one_blas


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ".cache"))
    one_blas.remember(tmp_path / ".cache")
    return tmp_path


@pytest.mark.timeout(600)
def test_every_part_has_something_to_say(home: Path) -> None:
    path = home / "reports" / "mac.md"
    arguments = ["--quick", "--models", "firn-demo", "--out", str(path)]
    code = mac_report.main(arguments, ask=lambda question: pytest.fail("nothing to ask"))
    text = path.read_text()
    assert code == 0, text
    parts = {part.partition("\n")[0]: part for part in text.split("\n## ")[1:]}
    assert {name.partition(":")[0] for name in parts} >= {
        "The machine", "Decoding", "After a pause", "Restoring", "Exact reuse",
    }  # fmt: skip
    assert "make test" not in parts
    assert "products" in parts["The machine"], "what doctor says"
    ratio = re.search(r"ratio: (\d+\.\d+)", parts["Decoding: firn-demo"])
    assert ratio is not None
    assert float(ratio[1]) > 0
    reused = re.findall(r"(\d+) of (\d+) tokens reused", parts["Restoring: firn-demo"])
    assert [int(n) > 0 for n, _ in reused] == [False, True, True]
    assert "the three texts are the same" in parts["Exact reuse: firn-demo"]


@pytest.mark.timeout(300)
def test_the_panic_recipe_asks_first_and_ends(home: Path) -> None:
    path = home / "mac.md"
    arguments = ["--panic", "--quick", "--models", "firn-demo", "--out", str(path)]
    for answer in ("", "no", "y"):
        assert mac_report.main(arguments, ask=lambda question, answer=answer: answer) == 1
        assert not path.exists()
    assert mac_report.main(arguments, ask=lambda question: "Yes\n") == 0
    text = path.read_text()
    assert "and no panic" in text
    assert "Decoding" not in text, "the recipe alone"
    assert mac_report.PANIC_S == 600


def test_a_part_that_fails_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    report = Report(tmp_path / "report.md")
    seen: list[str] = []

    def fails() -> Iterator[str]:
        yield "what it saw before"
        seen.append((tmp_path / "report.md").read_text())
        raise RuntimeError("no GPU")

    report.part("One", fails)
    report.part("Two", lambda: iter(["fine"]))
    assert "what it saw before" in seen[0], "on the disk before anything can panic"
    assert report.n_failed == 1
    text = (tmp_path / "report.md").read_text()
    assert "no GPU" in text
    assert text.index("no GPU") < text.index("fine")
