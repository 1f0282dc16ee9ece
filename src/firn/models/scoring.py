"""Which tokens of a prompt matter, by the attention of a small model that has the same tokens.

The small model reads the prompt (resuming from the prefixes it has kept under its own root) and says the
first few tokens of a reply. Its queries for these are compared with the prompt's keys at the end:

    score of a token = mean over the tokens said, of the most that any head of any layer attends to it

Slices: a chunk of the prompt, one token said (all of them where nobody waits), the comparison. `read`
dispatches one, `settle` waits for it. Each is awaited before the next one is dispatched: a buffer that a
kernel in flight still reads cannot be written in place, and the row's keys and values would be copied.

Owner: the engine thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import numpy as np

from firn.core.ports import EngineLoad, PrefixCache
from firn.core.values import CacheControl, ModelInfo, Namespace, Prompt, Scores
from firn.models.batch import Row
from firn.models.cpu.threads import Threads
from firn.models.placing import PLAIN
from firn.models.rewind import kind, leaves
from firn.models.room import give_room
from firn.models.shapes import FewShapes

VERSION = 2
"""Of how tokens are scored and chosen: records of another are not found."""
N_SAID = 16
"""A reply often begins by repeating the question: what it looks for comes after that."""


@dataclass(frozen=True, slots=True)
class Attended:
    """What one layer was asked for: (1, heads, tokens, width) and (1, kv heads, keys, width)."""

    queries: mx.array
    keys: mx.array
    scale: float


@dataclass(eq=False)
class Reading:
    """One prompt on its way through the small model.

    # [0, row.n_tokens) read   [row.n_tokens, n_prompt - 1) to read   then N_SAID tokens are said
    """

    prompt: Prompt
    cursor: Any
    row: Row
    token: mx.array
    """What it is fed next, once the prompt is read: the prompt's last token, then its own."""
    queries: list[dict[int, mx.array]] = field(default_factory=list)
    """For each token said: those of every layer that attends to the whole prompt."""
    attended: dict[int, Attended] = field(default_factory=dict)
    """By the last token said, and layer."""
    scores: mx.array | None = None
    pending: list[Any] = field(default_factory=list)

    @property
    def n_total(self) -> int:
        return len(self.prompt) - 1

    @property
    def is_read(self) -> bool:
        return self.row.n_tokens >= self.n_total

    @property
    def n_said(self) -> int:
        return len(self.queries)


class AttentionScorer:
    """Implements core.ports.Scorer."""

    def __init__(
        self,
        model: Any,
        info: ModelInfo,
        *,
        make_layers: Callable[[], list[Any]],
        cache: PrefixCache,
        owns_cache: bool = True,
        threads: Threads | None = None,
        shapes: FewShapes | None = None,
    ) -> None:
        """owns_cache: nobody else closes it. threads, shapes: as the runner has them.

        Raises ValueError for a model whose attention is not heard.
        """
        self._model = model
        self._make_layers = make_layers
        self._cache = cache
        self._owns_cache = owns_cache
        self._threads = threads
        self._shapes = shapes
        self._last_id = info.n_ids - 1
        self.max_tokens = info.context_length - N_SAID
        # Of these, what it says itself can be taken back.
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
        if not reading.is_read:
            self._read_chunk(reading, n_tokens)
        elif reading.n_said < N_SAID:
            for _ in range(N_SAID - reading.n_said if alone else 1):
                self._say(reading)
        else:
            self._compare(reading)

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
        if self._shapes is not None:
            end = self._shapes.end(row.n_tokens, end)
        end = min([end, *(p for p in self._cache.stops(reading.cursor) if p > row.n_tokens)])
        give_room(row.layers, len(reading.prompt) + N_SAID, few_shapes=self._shapes is not None)
        ids, layers = np.minimum(reading.prompt.ids[row.n_tokens : end], self._last_id), row.layers
        padded = self._shapes.fit(layers, len(ids)) if self._shapes is not None else None
        if padded is not None:
            ids, layers = padded.pad(ids), padded.layers
        self._prepare(len(ids))
        self._model(mx.array(ids.astype(np.int32))[None], cache=layers)
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
        reading.queries.append({i: layer.queries for i, layer in heard.items()})
        if reading.n_said == N_SAID:
            # Not before: the next token is written in place only where nobody else has the keys.
            reading.attended = heard
        reading.token = mx.argmax(logits[:, -1], axis=-1)
        reading.pending = [reading.token]
        mx.async_eval(reading.pending)

    def _compare(self, reading: Reading) -> None:
        """Raises ValueError for a prompt that is longer than any layer sees."""
        self._prepare(N_SAID)
        most: mx.array | None = None
        for i, layer in reading.attended.items():
            queries = [said[i] for said in reading.queries if i in said]
            if len(queries) < N_SAID:  # a window that had become full, and is seen whole by chance
                continue
            of_layer = _most_of_any_head(replace(layer, queries=mx.concatenate(queries, axis=2)))
            most = of_layer if most is None else mx.maximum(most, of_layer)
        if most is None:
            raise ValueError("no layer of the draft model attends to all of so long a prompt")
        reading.scores = mx.mean(most[:, : len(reading.prompt)], axis=0)
        reading.pending, reading.attended = [reading.scores], {}
        mx.async_eval(reading.pending)

    def _prepare(self, n_tokens: int) -> None:
        if self._threads is not None:
            self._threads.prepare(n_tokens)

    def settle(self, reading: Reading) -> bool:
        mx.eval(reading.pending)
        reading.pending = []
        if not reading.n_said:
            self._cache.commit(reading.cursor, reading.row)
        return reading.scores is not None

    def scores(self, reading: Reading) -> Scores:
        assert reading.scores is not None
        scores: Scores = np.array(reading.scores, dtype=np.float32)
        return scores

    def n_left(self, reading: Reading) -> int:
        to_read = max(reading.n_total - reading.row.n_tokens, 0)
        return to_read + N_SAID - reading.n_said + (reading.scores is None)

    def close_reading(self, reading: Reading) -> None:
        row, n_said = reading.row, reading.n_said
        reading.queries, reading.attended = [], {}
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
def _overhearing(n_keys: int) -> Iterator[dict[int, Attended]]:
    """While the model is called with one token: the layers that attend to `n_keys` keys, by turn."""
    heard: dict[int, Attended] = {}
    turns = itertools.count()
    plain = mx.fast.scaled_dot_product_attention

    def attend(q: mx.array, k: mx.array, v: mx.array, **more: Any) -> mx.array:
        turn = next(turns)
        if q.shape[2] == 1 and k.shape[2] == n_keys:
            heard[turn] = Attended(q, k, float(more["scale"]))
        return plain(q, k, v, **more)

    mx.fast.scaled_dot_product_attention = attend
    try:
        yield heard
    finally:
        mx.fast.scaled_dot_product_attention = plain


def _most_of_any_head(layer: Attended) -> mx.array:
    """(tokens, keys): how much each token attends to each key, the most of any head.

    # the last token sees all keys, the one before it all but one, and so on
    """
    n_heads, n_tokens, width = layer.queries.shape[1:]
    n_kv, n_keys = layer.keys.shape[1:3]
    # (heads of a kv head and tokens, width) @ (width, keys): no key is repeated.
    grouped = (layer.queries * layer.scale).reshape(n_kv, n_heads // n_kv * n_tokens, width)
    logits = (grouped @ layer.keys[0].swapaxes(-1, -2)).reshape(n_kv, -1, n_tokens, n_keys)
    n_seen = mx.arange(n_keys - n_tokens + 1, n_keys + 1)[:, None]
    is_seen = mx.arange(n_keys)[None] < n_seen
    logits = mx.where(is_seen, logits, mx.array(-mx.inf, dtype=logits.dtype))
    return mx.max(mx.softmax(logits, axis=-1, precise=True), axis=(0, 1)).astype(mx.float32)
