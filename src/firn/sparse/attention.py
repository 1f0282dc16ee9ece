"""Which tokens of a prompt matter, by the attention of a small model with the same tokens.

The small model reads the prompt (resuming from the prefixes in its own cache) and generates a few tokens
of a reply, the lookahead. At the end the lookahead's queries are compared with the prompt's keys:

    score of a token = mean over the lookahead of its largest weight in any head of any layer

The work is done in slices: a chunk of the prompt, one lookahead token (all of them if nothing else
is waiting), the comparison. `read` dispatches a slice, `finish_slice` waits for it. A slice waits
for the one before it: MLX cannot write in place into a buffer that a kernel in flight still reads,
and would copy the row's keys and values.

Owner: the engine thread.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import numpy as np

from firn.core.ports import Cursor, EngineCache, EngineLoad, Restored
from firn.core.values import CacheControl, ModelInfo, Namespace, Prompt
from firn.models.decode.batch import Row, restored_row
from firn.models.decode.kv_growth import ShapeBuckets
from firn.models.faults import first_line
from firn.models.layers import MakeLayers, kind, leaves
from firn.models.model_arguments import PreparePass, unprepared
from firn.models.patches import Patches
from firn.sparse.placing import PLAIN
from firn.sparse.scorer import Scores

log = logging.getLogger("firn.models")

VERSION = 3
"""Version of the scoring and selection. Part of the root: other versions' records are not found."""
N_LOOKAHEAD = 12
"""Long enough for a reply that first repeats the question, and only then attends to the answer."""


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """One layer's queries, (1, heads, tokens, width), and keys, (1, kv heads, keys, width)."""

    queries: mx.array
    keys: mx.array
    scale: float


@dataclass(eq=False)
class Reading:
    """A prompt that the small model is reading.

    # [0, row.n_tokens) read   [row.n_tokens, n_prompt - 1) to read   then the lookahead
    """

    prompt: Prompt
    cursor: Cursor
    row: Row
    token: mx.array
    """What the model is fed next once the prompt is read: the prompt's last token, then its own."""
    queries: list[dict[int, mx.array]] = field(default_factory=list)
    """For each lookahead token: the queries of the layers that attend to the whole prompt, by layer."""
    attended: dict[int, LayerAttention] = field(default_factory=dict)
    """What the last lookahead token attended to, by layer."""
    scores: mx.array | None = None
    pending: list[Any] = field(default_factory=list)

    @property
    def n_total(self) -> int:
        return len(self.prompt) - 1

    @property
    def is_read(self) -> bool:
        return self.row.n_tokens >= self.n_total

    @property
    def n_generated(self) -> int:
        return len(self.queries)


class AttentionScorer:
    """Implements sparse.scorer.Scorer."""

    def __init__(
        self,
        model: Any,
        info: ModelInfo,
        *,
        make_layers: MakeLayers,
        cache: EngineCache,
        owns_cache: bool = True,
        prepare: PreparePass = unprepared,
        buckets: ShapeBuckets | None = None,
        patches: Patches | None = None,
    ) -> None:
        """owns_cache: whether `close` closes the cache. prepare, buckets, patches: the runner's.

        Raises ValueError for a model none of whose layers attends to the whole prompt.
        """
        self._model = model
        self._make_layers = make_layers
        self._cache = cache
        self._owns_cache = owns_cache
        self._prepare = prepare
        self._buckets = buckets or ShapeBuckets()
        self._patches = patches = patches or Patches()
        self._last_id = info.n_ids - 1
        self.max_tokens = info.context_length - N_LOOKAHEAD
        # Whether the lookahead can be taken back.
        self._is_rewindable = all(kind(layer) in PLAIN for layer in leaves(make_layers()))
        self.recipe = f"sparse{VERSION};draft {info.fingerprint.hex()}"
        with _watching_attention(2, patches) as attended:
            layers = make_layers()
            for _ in range(2):
                mx.eval(model(mx.array([[1]]), cache=layers))
        if not attended:
            raise ValueError("none of its layers attends to the whole prompt")

    def open(self, prompt: Prompt, namespace: Namespace, control: CacheControl) -> Reading:
        cursor = self._cache.open(prompt, namespace, control)
        row = self._row(cursor, cursor.restore())
        last = min(int(prompt.ids[-1]), self._last_id)
        return Reading(prompt, cursor, row, mx.array([last]))

    def read(self, reading: Reading, n_tokens: int, *, alone: bool = False) -> None:
        self._cache.tick(EngineLoad.PREFILLING)
        if not reading.is_read:
            self._jump(reading)
        if not reading.is_read:
            self._read_chunk(reading, n_tokens)
        elif reading.n_generated < N_LOOKAHEAD:
            for _ in range(N_LOOKAHEAD - reading.n_generated if alone else 1):
                self._generate(reading)
        else:
            self._compare(reading)

    def _jump(self, reading: Reading) -> None:
        """Continue from a longer prefix, if one has been loaded in the meantime."""
        ahead = reading.cursor.advance(reading.row.n_tokens)
        if ahead is not None:
            reading.row = self._row(reading.cursor, ahead)

    def _row(self, cursor: Cursor, restored: Restored | None) -> Row:
        row = restored_row(self._make_layers(), restored)
        if restored is not None:
            cursor.filled(row)
        return row

    def _read_chunk(self, reading: Reading, n_tokens: int) -> None:
        row = reading.row
        end = min(row.n_tokens + n_tokens, reading.n_total)
        end = self._buckets.end(row.n_tokens, end)
        end = min([end, *(p for p in reading.cursor.stops() if p > row.n_tokens)])
        self._buckets.grow(row.layers, len(reading.prompt) + N_LOOKAHEAD)
        ids, layers = np.minimum(reading.prompt.ids[row.n_tokens : end], self._last_id), row.layers
        padded = self._buckets.fit(layers, len(ids))
        if padded is not None:
            ids, layers = padded.pad(ids), padded.layers
        self._prepare(len(ids))
        self._model(mx.array(ids.astype(np.int32))[None], cache=layers)
        row.n_tokens = end
        reading.pending = [layer.state for layer in row.layers]
        mx.async_eval(reading.pending)

    def _generate(self, reading: Reading) -> None:
        if not reading.n_generated and not self._is_rewindable:
            # The lookahead is not part of any prompt, and this model's state cannot be rewound:
            # store the row first. From then on the cache may give its buffers to another row.
            reading.cursor.close(reading.row)
            for layer in leaves(reading.row.layers):
                if kind(layer) in PLAIN:
                    layer.state = layer.state
        self._prepare(1)
        n_keys = reading.row.n_tokens + 1
        with _watching_attention(n_keys, self._patches) as attended:
            logits = self._model(reading.token[:, None], cache=reading.row.layers)
        reading.row.n_tokens = n_keys
        reading.queries.append({i: layer.queries for i, layer in attended.items()})
        if reading.n_generated == N_LOOKAHEAD:
            # Not earlier: while the keys are referenced, the next token cannot be written in place.
            reading.attended = attended
        reading.token = mx.argmax(logits[:, -1], axis=-1)
        reading.pending = [reading.token]
        mx.async_eval(reading.pending)

    def _compare(self, reading: Reading) -> None:
        """Raises ValueError for a prompt that no layer sees as a whole."""
        self._prepare(N_LOOKAHEAD)
        largest: mx.array | None = None
        for i, layer in reading.attended.items():
            queries = [by_layer[i] for by_layer in reading.queries if i in by_layer]
            if len(queries) < N_LOOKAHEAD:  # a full window that happened to have as many keys
                continue
            of_layer = _weights_of_any_head(replace(layer, queries=mx.concatenate(queries, axis=2)))
            largest = of_layer if largest is None else mx.maximum(largest, of_layer)
        if largest is None:
            raise ValueError(
                "the prompt is too long: no layer of the draft model attends to all of it"
            )
        reading.scores = mx.mean(largest[:, : len(reading.prompt)], axis=0)
        reading.pending, reading.attended = [reading.scores], {}
        mx.async_eval(reading.pending)

    def finish_slice(self, reading: Reading) -> bool:
        mx.eval(reading.pending)
        reading.pending = []
        if not reading.n_generated:
            reading.cursor.commit(reading.row)
        return reading.scores is not None

    def scores(self, reading: Reading) -> Scores:
        assert reading.scores is not None
        scores: Scores = np.array(reading.scores, dtype=np.float32)
        return scores

    def n_left(self, reading: Reading) -> int:
        to_read = max(reading.n_total - reading.row.n_tokens, 0)
        return to_read + N_LOOKAHEAD - reading.n_generated + (reading.scores is None)

    def close_reading(self, reading: Reading) -> None:
        row, n_generated = reading.row, reading.n_generated
        reading.queries, reading.attended = [], {}
        if n_generated and self._is_rewindable:
            for layer in leaves(row.layers):
                layer.trim(n_generated)
            row.n_tokens -= n_generated
        pending, reading.pending, reading.row = reading.pending, [], Row([])
        try:
            mx.eval(pending)  # while a step is in flight, the next write would copy
        except (RuntimeError, ValueError, MemoryError) as e:
            log.warning("dropping what the draft model has read of a prompt: %s", first_line(e))
            reading.cursor.close(None)
        else:
            reading.cursor.close(row)

    def close(self) -> None:
        if self._owns_cache:
            self._cache.close()


@contextmanager
def _watching_attention(n_keys: int, patches: Patches) -> Iterator[dict[int, LayerAttention]]:
    """Collect the layers that attend to `n_keys` keys, by number, when the model is fed one token.

    Replaces MLX's attention inside the block, because models do not expose their queries.
    """
    attended: dict[int, LayerAttention] = {}
    numbers = itertools.count()
    plain = mx.fast.scaled_dot_product_attention

    def attend(q: mx.array, k: mx.array, v: mx.array, **more: Any) -> mx.array:
        number = next(numbers)
        if q.shape[2] == 1 and k.shape[2] == n_keys:
            attended[number] = LayerAttention(q, k, float(more["scale"]))
        return plain(q, k, v, **more)

    with patches.during(mx.fast, "scaled_dot_product_attention", attend):
        yield attended


def _weights_of_any_head(layer: LayerAttention) -> mx.array:
    """(tokens, keys): the largest weight that any head gives each key.

    # the last token sees all keys, the token before it all but one, and so on
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
