"""Grammars of anybody, rewritten in time that grows with their length."""

from __future__ import annotations

import pytest

from firn.text.json_lark import MAX_CHARS, Unquotable, quoted

CHAIN = "start: T0\n" + "".join(f"T{i}: T{i + 1}\n" for i in range(3000)) + "T3000: /[^a]+/\n"


def test_a_long_chain_of_terminals() -> None:
    found = quoted(CHAIN)
    assert "q_t0: q_t1" in found
    assert found.startswith("start: q_t0")


@pytest.mark.parametrize(
    "definition",
    ["start: " + "( " * 20_000, "start: " + "a " * 30_000, "start: /x/ " * 5_000, " \n" * 30_000],
)
def test_many_tokens(definition: str) -> None:
    quoted(definition)


@pytest.mark.parametrize(
    "definition",
    [
        "start: /" + "(" * 20_000 + "\\n" + ")" * 20_000 + "/",
        "start: /" + "[" * 20_000 + "/",
        "start: /x/ " + " " * MAX_CHARS,
    ],
)
def test_what_is_refused(definition: str) -> None:
    with pytest.raises(Unquotable):
        quoted(definition)
