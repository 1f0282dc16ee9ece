"""Chooses which tokens of a long uncached prompt are read. Pure functions of scores.

    0        n_cached                                             n_prompt
    |--------|==chunk==|--------|==chunk==|---------|=============|
     resumed  essential  skipped  best scores         newest message

Chunks of 32 tokens at absolute positions are chosen, not tokens: a fact is longer than its best token,
and prompts that differ a little yield similar choices.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from firn.core.values import Job, Prompt, TokenArray
from firn.sparse.rules import Sparse
from firn.sparse.scorer import Scores
from firn.sparse.thinned import Thinned

CHUNK = 32
MAX_SHARE = 0.9
"""If more than this share of the uncached tokens would be read, all of them are."""
KEEP_STEP = 0.01
NEIGHBOUR_SHARE = 0.5
"""A chunk scores at least this share of what its neighbours do: facts cross chunk borders."""


def why_not(job: Job, sparse: Sparse, *, n_expected: int, max_tokens: int) -> str:
    """Why this prompt must be read in full; '' if it may be thinned.

    n_expected: tokens that are cached, or being loaded from a tier.
    """
    n_prompt = len(job.prompt)
    if not job.max_tokens:
        return "it asks for no reply"
    if sparse.keep > MAX_SHARE:
        return f"keep is {sparse.keep:g}, above {MAX_SHARE:g}"
    if job.prompt_logprobs:
        return "it asks for the logprobs of its prompt"
    if job.prompt.picture_spans:
        return "it has pictures"
    if n_prompt - n_expected <= sparse.over:
        return f"{n_prompt - n_expected} tokens are not cached, and the threshold is {sparse.over}"
    if n_prompt > max_tokens:
        return f"it has {n_prompt} tokens, and the draft model accepts at most {max_tokens}"
    if _n_read(job.prompt, n_expected, sparse.keep) > MAX_SHARE * (n_prompt - n_expected):
        return "too little of it may be skipped"
    return ""


def _n_read(prompt: Prompt, n_cached: int, keep: float) -> float:
    """Roughly how many uncached tokens will be read. Essential ranges do not overlap; they count as
    they are, not in whole chunks."""
    n_essential = sum(max(end - max(start, n_cached), 0) for start, end in prompt.essential)
    return n_essential + keep * (len(prompt) - n_cached - n_essential)


def select(
    scores: Scores,
    *,
    start: int,
    keep: float,
    essential: Sequence[tuple[int, int]] = (),
) -> TokenArray:
    """The positions to read: all before `start`, the first and the last chunk, every essential one, and
    the share `keep` of the other tokens, in whole chunks by mean score, smoothed over neighbours.

    Essential tokens do not count towards the share: a long list of tools must not use it up.
    """
    n = len(scores)
    edges = np.unique([start, *range(start - start % CHUNK + CHUNK, n, CHUNK), n])
    starts, lengths = edges[:-1], np.diff(edges)
    chosen = np.zeros(len(starts), dtype=np.bool_)
    chosen[[0, -1]] = True
    for first, end in essential:
        chosen |= (starts < end) & (edges[1:] > first)
    room = keep * lengths[~chosen].sum()
    means = np.add.reduceat(scores, starts) / lengths
    smooth = means.copy()
    smooth[1:] = np.maximum(smooth[1:], NEIGHBOUR_SHARE * means[:-1])
    smooth[:-1] = np.maximum(smooth[:-1], NEIGHBOUR_SHARE * means[1:])
    for i in np.argsort(-smooth, kind="stable"):
        if room < lengths[i]:
            break
        if not chosen[i]:
            chosen[i] = True
            room -= lengths[i]
    kept = np.repeat(chosen, lengths)
    rest = start + np.flatnonzero(kept)
    return np.concatenate([np.arange(start), rest]).astype(np.int64)


def thinned(prompt: Prompt, positions: TokenArray, *, start: int, recipe: str) -> Prompt | None:
    """What to read of the prompt; None: all of it, because too little would be skipped."""
    n_cold = len(prompt) - start
    if len(positions) - start > MAX_SHARE * n_cold:
        return None
    thin = Thinned(positions, prompt, recipe)
    return Prompt(prompt.ids[positions], positions=thin, salt=prompt.salt)


def recipe_of(scorer: str, keep: float) -> str:
    return f"{scorer};keep {keep:.2f}"


def recipes_of(scorer: str) -> list[str]:
    """Every recipe of this scorer: shares are whole percentages."""
    return [recipe_of(scorer, i * KEEP_STEP) for i in range(1, 101)]
