"""One live layer of every cache class that a codec serves, fed with tokens that can be told apart.

A specimen knows how to make its layer, how to feed it tokens as a model would, and what the model will
see of them: two layers that show the same, now and later, are the same to the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as mlx_cache
from mlx_lm.models.deepseek_v41 import LayerCache
from mlx_vlm.models import cache as vlm_cache

from firn.cache.arrays.payload import stacked
from firn.cache.codecs import Arrays, At, LayerCodec, class_name, registry
from firn.cache.codecs.pages import QuantizingKVCodec

N_ROWS, N_TOKENS = 3, 512
HEADS, KEY_DIM, VALUE_DIM = 2, 64, 32
WINDOW = 12


@cache
def table(row: int, width: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    """(1, heads, tokens, width): no two tokens of any two rows are equal."""
    key = mx.random.key(1000 * row + width)
    return mx.random.normal((1, HEADS, N_TOKENS, width), key=key).astype(dtype)


def same(a: mx.array | None, b: mx.array | None) -> bool:
    """Bit for bit, shape and dtype included."""
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and a.dtype == b.dtype and bool(mx.array_equal(a, b).item())


def all_same(a: Sequence[mx.array | None], b: Sequence[mx.array | None]) -> bool:
    return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))


@dataclass(frozen=True)
class Specimen:
    """feed(layer, rows, starts, n): give row i its tokens [starts[i], starts[i] + n).

    sees(layer, n): what a lone layer that holds n tokens shows to the model.
    """

    label: str
    codec: LayerCodec
    make: Callable[[], Any]
    feed: Callable[[Any, Sequence[int], Sequence[int], int], None]
    sees: Callable[[Any, int], Arrays]

    def fed(self, chunks: Sequence[int], *, row: int = 0) -> Any:
        layer = self.make()
        n = 0
        for chunk in chunks:
            self.feed(layer, [row], [n], chunk)
            n += chunk
        return layer

    def pieces(self, chunks: Sequence[int], *, row: int = 0) -> list[tuple[int, int, Arrays]]:
        """What commits would keep: each chunk, or the state at its end, cut once it is fed."""
        layer = self.make()
        cuts: list[tuple[int, int, Arrays]] = []
        n = 0
        for chunk in chunks:
            self.feed(layer, [row], [n], chunk)
            n += chunk
            cut = self.codec.cut(layer, At(0, n), n - chunk, n)
            cuts.append((n - chunk, n, stacked([cut]).layer(0)))
        return cuts

    def restored(self, pieces: Sequence[tuple[int, int, Arrays]], n_tokens: int) -> Any:
        """A fresh layer, filled from the pieces that the codec needs."""
        layer = self.make()
        reach = self.codec.reach(layer)
        if reach:
            wanted = [a for _, end, a in pieces if end > n_tokens - reach]
        else:
            wanted = [pieces[-1][2]]
        self.codec.fill(layer, wanted, n_tokens)
        return layer


def _tokens(rows: Sequence[int], starts: Sequence[int], n: int, dtype: mx.Dtype) -> Any:
    def one(width: int) -> mx.array:
        pairs = zip(rows, starts, strict=True)
        return mx.concatenate([table(r, width, dtype)[:, :, s : s + n] for r, s in pairs])

    return one(KEY_DIM), one(VALUE_DIM)


def _feed_kv(dtype: mx.Dtype) -> Callable[[Any, Sequence[int], Sequence[int], int], None]:
    def feed(layer: Any, rows: Sequence[int], starts: Sequence[int], n: int) -> None:
        if hasattr(layer, "maybe_trim_front"):
            layer.maybe_trim_front()  # as llama4 does before each call
        layer.update_and_fetch(*_tokens(rows, starts, n, dtype))
        mx.eval([layer.keys, layer.values])

    return feed


def _sees_pages(layer: Any, n: int) -> Arrays:
    arrays = (layer.keys, layer.values)
    flat = [a for side in arrays for a in (side if isinstance(side, tuple | list) else (side,))]
    return tuple(a[..., :n, :] for a in flat)


def _sees_window(layer: Any, n: int) -> Arrays:
    order = layer._temporal_order
    held = min(n, layer.max_size)
    return tuple(order(a)[..., -held:, :] for a in (layer.keys, layer.values))


def _sees_chunk(layer: Any, n: int) -> Arrays:
    held, end = min(n, layer.chunk_size), layer.offset - layer.start_position
    return tuple(a[..., end - held : end, :] for a in (layer.keys, layer.values))


def _feed_arrays(layer: Any, rows: Sequence[int], starts: Sequence[int], n: int) -> None:
    """Slot 0 has the last token, slot 1 depends on every token, further slots stay empty."""
    ends = [s + n for s in starts]
    keys = [table(r, KEY_DIM) for r in rows]
    pairs = list(zip(keys, ends, strict=True))
    layer[0] = mx.concatenate([k[:, :, e - 1 : e] for k, e in pairs])
    layer[1] = mx.concatenate([mx.sum(k[:, :, :e], axis=2) for k, e in pairs])
    mx.eval([layer[0], layer[1]])


def _feed_v41(layer: Any, rows: Sequence[int], starts: Sequence[int], n: int) -> None:
    (row,), (start,) = rows, starts
    tokens = table(row, KEY_DIM)[:, 0]
    end = start + n
    layer.update_window(tokens[:, start:end])
    layer.compress_kv = tokens[:, : end - end % 4] if end >= 4 else None
    layer.pending_kv = tokens[:, end - end % 4 : end]
    layer.pending_gate = layer.pending_kv + 1
    mx.eval([layer.window, layer.pending_kv, layer.pending_gate])


def _sees_v41(layer: Any, n: int) -> Arrays:
    fields = ("window", "compress_kv", "index_k", "pending_kv", "pending_gate")
    return (*(getattr(layer, f) for f in fields), mx.array(layer.offset))


def _kv(label: str, make: Callable[[], Any], *, dtype: mx.Dtype = mx.float32) -> Specimen:
    codec = registry()[class_name(make())]
    return Specimen(label, codec, make, _feed_kv(dtype), _sees_pages)


def _quantised(bits: int, group_size: int, *, home: Any = mlx_cache, of: str = "") -> Specimen:
    def make() -> Any:
        return home.QuantizedKVCache(group_size=group_size, bits=bits)

    return _kv(f"{of}quantised {bits} bits in groups of {group_size}", make)


def _window(size: int, *, home: Any = mlx_cache, of: str = "") -> Specimen:
    def make() -> Any:
        return home.RotatingKVCache(size)

    codec = registry()[class_name(make())]
    return Specimen(f"{of}window of {size}", codec, make, _feed_kv(mx.float32), _sees_window)


def _chunked(size: int, *, home: Any = mlx_cache, of: str = "") -> Specimen:
    def make() -> Any:
        return home.ChunkedKVCache(size)

    codec = registry()[class_name(make())]
    return Specimen(f"{of}chunk of {size}", codec, make, _feed_kv(mx.float32), _sees_chunk)


def _arrays(label: str, n_slots: int, *, home: Any = mlx_cache) -> Specimen:
    def make() -> Any:
        return home.ArraysCache(n_slots)

    codec = registry()[class_name(make())]
    return Specimen(label, codec, make, _feed_arrays, lambda layer, n: tuple(layer.cache))


def _of_mlx_vlm() -> tuple[Specimen, ...]:
    """The same classes once more: other modules, other `state`."""
    of = "mlx-vlm: "
    return (
        _kv(f"{of}float32", vlm_cache.KVCache),
        _kv(f"{of}bfloat16", vlm_cache.KVCache, dtype=mx.bfloat16),
        _kv(f"{of}concatenated", vlm_cache.ConcatenateKVCache),
        _quantised(8, 32, home=vlm_cache, of=of),
        _window(WINDOW, home=vlm_cache, of=of),
        _window(300, home=vlm_cache, of=of),
        _chunked(WINDOW, home=vlm_cache, of=of),
        _arrays(f"{of}arrays", 2, home=vlm_cache),
        _arrays(f"{of}arrays with an empty slot", 3, home=vlm_cache),
    )


SPECIMENS: tuple[Specimen, ...] = (
    _kv("float32", mlx_cache.KVCache),
    _kv("bfloat16", mlx_cache.KVCache, dtype=mx.bfloat16),
    _kv("float16", mlx_cache.KVCache, dtype=mx.float16),
    _kv("concatenated", mlx_cache.ConcatenateKVCache),
    _quantised(8, 32),
    _quantised(4, 32),
    _window(WINDOW),
    _window(1),
    _window(300),
    _chunked(WINDOW),
    _arrays("arrays", 2),
    _arrays("arrays with an empty slot", 3),
    Specimen(
        "deepseek_v41",
        registry()["mlx_lm.models.deepseek_v41.LayerCache"],
        lambda: LayerCache(WINDOW),
        _feed_v41,
        _sees_v41,
    ),
    *_of_mlx_vlm(),
)
LOSSY = tuple(
    Specimen(
        f"kept in {bits} bits",
        QuantizingKVCodec(bits, 32),
        mlx_cache.KVCache,
        _feed_kv(mx.float32),
        _sees_pages,
    )
    for bits in (8, 4)
)
