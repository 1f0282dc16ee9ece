"""Fill in the middle: which control tokens a model was trained with for it, and how they are used.

Read once from the vocabulary. A model that lacks one of a family's tokens was not trained for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from firn.core.ports import Tokenizer
from firn.text.prompt.rendering import Span


@dataclass(frozen=True, slots=True)
class _InfillTokens:
    """order: tokens, the text before the gap ("P") and the text after it ("S"). ends: further
    tokens that end the filled-in text."""

    order: tuple[str, ...]
    ends: tuple[str, ...] = ()


UNJOINED = "\u263a"
"""A character that no tokenizer joins with what follows it."""

_FAMILIES = (
    # Qwen-Coder, CodeGemma
    _InfillTokens(
        ("<|fim_prefix|>", "P", "<|fim_suffix|>", "S", "<|fim_middle|>"),
        ("<|fim_pad|>", "<|file_sep|>", "<|file_separator|>", "<|repo_name|>", "<|endoftext|>"),
    ),
    # StarCoder, Granite Code
    _InfillTokens(
        ("<fim_prefix>", "P", "<fim_suffix>", "S", "<fim_middle>"),
        ("<fim_pad>", "<file_sep>", "<|endoftext|>"),
    ),
    # SantaCoder
    _InfillTokens(("<fim-prefix>", "P", "<fim-suffix>", "S", "<fim-middle>"), ("<|endoftext|>",)),
    # DeepSeek-Coder
    _InfillTokens(("<｜fim▁begin｜>", "P", "<｜fim▁hole｜>", "S", "<｜fim▁end｜>")),
    # Seed-Coder
    _InfillTokens(("<[fim-suffix]>", "S", "<[fim-prefix]>", "P", "<[fim-middle]>")),
    # Codestral
    _InfillTokens(("[SUFFIX]", "S", "[PREFIX]", "P")),
    # CodeLlama: its tokens begin with a space, or with SentencePiece's symbol for one
    _InfillTokens((" <PRE>", "P", " <SUF>", "S", " <MID>"), (" <EOT>",)),
)


TypedSpans = Callable[[str], Sequence[Span]]
"""The spans of a text that spell a control token but are plain text."""


def _nowhere(text: str) -> Sequence[Span]:
    return ()


@dataclass(frozen=True, slots=True)
class Infill:
    """How one model fills in the middle. Immutable."""

    tokenizer: Tokenizer
    order: tuple[int | str, ...]
    """Tokens, and the places of the two texts: "P" before the gap and "S" after it."""
    ends: frozenset[int]

    def ids(
        self, prefix: str, suffix: str, *, add_special: bool = True, typed: TypedSpans = _nowhere
    ) -> list[int]:
        """The prompt's tokens. add_special: include those that begin every prompt of this model."""
        ids = _opening(self.tokenizer) if add_special else []
        for item in self.order:
            if isinstance(item, int):
                ids.append(item)
            elif item == "P":
                ids += self.tokenizer.encode(prefix, add_special=False, typed=typed(prefix))
            else:
                ids += _encode_inside(self.tokenizer, suffix, typed(suffix))
        return ids


def detect_infill(tokenizer: Tokenizer) -> Infill | None:
    """How this model fills in the middle; None where it has no tokens for that."""
    for family in _FAMILIES:
        order = [text if text in ("P", "S") else _token(tokenizer, text) for text in family.order]
        if None not in order:
            ends = {_token(tokenizer, text) for text in family.ends}
            tokens = {item for item in order if isinstance(item, int)}
            return Infill(
                tokenizer,
                tuple(item for item in order if item is not None),
                frozenset({*tokens, *(token for token in ends if token is not None)}),
            )
    return None


def _token(tokenizer: Tokenizer, text: str) -> int | None:
    token = tokenizer.token_id(text)
    return tokenizer.token_id(text.replace(" ", "\u2581")) if token is None else token


def _encode_inside(tokenizer: Tokenizer, text: str, typed: Sequence[Span]) -> Sequence[int]:
    """The tokens of a text in the middle of a prompt. Some tokenizers put a space before every text;
    models were trained without it here."""
    before = tokenizer.encode(UNJOINED, add_special=False)
    if not tokenizer.token_bytes(before[0]).startswith(b" "):
        return tokenizer.encode(text, add_special=False, typed=typed)
    moved = [(start + 1, end + 1) for start, end in typed]
    ids = tokenizer.encode(UNJOINED + text, add_special=False, typed=moved)
    return ids[len(before) :]


def _opening(tokenizer: Tokenizer) -> list[int]:
    """The tokens that the tokenizer puts in front of every text."""
    ids: Sequence[int] = tokenizer.encode("", add_special=True)
    while ids and ids[-1] in tokenizer.eos and len(ids) > 1:  # some append one as well
        ids = ids[:-1]
    return list(ids)
