"""Echoes a prompt in its reply: the text and, for each token, how likely it was. Pure."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from firn.core.events import TextLogprob, TokenLogprob
from firn.core.ports import Tokenizer
from firn.core.values import TokenArray

SLICE_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class EchoSlice:
    """Some of a prompt's tokens, and their text."""

    text: str
    logprobs: tuple[TextLogprob, ...] = ()


def echoed(
    tokenizer: Tokenizer, text: str, ids: TokenArray, logprobs: Sequence[TokenLogprob]
) -> list[EchoSlice]:
    """The whole prompt in slices. `logprobs` are those of ids[1:]. Tokens that the tokenizer put before
    the text are shown as tokens, but have no text."""

    @cache
    def piece(token: int) -> tuple[str, bytes]:
        raw = tokenizer.token_bytes(token)
        return raw.decode("utf-8", "replace"), raw

    def scored(at: int) -> TextLogprob:
        shown, raw = piece(int(ids[at]))
        own = b"" if at < n_added else raw
        if at == 0:
            return TextLogprob(shown, own, None)
        score = logprobs[at - 1]
        top = tuple((*piece(token), logprob) for token, logprob in score.top)
        return TextLogprob(shown, own, score.logprob, top)

    n_added = 0
    while n_added < len(ids) and int(ids[n_added]) in tokenizer.special:
        if text.startswith(piece(int(ids[n_added]))[0]):
            break
        n_added += 1
    slices = [
        tuple(scored(at) for at in range(start, min(start + SLICE_TOKENS, len(ids))))
        for start in range(0, len(ids), SLICE_TOKENS)
    ]
    texts = _texts(slices)
    if "".join(texts) != text:  # some tokenizers change a text, if only by a leading space
        texts = [text, *[""] * (len(slices) - 1)]
    return [EchoSlice(*each) for each in zip(texts, slices, strict=True)]


def _texts(slices: Sequence[Sequence[TextLogprob]]) -> list[str]:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return [
        decoder.decode(b"".join(token.raw for token in each), final=each is slices[-1])
        for each in slices
    ]
