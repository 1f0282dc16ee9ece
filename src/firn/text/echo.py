"""A raw prompt as its reply repeats it: its text and, token by token, how likely each one was. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from firn.core.events import TextLogprob, TokenLogprob
from firn.core.ports import Tokenizer
from firn.core.values import TokenArray


def echoed(
    tokenizer: Tokenizer, text: str, ids: TokenArray, logprobs: Sequence[TokenLogprob]
) -> tuple[TextLogprob, ...]:
    """`logprobs` are those of ids[1:]. What the tokenizer put in front of the text is shown as
    tokens, but is no part of the text."""
    texts = [tokenizer.token_bytes(int(token)) for token in ids]
    n_added = 0
    while n_added < len(ids) and int(ids[n_added]) in tokenizer.special:
        if text.startswith(_shown(texts[n_added])):
            break
        n_added += 1
    found = []
    for i, raw in enumerate(texts):
        own = b"" if i < n_added else raw
        if i == 0:
            found.append(TextLogprob(_shown(raw), own, None))
            continue
        score = logprobs[i - 1]
        top = []
        for token, logprob in score.top:
            each = tokenizer.token_bytes(token)
            top.append((_shown(each), each, logprob))
        found.append(TextLogprob(_shown(raw), own, score.logprob, tuple(top)))
    return tuple(found)


def _shown(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")
