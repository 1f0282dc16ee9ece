"""A text that is too long is refused before all of it is tokenized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from firn.core.errors import ContextTooLong
from firn.core.values import Chat, Message, RawText, TextPart
from firn.text.prompt.maker import SLICE_CHARS, PromptMaker, refuse_too_long
from tests.fakes import FakeTokenizer


class Counting(FakeTokenizer):
    """One token for every `chars_a_token` characters; counts the characters that it encodes."""

    def __init__(self, *, chars_a_token: int = 1, longest: int = 16) -> None:
        super().__init__()
        self.n_read = 0
        self._chars = chars_a_token
        self._longest = longest

    @property
    def max_token_chars(self) -> int:
        return self._longest

    def encode(
        self, text: str, *, add_special: bool, typed: Sequence[tuple[int, int]] = ()
    ) -> list[int]:
        self.n_read += len(text)
        return [1] * -(-len(text) // self._chars)

    def render(self, messages: Any, *, tools: Any, kwargs: Mapping[str, Any]) -> str:
        return "".join(str(m["content"]) for m in messages)


def test_a_text_that_no_tokens_could_hold_is_hardly_read() -> None:
    tokenizer = Counting()
    text = "x" * (16 << 20)
    with pytest.raises(ContextTooLong) as caught:
        refuse_too_long(text, tokenizer, limit=4096)
    assert tokenizer.n_read == SLICE_CHARS
    assert caught.value.n_prompt == len(text), "by the part that was read"
    assert "about" in caught.value.message


def test_a_text_that_might_fit_is_read_in_slices_until_it_is_clear() -> None:
    tokenizer = Counting(longest=10**6)
    with pytest.raises(ContextTooLong) as caught:
        refuse_too_long("x" * (8 << 20), tokenizer, limit=SLICE_CHARS + 1)
    assert tokenizer.n_read == 2 * SLICE_CHARS
    assert caught.value.n_prompt > SLICE_CHARS


def test_a_long_text_of_few_tokens_passes() -> None:
    tokenizer = Counting(chars_a_token=1000, longest=1000)
    refuse_too_long("x" * (1 << 20), tokenizer, limit=4096)
    assert tokenizer.n_read == 1 << 20


def test_tokens_that_only_cutting_adds_do_not_count() -> None:
    """The whole text has one token per 1000 characters; every slice ends with a partial one."""
    tokenizer = Counting(chars_a_token=1000, longest=1000)
    text = "x" * (4 * SLICE_CHARS)
    n_tokens = len(tokenizer.encode(text, add_special=False))
    refuse_too_long(text, tokenizer, limit=n_tokens + 1)
    with pytest.raises(ContextTooLong):
        refuse_too_long(text, tokenizer, limit=n_tokens // 2)


def test_ordinary_texts_are_not_looked_at() -> None:
    tokenizer = Counting()
    refuse_too_long("x" * 4096 * 8, tokenizer, limit=4096)
    refuse_too_long("x" * SLICE_CHARS, tokenizer, limit=10)
    assert tokenizer.n_read == 0


@pytest.mark.parametrize("source", ["chat", "raw"])
def test_a_prompt_is_refused_before_all_of_it_is_tokenized(source: str) -> None:
    tokenizer = Counting()
    maker = PromptMaker(tokenizer, context_length=1000)
    tokenizer.n_read = 0
    text = "y" * (4 << 20)
    made = RawText(text) if source == "raw" else Chat((Message("user", (TextPart(text),)),))
    with pytest.raises(ContextTooLong):
        maker.make(made)
    assert tokenizer.n_read <= SLICE_CHARS
