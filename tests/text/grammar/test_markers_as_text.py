"""Without control tokens for a format, a model writes its markup as text: the grammar finds it there."""

from __future__ import annotations

from dataclasses import replace

import pytest
from llguidance import LLParserLimits

from firn.core.values import ToolChoice
from firn.models.grammar import compiler as grammars
from firn.models.grammar.compiler import Compiler
from firn.text.calls.parsers import ToolFormat, formats
from firn.text.grammar.constraint import constraint
from firn.text.reply.formats import ReplyFormat
from tests.text.grammar_walks import EACH, TOOLS, asked, tokenizer

TEXT = "Let me see <what <tool I can < do about [it] {here}.\n\n"


@EACH
def test_a_strict_tool_that_may_be_called_costs_little(
    format: ToolFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text, then a call: with a quarter of the time per token that a grammar may take."""
    fuel = grammars.LIMITS.step_lexer_fuel // 4
    limits = LLParserLimits(verbose_errors=False, step_lexer_fuel=fuel)
    monkeypatch.setattr(grammars, "LIMITS", limits)
    vocabulary = tokenizer(format.name, has_markers=False)
    written = constraint(
        asked(ToolChoice(), tools=[replace(tool, strict=True) for tool in TOOLS[1:2]]),
        format=ReplyFormat(tool=format.name),
        tokenizer=vocabulary,
        prompt_tail="",
    )
    if written.grammar is None:
        pytest.skip("no grammar for calls after text")
    compiled = Compiler(vocabulary, vocab_size=vocabulary.n_ids).compile(written.grammar)
    begins = ("", TEXT) if format.opens else ("",)
    for text in (f"{begin}{formats()[format.name].example}" for begin in begins):
        begun = compiled.start()
        for token in vocabulary.encode(text, add_special=False):
            begun.matcher.compute_bitmask()
            assert not begun.matcher.is_error(), begun.matcher.get_error()
            if not begun.matcher.consume_token(token):
                break  # the example calls another tool
