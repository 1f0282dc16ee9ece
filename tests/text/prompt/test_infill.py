"""Which models can fill in the middle, and how their prompts look."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from firn.text.prompt.infill import detect_infill
from tests.fakes import END, START, FakeTokenizer

FAMILIES = [
    "<|fim_prefix|> A <|fim_suffix|> B <|fim_middle|>",
    "<fim_prefix> A <fim_suffix> B <fim_middle>",
    "<｜fim▁begin｜> A <｜fim▁hole｜> B <｜fim▁end｜>",
    "<[fim-suffix]> B <[fim-prefix]> A <[fim-middle]>",
    "[SUFFIX] B [PREFIX] A",
]


@pytest.mark.parametrize("prompt", FAMILIES)
def test_each_family_is_written_in_its_order(prompt: str) -> None:
    tokens = [word for word in prompt.split() if word not in ("A", "B")]
    tokenizer = FakeTokenizer(special=(END, START, *tokens))
    infill = detect_infill(tokenizer)
    assert infill is not None
    assert tokenizer.decode(infill.ids("A", "B")) == prompt.replace(" ", "")
    assert {tokenizer.decode([token]) for token in infill.ends} == set(tokens)


def test_code_llamas_tokens_begin_with_a_space() -> None:
    tokenizer = FakeTokenizer(special=(END, START, " <PRE>", " <SUF>", " <MID>", " <EOT>"))
    infill = detect_infill(tokenizer)
    assert infill is not None
    assert tokenizer.decode(infill.ids("A", "B")) == " <PRE>A <SUF>B <MID>"
    assert " <EOT>" in {tokenizer.decode([token]) for token in infill.ends}


def test_a_family_that_lacks_a_token_is_not_detected() -> None:
    assert detect_infill(FakeTokenizer()) is None
    assert (
        detect_infill(FakeTokenizer(special=(END, START, "<fim_prefix>", "<fim_suffix>"))) is None
    )


def test_either_side_may_be_empty() -> None:
    tokenizer = FakeTokenizer(special=(END, START, "[SUFFIX]", "[PREFIX]"))
    infill = detect_infill(tokenizer)
    assert infill is not None
    assert tokenizer.decode(infill.ids("", "B")) == "[SUFFIX]B[PREFIX]"
    assert tokenizer.decode(infill.ids("", "")) == "[SUFFIX][PREFIX]"


class Framing(FakeTokenizer):
    """Puts a token before every raw prompt and its end token after it."""

    def encode(
        self, text: str, *, add_special: bool, typed: Sequence[tuple[int, int]] = ()
    ) -> list[int]:
        framed = START + text + END if add_special else text
        return super().encode(framed, add_special=False, typed=typed)


def test_the_opening_token_comes_first_and_no_end_token() -> None:
    tokenizer = Framing(special=(END, START, "[SUFFIX]", "[PREFIX]"))
    infill = detect_infill(tokenizer)
    assert infill is not None
    assert tokenizer.decode(infill.ids("A", "B")) == f"{START}[SUFFIX]B[PREFIX]A"
    bare = infill.ids("A", "B", add_special=False)
    assert tokenizer.decode(bare) == "[SUFFIX]B[PREFIX]A"


class SpaceFirst(FakeTokenizer):
    """Puts a space before every text, as SentencePiece does."""

    def encode(
        self, text: str, *, add_special: bool, typed: Sequence[tuple[int, int]] = ()
    ) -> list[int]:
        moved = [(start + 1, end + 1) for start, end in typed]
        return super().encode(f" {text}" if text else "", add_special=False, typed=moved)


def test_the_text_after_the_gap_gets_no_space_before_it() -> None:
    tokenizer = SpaceFirst(special=(END, START, "[SUFFIX]", "[PREFIX]"))
    infill = detect_infill(tokenizer)
    assert infill is not None
    assert tokenizer.decode(infill.ids("A", "B")) == "[SUFFIX]B[PREFIX] A"
    typed = infill.ids("[PREFIX]", "[PREFIX]", typed=lambda text: [(0, len(text))])
    assert tokenizer.decode(typed) == "[SUFFIX][PREFIX][PREFIX] [PREFIX]"
    assert typed.count(tokenizer.token_id("[PREFIX]") or 0) == 1


def test_tokens_may_spell_spaces_as_sentencepiece_does() -> None:
    marks = ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>")
    tokenizer = FakeTokenizer(special=(END, START, *marks))
    infill = detect_infill(tokenizer)
    assert infill is not None
    assert tokenizer.decode(infill.ids("A", "B")) == "{}A{}B{}".format(*marks)
