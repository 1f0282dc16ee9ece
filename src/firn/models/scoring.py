"""Which tokens of a prompt matter, by the attention of a small model that has the same tokens.

The small model reads the prompt (resuming from the prefixes it has kept under its own root), says the
first few tokens of a reply, and its queries for these are held against the prompt's keys:

    score of a token = mean over the tokens said, of the most that any head of any layer attends to it

Slices: a chunk of the prompt, or one token said; several of them where nobody waits. `read` dispatches
one, `settle` waits for it.

Owner: the engine thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from firn.core.ports import Cursor, EngineLoad, PrefixCache
from firn.core.values import CacheControl, ModelInfo, Namespace, Prompt, Scores
from firn.models.batch import Row
from firn.models.cpu.threads import Threads
from firn.models.placing import PLAIN
from firn.models.rewind import kind, leaves
from firn.models.room import give_room

VERSION = 1
"""Of how tokens are scored and chosen: records of another are not found."""
N_SAID = 16
"""A reply often begins by repeating the question: what it looks for comes after that."""


N_AT_ONCE = 4
"""Chunks that are dispatched together while nobody waits: a small model's are over before the next one
is made ready."""


@dataclass(eq=False)
class Reading:
    """One prompt on its way through the small model.

    # [0, row.n_tokens) read   [row.n_tokens, n_prompt - 1) to read   then n_said tokens are said
    """

    prompt: Prompt
    cursor: Cursor
    row: Row
    token: mx.array
    """What it is fed next, once the prompt is read: the prompt's last token, then its own."""
    total: mx.array | None = None
    n_said: int = 0
    pending: list[Any] = field(default_factory=list)

    @property
    def n_total(self) -> int:
        return len(self.prompt) - 1

    @property
    def is_read(self) -> bool:
        return self.row.n_tokens >= self.n_total

    @property
    def is_over(self) -> bool:
        return self.n_said >= N_SAID


class AttentionScorer:
    """Implements core.ports.Scorer."""

    def __init__(
        self,
        model: Any,
        info: ModelInfo,
        *,
        make_layers: Callable[[], list[Any]],
        cache: PrefixCache[Cursor],
        owns_cache: bool = True,
        threads: Threads | None = None,
    ) -> None:
        """owns_cache: nobody else closes it. threads: of the library that multiplies, as the runner has
        them.

        Raises ValueError for a model whose attention is not heard.
        """
        self._model = model
        self._make_layers = make_layers
        self._cache = cache
        self._owns_cache = owns_cache
        self._threads = threads
        self._last_id = info.n_ids - 1
        self.max_tokens = info.context_length - N_SAID
        # What others keep by the chunk (states, windows) is cut after each.
        self._in_runs = all(kind(layer) in PLAIN for layer in leaves(make_layers()))
        self.recipe = f"sparse{VERSION};draft {info.fingerprint.hex()}"
        with _overhearing(2) as heard:
            layers = make_layers()
            for _ in range(2):
                mx.eval(model(mx.array([[1]]), cache=layers))
        if not heard:
            raise ValueError("no layer of it attends to the whole prompt")

    def open(self, prompt: Prompt, namespace: Namespace, control: CacheControl) -> Reading:
        cursor = self._cache.open(prompt, namespace, control)
        restored = self._cache.restore(cursor)
        layers = self._make_layers()
        if restored is not None:
            restored.fill(layers)
        row = Row(layers, restored.n_tokens if restored else 0)
        if restored is not None:
            restored.filled(row)
        last = min(int(prompt.ids[-1]), self._last_id)
        return Reading(prompt, cursor, row, mx.array([last]))

    def read(self, reading: Reading, n_tokens: int, *, alone: bool = False) -> None:
        self._cache.tick(EngineLoad.PREFILLING)
        if not reading.is_read:
            self._jump(reading)
        n_most = N_AT_ONCE if alone and self._in_runs else 1
        if reading.is_read:
            for _ in range(min(N_SAID - reading.n_said, N_SAID if alone else 1)):
                self._say(reading)
        while not reading.is_read and n_most and not reading.n_said:
            self._read_chunk(reading, n_tokens)
            n_most -= 1

    def _jump(self, reading: Reading) -> None:
        """Something longer than what it has read was loaded meanwhile."""
        ahead = self._cache.advance(reading.cursor, reading.row.n_tokens)
        if ahead is not None:
            layers = self._make_layers()
            ahead.fill(layers)
            reading.row = Row(layers, ahead.n_tokens)
            ahead.filled(reading.row)

    def _read_chunk(self, reading: Reading, n_tokens: int) -> None:
        row = reading.row
        end = min(row.n_tokens + n_tokens, reading.n_total)
        end = min([end, *(p for p in self._cache.stops(reading.cursor) if p > row.n_tokens)])
        give_room(row.layers, len(reading.prompt) + N_SAID)
        self._prepare(end - row.n_tokens)
        ids = np.minimum(reading.prompt.ids[row.n_tokens : end], self._last_id)
        self._model(mx.array(ids.astype(np.int32))[None], cache=row.layers)
        row.n_tokens = end
        reading.pending = [layer.state for layer in row.layers]
        mx.async_eval(reading.pending)

    def _say(self, reading: Reading) -> None:
        if not reading.n_said and not self._in_runs:
            # What it says itself is nobody's prefix, and cannot be taken back: what was true of the row
            # is stored before. Its buffers may be another row's from now on.
            self._cache.close_cursor(reading.cursor, reading.row)
            for layer in leaves(reading.row.layers):
                if kind(layer) in PLAIN:
                    layer.state = layer.state
        self._prepare(1)
        n_keys = reading.row.n_tokens + 1
        with _overhearing(n_keys) as heard:
            logits = self._model(reading.token[:, None], cache=reading.row.layers)
        reading.row.n_tokens = n_keys
        most = heard[0]
        for other in heard[1:]:
            most = mx.maximum(most, other)
        most = most[: len(reading.prompt)]
        reading.total = most if reading.total is None else reading.total + most
        reading.token = mx.argmax(logits[:, -1], axis=-1)
        reading.n_said += 1
        reading.pending = [reading.total, reading.token]
        mx.async_eval(reading.pending)

    def _prepare(self, n_tokens: int) -> None:
        if self._threads is not None:
            self._threads.prepare(n_tokens)

    def settle(self, reading: Reading) -> bool:
        mx.eval(reading.pending)
        reading.pending = []
        if not reading.n_said:
            self._cache.commit(reading.cursor, reading.row)
        return reading.is_over

    def scores(self, reading: Reading) -> Scores:
        assert reading.total is not None
        mean: Scores = np.array(reading.total / reading.n_said, dtype=np.float32)
        return mean

    def n_left(self, reading: Reading) -> int:
        return max(reading.n_total - reading.row.n_tokens, 0) + N_SAID - reading.n_said

    def close_reading(self, reading: Reading) -> None:
        row, n_said = reading.row, reading.n_said
        if n_said and self._in_runs:
            for layer in leaves(row.layers):
                layer.trim(n_said)
            row.n_tokens -= n_said
        mx.eval(reading.pending)  # a step in flight would make the next write copy
        self._cache.close_cursor(reading.cursor, row)
        reading.row = Row([])

    def close(self) -> None:
        if self._owns_cache:
            self._cache.close()


@contextmanager
def _overhearing(n_keys: int) -> Iterator[list[mx.array]]:
    """While the model is called with one token: how much it is to each key, for each layer that has
    `n_keys` of them. (keys,), the most of any head."""
    heard: list[mx.array] = []
    plain = mx.fast.scaled_dot_product_attention

    def attend(q: mx.array, k: mx.array, v: mx.array, **more: Any) -> mx.array:
        if q.shape[2] == 1 and k.shape[2] == n_keys:
            heard.append(_weights(q, k, float(more["scale"])))
        return plain(q, k, v, **more)

    mx.fast.scaled_dot_product_attention = attend
    try:
        yield heard
    finally:
        mx.fast.scaled_dot_product_attention = plain


def _weights(q: mx.array, k: mx.array, scale: float) -> mx.array:
    n_heads, n_kv = q.shape[1], k.shape[1]
    # (heads of a kv head, width) @ (width, keys): no key is repeated.
    grouped = q[0].reshape(n_kv, n_heads // n_kv, q.shape[-1])
    logits = (grouped @ k[0].swapaxes(-1, -2)).astype(mx.float32) * scale
    return mx.max(mx.softmax(logits, axis=-1), axis=(0, 1))
