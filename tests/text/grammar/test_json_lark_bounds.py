"""Any client may send a grammar, so rewriting it takes time linear in its length."""

from __future__ import annotations

import pytest

from firn.text.grammar.json_lark import MAX_CHARS, UnsupportedGrammar, for_json_string

CHAIN = "start: T0\n" + "".join(f"T{i}: T{i + 1}\n" for i in range(3000)) + "T3000: /[^a]+/\n"


def test_a_long_chain_of_terminals_becomes_rules() -> None:
    grammar = for_json_string(CHAIN)
    assert "q_t0: q_t1" in grammar
    assert grammar.startswith("start: q_t0")


@pytest.mark.parametrize(
    "definition",
    ["start: " + "( " * 20_000, "start: " + "a " * 30_000, "start: /x/ " * 5_000, " \n" * 30_000],
)
def test_a_long_grammar_without_escapes_stays_as_it_is(definition: str) -> None:
    assert for_json_string(definition).split() == definition.split()


@pytest.mark.parametrize(
    "definition",
    [
        "start: /" + "(" * 20_000 + "\\n" + ")" * 20_000 + "/",
        "start: /" + "[" * 20_000 + "/",
        "start: /x/ " + " " * MAX_CHARS,
    ],
)
def test_too_deep_and_too_long_grammars_are_refused(definition: str) -> None:
    with pytest.raises(UnsupportedGrammar):
        for_json_string(definition)
