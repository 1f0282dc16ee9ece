"""Every vision family through the script of the text models: see also test_reuse and docs/vision.md."""

from __future__ import annotations

import pytest

from tests.models.vision import table
from tests.zoo.vision import MORE_VISION, VISION


def test_the_table_has_every_family_and_no_other() -> None:
    assert set(table.written()) == {*VISION, *MORE_VISION}
    for name, line in table.written().items():
        assert "| batched | supported |" in line, name


@pytest.mark.sweep
@pytest.mark.parametrize("name", [*VISION, *MORE_VISION])
def test_text_on_a_vision_model(name: str) -> None:
    row = table.row_of(name)
    assert row.reuse == "supported"
    assert table.written()[name] == str(row), "docs/vision.md is out of date"
