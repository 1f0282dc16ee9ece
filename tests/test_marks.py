"""Tests of bits are marked, and skipped where a GPU is virtual."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import conftest
from tests.backends import fakes

TESTS = Path(__file__).parent


class Item:
    def __init__(self, nodeid: str) -> None:
        self.nodeid = nodeid
        self.marks: list[str] = []

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks.append(mark.name)


def marks(*, device: str, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    monkeypatch.setattr(fakes.mx, "device_info", lambda: {"device_name": device})
    items = [Item("tests/zoo/test_zoo.py::test_a"), Item("tests/text/test_b.py::test_b")]
    conftest.pytest_collection_modifyitems(items)  # type: ignore[arg-type]
    return [item.marks for item in items]


def test_bits_are_left_out_where_the_gpu_is_virtual(monkeypatch: pytest.MonkeyPatch) -> None:
    assert marks(device="Apple M4 Max", monkeypatch=monkeypatch) == [["bits"], []]
    virtual = marks(device="Apple Paravirtual device", monkeypatch=monkeypatch)
    assert virtual == [["bits", "skip"], []]


def test_the_lists_name_files_that_are_there() -> None:
    assert [name for name in (*conftest.BITS, *conftest.HEAVY) if not (TESTS / name).exists()] == []
