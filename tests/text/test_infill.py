"""Which models can fill in the middle, and how their prompts look."""

from __future__ import annotations

import pytest

from firn.text.infill import detect
from tests.fakes import END, START, FakeTokenizer

FAMILIES = [
    "<|fim_prefix|> A <|fim_suffix|> B <|fim_middle|>",
    "<fim_prefix> A <fim_suffix> B <fim_middle>",
    "<｜fim▁begin｜> A <｜fim▁hole｜> B <｜fim▁end｜>",
    "<[fim-suffix]> B <[fim-prefix]> A <[fim-middle]>",
    "[SUFFIX] B [PREFIX] A",
]


@pytest.mark.parametrize("prompt", FAMILIES)
def test_each_family_in_its_order(prompt: str) -> None:
    tokens = [each for each in prompt.split() if each not in ("A", "B")]
    tokenizer = FakeTokenizer(special=(END, START, *tokens))
    found = detect(tokenizer)
    assert found is not None
    assert tokenizer.decode(found.ids("A", "B")) == prompt.replace(" ", "")
    assert {tokenizer.decode([token]) for token in found.ends} == set(tokens)


def test_code_llamas_tokens_begin_with_a_blank() -> None:
    tokenizer = FakeTokenizer(special=(END, START, " <PRE>", " <SUF>", " <MID>", " <EOT>"))
    found = detect(tokenizer)
    assert found is not None
    assert tokenizer.decode(found.ids("A", "B")) == " <PRE>A <SUF>B <MID>"
    assert " <EOT>" in {tokenizer.decode([token]) for token in found.ends}


def test_a_family_that_is_not_whole_is_none() -> None:
    assert detect(FakeTokenizer()) is None
    assert detect(FakeTokenizer(special=(END, START, "<fim_prefix>", "<fim_suffix>"))) is None


def test_nothing_on_one_side() -> None:
    tokenizer = FakeTokenizer(special=(END, START, "[SUFFIX]", "[PREFIX]"))
    found = detect(tokenizer)
    assert found is not None
    assert tokenizer.decode(found.ids("", "B")) == "[SUFFIX]B[PREFIX]"
    assert tokenizer.decode(found.ids("", "")) == "[SUFFIX][PREFIX]"


class Framing(FakeTokenizer):
    """Puts a token in front of every raw prompt and its end token behind."""

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        return super().encode(START + text + END if add_special else text, add_special=False)


def test_the_opening_token_comes_first_and_no_end_token() -> None:
    tokenizer = Framing(special=(END, START, "[SUFFIX]", "[PREFIX]"))
    found = detect(tokenizer)
    assert found is not None
    assert tokenizer.decode(found.ids("A", "B")) == f"{START}[SUFFIX]B[PREFIX]A"
