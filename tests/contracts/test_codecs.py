"""What every layer codec owes, for each class it serves: cut, fill, nothing shared by accident."""

from __future__ import annotations

import copy
import gc
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models import cache as mlx_cache
from mlx_vlm.models import cache as vlm_cache

from firn.cache.arrays.payload import evaluate
from firn.cache.codecs import (
    ALL_TOKENS,
    Arrays,
    At,
    codec_for,
    concat_tokens,
    leaves,
    nbytes_of,
    registry,
)
from firn.cache.codecs.pages import KVCodec, QuantizingKVCodec, quantising
from firn.cache.layout import Layout
from firn.cache.parts import Part
from firn.core.errors import UnknownCacheLayer
from tests.cache.specimens import (
    KEY_DIM,
    LOSSY,
    SPECIMENS,
    VALUE_DIM,
    WINDOW,
    Specimen,
    all_same,
    same,
    table,
)

EACH = pytest.mark.parametrize("kind", SPECIMENS, ids=lambda s: s.label)
BY_TOKEN = pytest.mark.parametrize(
    "kind", [s for s in SPECIMENS if s.codec.part is not Part.STATE], ids=lambda s: s.label
)
IN_A_GROUP = {
    f"{home}.{single}": f"{home}.{batched}"
    for home in (mlx_cache.__name__, vlm_cache.__name__)
    for single, batched in (
        ("KVCache", "BatchKVCache"),
        ("RotatingKVCache", "BatchRotatingKVCache"),
        ("ArraysCache", "ArraysCache"),
    )
}
"""Cache classes that a codec serves alone and in a group, with the class that they become there."""
BATCHED = pytest.mark.parametrize(
    # mlx-lm cannot merge an ArraysCache if one slot is empty in every row.
    "kind",
    [s for s in SPECIMENS if s.codec.single in IN_A_GROUP and "empty" not in s.label],
    ids=lambda s: s.label,
)
QUICK = settings(max_examples=20, deadline=None)
CHUNKS = st.lists(st.one_of(st.just(1), st.integers(1, 30)), min_size=1, max_size=9)


def slice_tokens(arrays: Arrays, start: int, end: int) -> Arrays:
    """Tokens [start, end) of pages or a window."""
    return tuple(None if a is None else a[..., start:end, :] for a in arrays)


def test_every_codec_is_tested_here() -> None:
    assert set(registry()) == {s.codec.single for s in SPECIMENS}


@EACH
def test_what_it_says_of_itself(kind: Specimen) -> None:
    layer = kind.make()
    codec = codec_for(layer)
    assert codec is kind.codec
    assert codec.describe(layer) == codec.describe(kind.fed([3, 1]))
    reach = codec.reach(layer)
    if codec.part is Part.PAGES:
        assert reach == ALL_TOKENS
    else:
        assert (reach > 0) == (codec.part is Part.WINDOW)
    assert codec.token_nbytes(layer) == 0, "an empty layer costs nothing a token"


@EACH
def test_the_bytes_of_a_live_layer(kind: Specimen) -> None:
    layer = kind.fed([7])
    per_token, fixed = kind.codec.token_nbytes(layer), kind.codec.fixed_nbytes(layer)
    if kind.codec.part is Part.PAGES:
        keys = layer.keys[0] if isinstance(layer.keys, tuple) else layer.keys
        assert (per_token * keys.shape[2], fixed) == (layer.nbytes, 0)
    elif kind.codec.part is Part.WINDOW:
        assert (per_token, fixed * layer.keys.shape[2]) == (
            0,
            layer.nbytes * kind.codec.reach(layer),
        )
    else:
        assert (per_token, fixed) == (0, layer.nbytes)


# --- round trips ---------------------------------------------------------------------------


@EACH
@QUICK
@given(chunks=CHUNKS, more=CHUNKS)
def test_a_restored_layer_goes_on_like_the_first(
    kind: Specimen, chunks: list[int], more: list[int]
) -> None:
    n = sum(chunks)
    live = kind.fed(chunks)
    restored = kind.restored(kind.pieces(chunks), n)
    assert all_same(kind.sees(live, n), kind.sees(restored, n))
    assert getattr(restored, "offset", n) == getattr(live, "offset", n)
    for chunk in more:
        for layer in (live, restored):
            kind.feed(layer, [0], [n], chunk)
        n += chunk
        assert all_same(kind.sees(live, n), kind.sees(restored, n))


@BY_TOKEN
@QUICK
@given(chunks=CHUNKS, ends=st.tuples(st.integers(0, 200), st.integers(0, 200)))
def test_any_range_that_is_held_can_be_cut(
    kind: Specimen, chunks: list[int], ends: tuple[int, int]
) -> None:
    n = sum(chunks)
    layer = kind.fed(chunks)
    held = min(n, kind.codec.reach(layer))
    start, end = sorted(n - held + e % (held + 1) for e in ends)
    found = kind.codec.cut(layer, At(0, n), start, end)
    whole = kind.codec.cut(layer, At(0, n), n - held, n)
    assert all_same(found, slice_tokens(whole, start - (n - held), end - (n - held)))
    if len(found) == 2:
        dtype = layer.keys.dtype
        want = [table(0, w, dtype)[:, :, start:end] for w in (KEY_DIM, VALUE_DIM)]
        assert all_same(found, want)


@BY_TOKEN
@QUICK
@given(chunks=CHUNKS, cut_at=st.integers(0, 300))
def test_a_piece_can_be_split_and_joined(kind: Specimen, chunks: list[int], cut_at: int) -> None:
    """Slices of the records restore the same layer as the records."""
    n = sum(chunks)
    pieces = kind.pieces(chunks)
    start, end, last = pieces[-1]
    middle = start + cut_at % (end - start + 1)
    halves = [
        (start, middle, slice_tokens(last, 0, middle - start)),
        (middle, end, slice_tokens(last, middle - start, end - start)),
    ]
    split = kind.restored([*pieces[:-1], *halves], n)
    assert all_same(kind.sees(split, n), kind.sees(kind.fed(chunks), n))
    joined = concat_tokens([h[2] for h in halves])
    assert all_same(joined, last)
    assert nbytes_of(joined) == nbytes_of(last)


@BY_TOKEN
@QUICK
@given(chunks=CHUNKS, drop=st.integers(1, 400))
def test_a_shorter_prefix_is_restored_from_the_same_records(
    kind: Specimen, chunks: list[int], drop: int
) -> None:
    """Trimming: tokens [0, n) are restored from records that hold more."""
    total = sum(chunks)
    n = max(total - drop % total, 1)
    kept = [
        (s, min(e, n), slice_tokens(a, 0, min(e, n) - s))
        for s, e, a in kind.pieces(chunks)
        if s < n
    ]
    shorter = kind.restored(kept, n)
    other = kind.fed([n])
    assert all_same(kind.sees(shorter, n), kind.sees(other, n))
    for layer in (shorter, other):
        kind.feed(layer, [0], [n], 5)
    assert all_same(kind.sees(shorter, n + 5), kind.sees(other, n + 5))


@pytest.mark.parametrize("window", [7, 8, 9, 15, 16, 17])
@pytest.mark.parametrize("n", [7, 8, 9, 15, 16, 17, 31, 32, 33])
def test_windows_around_their_size(window: int, n: int) -> None:
    """Read in one chunk, in blocks of 8, and token by token: the ring looks different each time."""
    (base,) = [s for s in SPECIMENS if s.label == "window of 300"]
    kind = Specimen("", base.codec, lambda: mlx_cache.RotatingKVCache(window), base.feed, base.sees)
    for chunks in ([n], [8] * (n // 8) + ([n % 8] if n % 8 else []), [1] * n):
        live, restored = kind.fed(chunks), kind.restored(kind.pieces(chunks), n)
        held = min(n, window)
        want = table(0, KEY_DIM)[:, :, n - held : n]
        assert same(kind.sees(restored, n)[0], want)
        for more in (1, 1, 9, 1):
            for layer in (live, restored):
                kind.feed(layer, [0], [n], more)
        assert all_same(kind.sees(live, n + 12), kind.sees(restored, n + 12))


# --- batches -------------------------------------------------------------------------------


@BATCHED
@QUICK
@given(
    lengths=st.tuples(*[st.integers(1, 40)] * 3),
    steps=st.integers(0, 30),
    later=st.integers(0, 20),
    gone=st.integers(0, 2),
)
def test_a_row_is_cut_out_of_a_batch_as_if_it_were_alone(
    kind: Specimen, lengths: tuple[int, int, int], steps: int, later: int, gone: int
) -> None:
    """Two rows decode together, a third joins, one leaves."""
    alone = [kind.fed([n], row=i) for i, n in enumerate(lengths)]
    held = list(lengths)
    batch = type(alone[0]).merge(copy.deepcopy(alone[:2]))
    rows = [0, 1]

    def step(n_steps: int) -> None:
        for _ in range(n_steps):
            kind.feed(batch, rows, [held[r] for r in rows], 1)
            for r in rows:
                kind.feed(alone[r], [r], [held[r]], 1)
                held[r] += 1

    step(steps)
    check_rows(kind, batch, rows, alone, held)
    batch.extend(type(alone[2]).merge([copy.deepcopy(alone[2])]))
    rows = [0, 1, 2]
    step(later)
    check_rows(kind, batch, rows, alone, held)
    batch.filter([i for i in range(3) if i != gone])
    rows = [r for r in rows if r != gone]
    step(later)
    check_rows(kind, batch, rows, alone, held)


def check_rows(
    kind: Specimen, batch: Any, rows: list[int], alone: list[Any], held: list[int]
) -> None:
    for index, r in enumerate(rows):
        n = held[r]
        reach = min(n, kind.codec.reach(alone[r]))
        for start in {n - reach, n - (reach + 1) // 2}:
            mine = kind.codec.cut(batch, At(index, n), start, n)
            assert all_same(mine, kind.codec.cut(alone[r], At(0, n), start, n)), (r, start, n)


# --- nothing is shared by accident ---------------------------------------------------------


def snapshot(arrays: Arrays) -> list[bytes | None]:
    return [None if a is None else bytes(memoryview(mx.view(a, mx.uint8))) for a in arrays]


@EACH
def test_writing_to_a_restored_layer_leaves_the_records_be(kind: Specimen) -> None:
    chunks = [5, 8, 1, 1]
    n = sum(chunks)
    pieces = kind.pieces(chunks)
    before = [snapshot(a) for _, _, a in pieces]
    first = kind.restored(pieces, n)
    held = n
    for more in (1, 1, 6, 1):  # decode, prefill, decode
        kind.feed(first, [1], [held], more)
        held += more
    assert [snapshot(a) for _, _, a in pieces] == before
    second = kind.restored(pieces, n)
    assert all_same(kind.sees(second, n), kind.sees(kind.fed(chunks), n))
    scribble(second)
    assert [snapshot(a) for _, _, a in pieces] == before
    assert all_same(kind.sees(kind.restored(pieces, n), n), kind.sees(kind.fed(chunks), n))


def scribble(layer: Any) -> None:
    """Overwrite every array of a layer in place, as a careless model could."""
    for value in vars(layer).values():
        for a in value if isinstance(value, tuple | list) else [value]:
            if isinstance(a, mx.array) and a.size:
                a[...] = mx.zeros_like(a)
                mx.eval(a)


@EACH
def test_a_live_layer_that_goes_on_leaves_the_records_be(kind: Specimen) -> None:
    layer = kind.fed([9])
    cut = kind.codec.cut(layer, At(0, 9), 9 - min(9, kind.codec.reach(layer)), 9)
    mx.eval([a for a in cut if a is not None])
    before = snapshot(cut)
    for i in range(40):
        kind.feed(layer, [1], [9 + i], 1)
    scribble(layer)
    assert snapshot(cut) == before


@EACH
def test_a_record_is_no_view_of_a_larger_buffer(kind: Specimen) -> None:
    """Once the row is gone, what was cut is in memory, and no more than a page for rounding."""
    kind.fed([300])  # the tokens stay in memory
    gc.collect()
    before = mx.get_active_memory()
    layers = [kind.fed([300])]
    cut = Layout.of(layers).cut(kind.codec.part, layers, At(0, 300), 299, 300)
    evaluate([cut])
    layers.clear()
    assert 0 <= mx.get_active_memory() - before - cut.nbytes < 16 << 10


# --- quantised -----------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("n", [1, 7, 255, 256, 257])
def test_a_layer_quantised_by_mlx_lm_keeps_its_bits(bits: int, n: int) -> None:
    plain = mlx_cache.KVCache()
    plain.update_and_fetch(table(0, KEY_DIM)[:, :, :n], table(0, VALUE_DIM)[:, :, :n])
    layer = plain.to_quantized(group_size=32, bits=bits)
    codec = codec_for(layer)
    cut = codec.cut(layer, At(0, n), 0, n)
    restored = mlx_cache.QuantizedKVCache(group_size=32, bits=bits)
    codec.fill(restored, [slice_tokens(cut, 0, n // 2), slice_tokens(cut, n // 2, n)], n)
    for _ in range(2):
        flat = [(*x.keys_and_values()[0], *x.keys_and_values()[1]) for x in (layer, restored)]
        assert all_same([a[..., : layer.offset, :] for a in flat[0]], flat[1])
        for x in (layer, restored):
            x.update_and_fetch(table(1, KEY_DIM)[:, :, :3], table(1, VALUE_DIM)[:, :, :3])


@pytest.mark.parametrize("kind", LOSSY, ids=lambda s: s.label)
@pytest.mark.parametrize("n", [1, 40, 256, 300])
def test_records_kept_quantised_come_back_close_and_stable(kind: Specimen, n: int) -> None:
    want = _present(kind.sees(kind.fed([n]), n))
    step = {8: 0.04, 4: 0.7}[kind.codec.bits]  # type: ignore[attr-defined]
    # A growing tail is restored and quantised again each turn: its values settle and do not drift.
    rounds = [_present(kind.sees(kind.restored(kind.pieces([n]), n), n))]
    for _ in range(3):
        layer = kind.make()
        layer.update_and_fetch(*rounds[-1])
        kind.codec.fill(layer, [kind.codec.cut(layer, At(0, n), 0, n)], n)
        rounds.append(_present(kind.sees(layer, n)))
    for found in rounds:
        for mine, theirs in zip(found, want, strict=True):
            assert mine.dtype == theirs.dtype
            assert mx.max(mx.abs(mine - theirs)).item() < step
    assert all_same(rounds[1], rounds[2])
    assert all_same(rounds[2], rounds[3])


def _present(arrays: Arrays) -> list[mx.array]:
    return [a for a in arrays if a is not None]


def filled(key_dim: int, value_dim: int) -> Any:
    layer = mlx_cache.KVCache()
    layer.update_and_fetch(mx.zeros((1, 1, 1, key_dim)), mx.zeros((1, 1, 1, value_dim)))
    return layer


@pytest.mark.parametrize(
    ("widths", "group_size", "want"),
    [
        ((128, 128), 64, "kv~8x64"),
        ((128, 128), 128, "kv~8x128"),
        ((96, 96), 64, "kv~8x32"),
        ((64, 32), 64, "kv~8x32"),
        ((80, 80), 64, "kv"),
        ((512, 8), 64, "kv"),
        ((128, 0), 64, "kv"),  # an index that caches only keys
    ],
)
def test_the_group_size_fits_the_heads(widths: tuple[int, int], group_size: int, want: str) -> None:
    layer = filled(*widths)
    codec = quantising(layer, bits=8, group_size=group_size)
    assert codec.describe(layer) == want
    assert codec.cut(layer, At(0, 1), 0, 1)


def test_a_layer_already_quantised_is_not_quantised_again() -> None:
    quantised = mlx_cache.QuantizedKVCache(group_size=32, bits=4)
    layout = Layout.of([filled(64, 64), quantised, mlx_cache.RotatingKVCache(8)], kv_bits=8)
    assert layout.text == "kv~8x64,qkv4x32,window8"
    assert type(layout.codecs[0]) is QuantizingKVCodec


# --- layouts -------------------------------------------------------------------------------


def nested() -> list[Any]:
    inner = mlx_cache.CacheList(mlx_cache.KVCache(), mlx_cache.RotatingKVCache(WINDOW))
    return [mlx_cache.CacheList(mlx_cache.ArraysCache(3), inner), mlx_cache.KVCache()]


def feed_nested(layers: list[Any], start: int, n: int) -> None:
    arrays, pages, window, last = leaves(layers)
    for layer, label in ((pages, "float32"), (window, "window of 12"), (last, "float32")):
        (kind,) = [s for s in SPECIMENS if s.label == label]
        kind.feed(layer, [0], [start], n)
    (kind,) = [s for s in SPECIMENS if s.label == "arrays"]
    kind.feed(arrays, [0], [start], n)


def test_lists_of_caches_nest() -> None:
    live, n, block = nested(), 40, 8
    layout = Layout.of(live)
    assert layout.text == "arrays3,kv,window12,kv"
    assert [c.part for c in layout.codecs] == [Part.STATE, Part.PAGES, Part.WINDOW, Part.PAGES]
    parts: dict[Part, list[Any]] = {Part.PAGES: [], Part.WINDOW: []}
    for start in range(0, n, block):
        feed_nested(live, start, block)
        at = At(0, start + block)
        for part, pieces in parts.items():
            pieces.append(layout.cut(part, live, at, start, start + block))
    state = layout.cut(Part.STATE, live, At(0, n), 0, n)
    restored = nested()
    layout.fill(Part.PAGES, restored, parts[Part.PAGES], n)
    layout.fill(Part.WINDOW, restored, parts[Part.WINDOW][-2:], n)
    layout.fill(Part.STATE, restored, [state], n)
    for more in (1, 5, 1):
        for layers in (live, restored):
            feed_nested(layers, n, more)
        n += more
    for mine, theirs in zip(leaves(restored), leaves(live), strict=True):
        (kind, *_) = [s for s in SPECIMENS if type(s.make()) is type(mine)]
        assert all_same(kind.sees(mine, n), kind.sees(theirs, n))


def test_a_layout_names_what_tells_caches_apart() -> None:
    kinds = [
        mlx_cache.KVCache(),
        mlx_cache.QuantizedKVCache(group_size=32, bits=4),
        mlx_cache.QuantizedKVCache(group_size=64, bits=4),
        mlx_cache.QuantizedKVCache(group_size=64, bits=8),
        mlx_cache.RotatingKVCache(8),
        mlx_cache.RotatingKVCache(9),
        mlx_cache.ChunkedKVCache(8),
        mlx_cache.ArraysCache(2),
        mlx_cache.ArraysCache(3),
    ]
    texts = {Layout.of([layer]).text for layer in kinds}
    texts |= {Layout.of([kinds[0]] * 2).text, Layout.of([kinds[0], kinds[4]]).text}
    texts |= {Layout.of([kinds[4], kinds[0]]).text}
    texts |= {Layout.of([filled(64, 64)], kv_bits=b).text for b in (4, 8)}
    assert len(texts) == len(kinds) + 5


# --- unknown layers are refused ------------------------------------------------------------


class HomeMade(mlx_cache.KVCache):
    """A class may store something else, even if it derives from a known one."""


@pytest.mark.parametrize(
    "layer",
    [
        HomeMade(),
        mlx_cache.RotatingKVCache(16, keep=4),
        mlx_cache.BatchKVCache([0]),
        object(),
    ],
    ids=lambda x: type(x).__name__,
)
def test_an_unknown_layer_is_named(layer: Any) -> None:
    with pytest.raises(UnknownCacheLayer, match=type(layer).__name__):
        Layout.of([mlx_cache.KVCache(), mlx_cache.CacheList(mlx_cache.KVCache(), layer)])


def test_a_namesake_of_another_package_is_not_taken_for_ours() -> None:
    namesake = type("KVCache", (), {"__module__": "another.models.cache"})
    with pytest.raises(UnknownCacheLayer, match=r"another\.models\.cache\.KVCache"):
        codec_for(namesake())


@pytest.mark.parametrize("home", [mlx_cache, vlm_cache], ids=["mlx-lm", "mlx-vlm"])
def test_codecs_name_classes_that_exist(home: Any) -> None:
    """The attributes that codecs rely on: an upgrade that moves or changes a class fails here."""
    for name, fields in (
        ("KVCache", {"keys", "values", "offset"}),
        ("BatchKVCache", {"keys", "values", "offset", "left_padding", "_idx"}),
        ("QuantizedKVCache", {"keys", "values", "offset", "group_size", "bits"}),
        ("RotatingKVCache", {"keys", "values", "offset", "max_size", "keep", "_idx"}),
        ("BatchRotatingKVCache", {"keys", "values", "max_size", "_idx", "rotated", "_offset"}),
        ("ChunkedKVCache", {"keys", "values", "offset", "chunk_size", "start_position"}),
        ("ArraysCache", {"cache", "left_padding", "lengths"}),
    ):
        cls = getattr(home, name)
        arguments = {"RotatingKVCache": (8,), "ChunkedKVCache": (8,), "ArraysCache": (2,)}
        batch = {"BatchKVCache": ([0],), "BatchRotatingKVCache": (8, [0])}
        layer = cls(*arguments.get(name, batch.get(name, ())))
        assert all(hasattr(layer, f) for f in fields)
    assert set(IN_A_GROUP) <= {s.codec.single for s in SPECIMENS}
    assert all(hasattr(home, name.rpartition(".")[2]) for name in IN_A_GROUP.values())
    assert type(KVCodec().describe(mlx_cache.KVCache())) is str
