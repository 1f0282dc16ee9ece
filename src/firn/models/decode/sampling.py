"""Picking tokens: one batched pass in which every row keeps its own settings.

mlx-lm's samplers apply one set of parameters to the whole batch and draw from a global random
state; here each row has its own temperature, top-k, top-p, min-p, penalties, bias and seed, and a
row's noise depends on nothing but its seed and the number of tokens it has drawn.

    raw logits -> penalties, bias  [logprobs are those of the raw logits]
               -> drop what the row's grammar forbids
               -> drop what top-k, top-p, min-p exclude -> / temperature -> + Gumbel noise -> argmax
"""

from __future__ import annotations

import copy
import hashlib
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from firn.core.errors import FirnError, InvalidValue
from firn.core.events import TokenLogprob
from firn.core.values import Sampling, TokenArray
from firn.models.grammar.compiler import Constraint

TINY = 1e-30
SCORED_ROWS = 32
LEAST_BLOCK = 4
"""Maxima of smaller blocks are hardly fewer than the logits."""
COLDEST = 1e-5
"""Below this temperature the likeliest token is certain, and dividing by it may overflow."""


@dataclass(frozen=True, slots=True)
class Picks:
    """One step's tokens, still on the device; `arrays` are those that must be evaluated."""

    tokens: mx.array
    chosen: mx.array | None
    top_ids: mx.array | None
    top_logprobs: mx.array | None
    kept: tuple[mx.array, ...] = ()
    """Token counts of penalised rows: evaluated in each step, or their graph would keep growing."""

    @property
    def arrays(self) -> list[mx.array]:
        every = (self.tokens, self.chosen, self.top_ids, self.top_logprobs, *self.kept)
        return [a for a in every if a is not None]


class Picker:
    """One row's settings and state: its draws so far and, if penalised, its token counts."""

    def __init__(
        self,
        sampling: Sampling,
        *,
        choice: int,
        vocab_size: int,
        prompt: TokenArray,
        top_logprobs: int | None,
        constraint: Constraint | None = None,
    ) -> None:
        for token, _ in sampling.logit_bias:
            if not 0 <= token < vocab_size:
                raise InvalidValue(
                    "logit_bias", f"token {token} is not in the vocabulary of {vocab_size}"
                )
        self.sampling = sampling
        self.vocab_size = vocab_size
        self.top_logprobs = top_logprobs
        self.constraint = constraint
        self.n_drawn = 0
        self._stream = _stream_of(sampling.seed, choice)
        self._bias: tuple[mx.array, mx.array] | None = None
        if sampling.logit_bias:
            ids, values = zip(*sampling.logit_bias, strict=True)
            self._bias = mx.array(ids), mx.array(values, dtype=mx.float32)
        self._seen: mx.array | None = None
        self._counts: mx.array | None = None
        if sampling.repetition_penalty != 1.0:
            seen = np.zeros((1, vocab_size), dtype=np.bool_)
            seen[0, prompt[(prompt >= 0) & (prompt < vocab_size)]] = True
            self._seen = mx.array(seen)
        if sampling.presence_penalty or sampling.frequency_penalty:
            self._counts = mx.zeros((1, vocab_size), dtype=mx.float32)

    @property
    def fault(self) -> FirnError | None:
        """Why the row cannot continue, if its grammar has failed."""
        return self.constraint.fault if self.constraint else None

    @property
    def greedy(self) -> bool:
        return self.sampling.temperature < COLDEST

    @property
    def reshapes(self) -> bool:
        """Whether this row's logits are changed before sampling."""
        return self._bias is not None or self._seen is not None or self._counts is not None

    def reshape(self, logits: mx.array) -> mx.array:
        """Apply bias and penalties to one row's logits, shape (1, vocabulary), float32."""
        s = self.sampling
        if self._seen is not None:
            penalised = mx.where(
                logits < 0, logits * s.repetition_penalty, logits / s.repetition_penalty
            )
            logits = mx.where(self._seen, penalised, logits)
        if self._counts is not None:
            logits = logits - s.presence_penalty * (self._counts > 0)
            logits = logits - s.frequency_penalty * self._counts
        if self._bias is not None:
            ids, values = self._bias
            logits = logits.at[:, ids].add(values)
        return logits

    def remember(self, token: mx.array) -> list[mx.array]:
        """Count a token (shape (1,), maybe not computed yet); returns the arrays to evaluate."""
        if self._seen is not None:
            self._seen = mx.put_along_axis(self._seen, token[None], mx.array(True), axis=1)
        if self._counts is not None:
            self._counts = self._counts.at[:, token].add(1.0)
        return [a for a in (self._seen, self._counts) if a is not None]

    def replay(self, reply: Sequence[int]) -> None:
        """Move to the state after picking these tokens."""
        self.n_drawn = len(reply)
        if self.constraint is not None:
            self.constraint.take(reply)
        ids = np.array(reply, dtype=np.int64)
        if self._seen is not None:
            seen = np.array(self._seen)
            seen[0, ids] = True
            self._seen = mx.array(seen)
        if self._counts is not None:
            counts = np.bincount(ids, minlength=self._counts.shape[-1])
            self._counts = mx.array(counts[None].astype(np.float32))

    def ahead(self, draft: Sequence[int]) -> list[Picker]:
        """A picker for the next token and one for the token after each drafted one, as if all
        drafted tokens were right.

        They have no grammar: the caller masks each position itself.
        """
        if self.greedy and not self.reshapes:  # they would all be the same
            alike = copy.copy(self)
            alike.constraint = None
            return [alike] * (len(draft) + 1)
        pickers: list[Picker] = []
        for i in range(len(draft) + 1):
            picker = copy.copy(pickers[-1] if pickers else self)
            picker.n_drawn, picker.constraint = self.n_drawn + i, None
            if i and picker.reshapes:
                picker.remember(mx.array([draft[i - 1]]))
            pickers.append(picker)
        return pickers

    def catch_up(self, last: Picker, n_taken: int) -> None:
        """`n_taken` tokens were taken; `last` is the picker from `ahead` that picked the newest."""
        self.n_drawn += n_taken
        self._seen, self._counts = last._seen, last._counts

    @property
    def stream(self) -> tuple[int, int]:
        """The id of its random stream, and how many tokens were drawn from it."""
        return self._stream, self.n_drawn

    def key(self) -> tuple[int, int]:
        """The random key of the next draw."""
        self.n_drawn += 1
        return self.stream


def pick(
    logits: mx.array,
    pickers: Sequence[Picker],
    forced: Sequence[int | None] | mx.array | None = None,
    *,
    allowed: mx.array | None = None,
    keys: mx.array | None = None,
) -> Picks:
    """Choose a token for every row of `logits` (rows, vocabulary), or take the row's forced one.

    forced: in an array, -1 means none. allowed: true for the tokens that the rows' grammars allow;
    no other token is picked, even if it is forced. keys: random keys of the draws; None: the
    pickers' next ones.
    """
    logits = logits.astype(mx.float32)
    shaped = logits
    if any(p.reshapes for p in pickers):
        rows = [logits[i : i + 1] for i in range(len(pickers))]
        shaped = mx.concatenate(
            [p.reshape(r) if p.reshapes else r for p, r in zip(pickers, rows, strict=True)]
        )
    if allowed is not None:  # after everything else that changes logits
        shaped = mx.where(allowed, shaped, -math.inf)
    if all(p.greedy for p in pickers):
        tokens = mx.argmax(shaped, axis=-1)
    else:
        tokens = _draw(shaped, pickers, keys)
    given = _given(forced)
    if given is not None:
        is_free, token = given < 0, mx.maximum(given, 0)
        if allowed is not None:
            is_free |= ~mx.take_along_axis(allowed, token[:, None], axis=-1)[:, 0]
        tokens = mx.where(is_free, tokens, token.astype(tokens.dtype))
    kept: list[mx.array] = []
    for i, p in enumerate(pickers):
        if p.reshapes:
            kept += p.remember(tokens[i : i + 1])
    chosen, top_ids, top_logprobs = _logprobs(logits, tokens, pickers)
    return Picks(tokens, chosen, top_ids, top_logprobs, tuple(kept))


def _given(forced: Sequence[int | None] | mx.array | None) -> mx.array | None:
    """The forced tokens, -1 where there is none; None if no row has one."""
    if forced is None or isinstance(forced, mx.array):
        return forced
    if all(token is None for token in forced):
        return None
    return mx.array([-1 if token is None else token for token in forced])


def read_logprobs(picks: Picks, pickers: Sequence[Picker]) -> list[TokenLogprob | None]:
    """The evaluated logprobs of one step: one entry per row, None for a row that asked for none."""
    if picks.chosen is None:
        return [None] * len(pickers)
    tokens, chosen = to_host(picks.tokens), to_host(picks.chosen)
    ids = to_host(picks.top_ids) if picks.top_ids is not None else None
    tops = to_host(picks.top_logprobs) if picks.top_logprobs is not None else None
    out: list[TokenLogprob | None] = []
    for i, p in enumerate(pickers):
        if p.top_logprobs is None:
            out.append(None)
            continue
        best: list[tuple[int, float]] = []
        if p.top_logprobs and ids is not None and tops is not None:
            best = sorted(zip(ids[i], tops[i], strict=True), key=lambda x: -x[1])
        out.append(TokenLogprob(tokens[i], chosen[i], tuple(best[: p.top_logprobs])))
    return out


def as_picked(tokens: Sequence[int]) -> mx.array:
    """Tokens in the dtype of picked ones. A mix of dtypes would become int64, and on a GPU the next
    step would need its own kernels and its own trace for each dtype."""
    return mx.array(list(tokens), dtype=mx.uint32)


def to_host(array: mx.array) -> Any:
    """An array's values as plain (nested) lists."""
    return array.tolist()


def _draw(logits: mx.array, pickers: Sequence[Picker], keys: mx.array | None) -> mx.array:
    """Gumbel-max sampling; greedy rows get no noise."""
    kept = _exclude(logits, [p.sampling for p in pickers])
    temperature = mx.array([[1.0 if p.greedy else p.sampling.temperature] for p in pickers])
    if keys is None:
        keys = mx.array(np.array([p.key() for p in pickers], dtype=np.uint32))
    shape = (logits.shape[-1],)
    uniform = mx.vmap(lambda key: mx.random.uniform(shape=shape, key=key))(keys)
    # A uniform 0 would make the noise -inf, but the only allowed token must stay possible.
    noise = mx.log(-mx.log(mx.maximum(uniform, TINY)))
    if any(p.greedy for p in pickers):
        is_greedy = mx.array([[p.greedy] for p in pickers])
        noise = mx.where(is_greedy, 0.0, noise)
    return mx.argmax(kept / temperature - noise, axis=-1)


def _exclude(logits: mx.array, settings: Sequence[Sampling]) -> mx.array:
    """Exclude tokens (-inf) by top-k, top-p and min-p. The likeliest token always stays."""
    needs_sort = any(s.top_k or s.top_p < 1.0 for s in settings)
    needs_min = any(s.min_p for s in settings)
    if not needs_sort and not needs_min:
        return logits
    floor = mx.full((len(settings), 1), -math.inf)
    top = mx.max(logits, axis=-1, keepdims=True)
    if needs_min:
        logs = [[math.log(s.min_p) if s.min_p else -math.inf] for s in settings]
        floor = mx.maximum(floor, top + mx.array(logs))
    if needs_sort:
        vocab = logits.shape[-1]
        limited = [bool(s.top_k or s.top_p < 1.0) for s in settings]
        n_most = [min(s.top_k or vocab, vocab) for s in settings]
        down = _likeliest(logits, max(n for n, is_so in zip(n_most, limited, strict=True) if is_so))
        # A token stays while the mass before it is under top_p; the first one always does.
        before = mx.cumsum(mx.exp(down - top), axis=-1, inclusive=False)
        share = mx.array([[s.top_p if s.top_p < 1.0 else 2.0] for s in settings])
        limit = share * mx.exp(logits - top).sum(axis=-1, keepdims=True)
        n_kept = mx.maximum((before < limit).sum(axis=-1, keepdims=True), 1)
        last = mx.minimum(n_kept, mx.array([[n] for n in n_most])) - 1
        lowest = mx.take_along_axis(down, last, axis=-1)
        if not all(limited):
            lowest = mx.where(mx.array([[is_so] for is_so in limited]), lowest, -math.inf)
        floor = mx.maximum(floor, lowest)
    return mx.where(logits < floor, -math.inf, logits)


def _likeliest(logits: mx.array, n: int) -> mx.array:
    """The n largest logits of each row, in descending order.

    They are in those n blocks whose maxima are the largest. So the maxima are sorted, and then what is
    in these blocks: two short lists instead of the vocabulary.
    """
    n_rows, vocab = logits.shape
    size = 1 << (math.isqrt(vocab // n).bit_length() - 1)
    if size < LEAST_BLOCK:
        return -mx.sort(-logits, axis=-1)[:, :n]
    short = -vocab % size
    whole = mx.pad(logits, [(0, 0), (0, short)], constant_values=-math.inf) if short else logits
    blocks = whole.reshape(n_rows, -1, size)
    best = mx.argsort(blocks.max(axis=-1), axis=-1)[:, -n:]
    among = mx.take_along_axis(blocks, best[..., None], axis=1).reshape(n_rows, -1)
    return -mx.sort(-among, axis=-1)[:, :n]


def _logprobs(
    logits: mx.array, tokens: mx.array, pickers: Sequence[Picker]
) -> tuple[mx.array | None, mx.array | None, mx.array | None]:
    wanted = [p.top_logprobs for p in pickers if p.top_logprobs is not None]
    return _likelihoods(logits, tokens, max(wanted)) if wanted else (None, None, None)


def _likelihoods(
    logits: mx.array, tokens: mx.array, top: int
) -> tuple[mx.array, mx.array | None, mx.array | None]:
    """Logprobs of each row's token; ids and logprobs of the `top` likeliest, unordered. float32."""
    normal = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(normal, tokens[:, None], axis=-1)[:, 0]
    k = min(top, logits.shape[-1] - 1)
    if k == 0:
        return chosen, None, None
    ids = mx.argpartition(-normal, kth=k - 1, axis=-1)[:, :k]
    return chosen, ids, mx.take_along_axis(normal, ids, axis=-1)


# --- the prompt's own tokens ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Logprobs of a prompt's tokens; on the device until they are read."""

    tokens: TokenArray
    parts: tuple[tuple[mx.array, mx.array | None, mx.array | None], ...]

    @property
    def arrays(self) -> list[mx.array]:
        return [array for part in self.parts for array in part if array is not None]

    def read(self) -> list[TokenLogprob]:
        logprobs: list[TokenLogprob] = []
        for chosen, ids, tops in self.parts:
            best: list[list[tuple[int, float]]] = []
            if ids is not None and tops is not None:
                rows = zip(to_host(ids), to_host(tops), strict=True)
                best = [sorted(zip(*row, strict=True), key=lambda x: -x[1]) for row in rows]
            for i, logprob in enumerate(to_host(chosen)):
                token = int(self.tokens[len(logprobs)])
                logprobs.append(TokenLogprob(token, logprob, tuple(best[i]) if best else ()))
        return logprobs


def score(logits: mx.array, tokens: TokenArray, *, top: int) -> PromptScores:
    """Score the n tokens that followed, by the logits (n, vocabulary).

    A few rows at a time: the intermediate arrays are several times the size of the logits.
    """
    parts = []
    for start in range(0, len(tokens), SCORED_ROWS):
        end = start + SCORED_ROWS
        given = mx.array(tokens[start:end].astype(np.int32))
        parts.append(_likelihoods(logits[start:end].astype(mx.float32), given, top))
    return PromptScores(tokens, tuple(parts))


def _stream_of(seed: int | None, choice: int) -> int:
    """32 bits that distinguish this row's random stream from every other row's."""
    if seed is None:
        return secrets.randbits(32)
    digest = hashlib.blake2b(f"{seed}:{choice}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")
