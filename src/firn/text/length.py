"""Refuses a text that is too long for the model before all of it is tokenized, which is slow."""

from __future__ import annotations

from firn.core.errors import ContextTooLong
from firn.core.ports import Tokenizer

SUSPICIOUS_CHARS = 8
"""Per token of the context: a longer text is first tokenized in slices. Prose and code have three
to five characters per token; a text that has more, but fits, is tokenized twice."""
SLICE_CHARS = 1 << 18
SLACK_TOKENS = 64
"""Per slice: the most tokens that cutting the text may add."""


def refuse_too_long(text: str, tokenizer: Tokenizer, *, limit: int) -> None:
    """Raises ContextTooLong, with an estimate of the token count; a text that may fit passes."""
    n_chars = len(text)
    if n_chars <= max(limit * SUSPICIOUS_CHARS, SLICE_CHARS):
        return
    if n_chars > limit * tokenizer.max_token_chars:
        n_tokens = len(tokenizer.encode(text[:SLICE_CHARS], add_special=False))
        raise _too_long(n_tokens, SLICE_CHARS, n_chars, limit)
    n_tokens = 0
    for start in range(0, n_chars, SLICE_CHARS):
        piece = text[start : start + SLICE_CHARS]
        n_tokens += max(len(tokenizer.encode(piece, add_special=False)) - SLACK_TOKENS, 0)
        if n_tokens >= limit:
            raise _too_long(n_tokens, start + len(piece), n_chars, limit)


def _too_long(n_tokens: int, n_seen: int, n_chars: int, limit: int) -> ContextTooLong:
    return ContextTooLong(max(n_tokens * n_chars // n_seen, limit), limit, estimated=True)
