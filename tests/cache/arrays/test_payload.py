"""Payloads: stacks of arrays, cut, joined, returned layer by layer, and converted to host bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from firn.backends.cuda.bus import MAX_GATHERED, BusTransfers, CudaError
from firn.cache.arrays import host, payload, transfers
from firn.cache.arrays.payload import Payload, by_layer, evaluate, joined, stacked
from firn.cache.arrays.transfers import Transfers
from firn.cache.codecs import Arrays
from firn.cache.commit import RowCutter
from firn.cache.layout import Layout
from firn.cache.parts import Part
from firn.cache.storage import places
from firn.core.ports import At, RowView
from firn.models.decode.rewind import ready
from tests.cache.bus import Bus, drive
from tests.zoo import build

QUICK = settings(max_examples=40, deadline=None)
SHAPES = st.sampled_from([(1, 2, 6, 4), (1, 1, 6, 3), (1, 2, 6, 1)])
DTYPES = st.sampled_from([mx.float32, mx.bfloat16, mx.uint32, mx.int8])
SLOTS = st.one_of(st.none(), st.tuples(SHAPES, DTYPES))
LAYERS = st.lists(st.lists(SLOTS, min_size=1, max_size=3), min_size=1, max_size=6)


def arrays_of(kinds: Sequence[Sequence[Any]], *, seed: int = 0) -> list[Arrays]:
    rng = np.random.default_rng(seed)

    def array(kind: Any) -> mx.array | None:
        if kind is None:
            return None
        shape, dtype = kind
        return mx.array(rng.integers(0, 200, shape)).astype(dtype)

    return [tuple(array(kind) for kind in slots) for slots in kinds]


def same(a: mx.array | None, b: mx.array | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.shape == b.shape and bool(mx.array_equal(a, b))


def all_same(payload: Payload, want: Sequence[Arrays]) -> bool:
    mine = [payload.layer(i) for i in range(payload.n_layers)]
    return len(mine) == len(want) and all(
        len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
        for a, b in zip(mine, want, strict=True)
    )


@QUICK
@given(kinds=LAYERS)
def test_layers_come_back_as_they_were(kinds: list[list[Any]]) -> None:
    layers = arrays_of(kinds)
    payload = stacked(layers)
    assert all_same(payload, layers)
    n_kinds = len({kind for slots in kinds for kind in slots if kind is not None})
    assert len(payload.stacks) == n_kinds, "what has one shape lies in one stack"
    assert payload.nbytes == sum(a.nbytes for arrays in layers for a in arrays if a is not None)


@QUICK
@given(kinds=LAYERS, cut=st.integers(1, 5))
def test_tokens_are_cut_and_joined(kinds: list[list[Any]], cut: int) -> None:
    layers = arrays_of(kinds)
    whole = stacked(layers)
    assert all_same(joined([whole.tokens(0, cut), whole.tokens(cut, 6)]), layers)
    halves = [tuple(None if a is None else a[..., :cut, :] for a in arrays) for arrays in layers]
    assert all_same(whole.tokens(0, cut).copied(), halves)


@QUICK
@given(kinds=LAYERS, at_once=st.integers(1, 7), n=st.integers(1, 3))
def test_the_pieces_of_a_layer_are_the_same_however_many_are_joined_at_once(
    kinds: list[list[Any]], at_once: int, n: int
) -> None:
    records = [arrays_of(kinds, seed=i) for i in range(n)]
    per_layer = list(by_layer([stacked(layers) for layers in records], at_once=at_once))
    assert len(per_layer) == len(kinds)
    for i, pieces in enumerate(per_layer):
        for j, kind in enumerate(kinds[i]):
            if kind is not None:
                whole = mx.concatenate([p[j] for p in pieces], -2)
                assert same(whole, mx.concatenate([layers[i][j] for layers in records], -2))


def test_records_whose_layers_are_not_alike_are_not_joined() -> None:
    kind = ((1, 2, 6, 4), mx.float32)
    one, other = stacked(arrays_of([[kind], [kind]])), stacked(arrays_of([[kind], [None]]))
    assert [len(pieces) for pieces in by_layer([one, other], at_once=2)] == [2, 2]


def address(array: mx.array) -> int:
    return int(np.asarray(array).__array_interface__["data"][0])


@pytest.mark.parametrize("n_layers", [1, 3])
def test_a_payload_shares_nothing_with_the_row_it_was_cut_from(n_layers: int) -> None:
    """With one head, a range of tokens is contiguous: a view of it would keep the whole row."""
    rows = [mx.random.normal((1, 1, 64, 8)) for _ in range(n_layers)]
    mx.eval(rows)
    payload = stacked([(row[:, :, 16:32],) for row in rows])
    part = payload.tokens(0, 8).copied()
    evaluate([payload, part])
    bounds = [(address(row), address(row) + row.nbytes) for row in rows]
    for stack in (*payload.stacks, *part.stacks):
        assert not any(low <= address(stack) < high for low, high in bounds)
    assert address(part.stacks[0]) != address(payload.stacks[0])


# --- rows ----------------------------------------------------------------------------------


class Row:
    def __init__(self, layers: list[Any], n_tokens: int) -> None:
        self.layers, self.n_tokens = layers, n_tokens

    def view(self) -> RowView:
        return RowView(self.layers, At(0, self.n_tokens))


def fed(n_tokens: int) -> list[Any]:
    rng = np.random.default_rng(5)
    layers: list[Any] = [KVCache(), RotatingKVCache(max_size=512), KVCache()]
    for layer in layers:
        keys, values = (mx.array(rng.normal(size=(1, 2, n_tokens, 4))) for _ in range(2))
        layer.update_and_fetch(keys, values)
    return layers


def test_several_blocks_are_cut_as_one_and_are_what_each_would_be() -> None:
    layers = fed(48)
    kinds = Layout.of(layers)
    cutter = RowCutter(kinds, Row(layers, 48), 16, 48)
    for part in (Part.PAGES, Part.WINDOW):
        for start in (16, 32):
            alone = kinds.cut(part, layers, At(0, 48), start, start + 16)
            want = [alone.layer(i) for i in range(alone.n_layers)]
            assert all_same(cutter.cut(part, start, start + 16), want)


@pytest.mark.parametrize("nbytes", [0, 3000, 1 << 30])
def test_layers_are_filled_alike_many_at_a_time(
    nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU."""
    live = fed(48)
    kinds = Layout.of(live)
    pieces = {
        part: [kinds.cut(part, live, At(0, 48), s, s + 16) for s in (0, 16, 32)]
        for part in (Part.PAGES, Part.WINDOW)
    }
    monkeypatch.setattr(transfers, "_in_use", [Transfers(fill_nbytes=nbytes)])
    filled: list[Any] = [KVCache(), RotatingKVCache(max_size=512), KVCache()]
    for part, payloads in pieces.items():
        kinds.fill(part, filled, payloads, 48)
    for a, b in zip(live, filled, strict=True):
        assert a.offset == b.offset
        assert same(a.keys[..., :48, :], b.keys[..., :48, :])
        assert same(a.values[..., :48, :], b.values[..., :48, :])


# --- bytes ---------------------------------------------------------------------------------


@QUICK
@given(kinds=LAYERS)
def test_bytes_come_back(kinds: list[list[Any]]) -> None:
    layers = arrays_of(kinds)
    payload = stacked(layers)
    evaluate([payload])
    lent = host.to_host(payload)
    copies = [memoryview(bytes(b)) for b in lent.fetch()]
    again = host.from_host(lent.tensors, lent.places, copies)
    assert all_same(again, layers)
    assert again.places == payload.places == places.from_text(places.to_text(payload.places))


@pytest.mark.parametrize("dtype", host.CODES, ids=str)
def test_numbers_of_every_type_come_back(dtype: mx.Dtype) -> None:
    """With their signs and sizes: an 8-bit -1 is not 255."""
    whole = mx.array([[-128, -1, 0, 1, 127]]).astype(dtype)
    payload = stacked([(whole[None, None],)])
    evaluate([payload])
    lent = host.to_host(payload)
    again = host.from_host(lent.tensors, lent.places, [memoryview(bytes(b)) for b in lent.fetch()])
    assert all_same(again, [(whole[None, None],)])


@pytest.mark.parametrize("text", ["x", "0 0;?", "0,0"])
def test_places_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        places.from_text(text)


@QUICK
@given(kinds=LAYERS)
def test_over_a_bus_a_record_is_one_copy_for_each_stack(
    kinds: list[list[Any]],
) -> None:
    layers = arrays_of(kinds)
    payload = stacked(layers)
    evaluate([payload])
    bus = Bus()
    with pytest.MonkeyPatch.context() as patch:
        drive(bus, patch)
        lent = host.to_host(payload)
        again = host.from_host(lent.tensors, lent.places, host.staged(lent.fetch()))
    assert all_same(again, layers)
    assert bus.n_out == bus.n_in == len(payload.stacks)


# --- cells of all layers in one launch -----------------------------------------------------


def kv_layers(n_tokens: int, *, n_layers: int = 3, width: int = 8, seed: int = 0) -> list[Any]:
    rng = np.random.default_rng(seed)
    layers: list[Any] = [KVCache() for _ in range(n_layers)]
    for layer in layers:
        keys, values = (mx.array(rng.normal(size=(1, 2, n_tokens, width))) for _ in range(2))
        layer.update_and_fetch(keys, values)
    return layers


def grouped(lengths: Sequence[int]) -> list[Any]:
    rows = [kv_layers(n, seed=n) for n in lengths]
    return [KVCache.merge(list(same)) for same in zip(*rows, strict=True)]


def ragged(lengths: Sequence[int]) -> list[Any]:
    return list(ready(grouped(lengths)))


def quantised(n_tokens: int) -> list[Any]:
    return [layer.to_quantized(group_size=32, bits=8) for layer in kv_layers(n_tokens, width=128)]


@pytest.mark.parametrize(
    ("layers", "at", "n_stacks"),
    [
        (kv_layers(40), At(0, 40), 1),
        (grouped([40, 25, 33]), At(1, 25), 1),
        (ragged([40, 25, 33]), At(2, 33), 1),
        (quantised(40), At(0, 40), 2),
    ],
    ids=["lone", "grouped", "ragged", "quantised"],
)
def test_cells_of_all_layers_are_copied_at_once(
    layers: list[Any], at: At, n_stacks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = Layout.of(kv_layers(1) if n_stacks == 1 else layers)
    want = layout.cut(Part.PAGES, layers, at, 3, 21)
    bus = Bus()
    drive(bus, monkeypatch)
    layout.prepare(layers if at.index == 0 else kv_layers(1))
    assert not bus.why_not
    bus.n_gathered = 0
    got = layout.cut(Part.PAGES, layers, at, 3, 21)
    assert all_same(got, [want.layer(i) for i in range(want.n_layers)])
    assert got.places == want.places
    assert bus.n_gathered == len(got.stacks) == n_stacks


def test_pieces_of_a_row_are_copied_by_few_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    layers, at = grouped([40, 25, 33]), At(1, 25)
    layout = Layout.of(kv_layers(1))
    bounds = [(0, 8), (8, 16), (16, 24), (24, 25), (3, 4), (7, 20)]
    want = [layout.cut(Part.PAGES, layers, at, *piece) for piece in bounds]
    bus = Bus()
    drive(bus, monkeypatch)
    got = layout.cut_pieces(Part.PAGES, layers, at, bounds)
    assert bus.n_gathered == 2
    for a, b in zip(got, want, strict=True):
        assert all_same(a, [b.layer(i) for i in range(b.n_layers)])


def test_buffers_that_differ_are_copied_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer has more room than the others."""
    layers = [*kv_layers(40, n_layers=2), *kv_layers(300, n_layers=1)]
    layers[-1].trim(260)
    layout = Layout.of(layers)
    want = layout.cut(Part.PAGES, layers, At(0, 40), 3, 21)
    bus = Bus()
    drive(bus, monkeypatch)
    got = layout.cut(Part.PAGES, layers, At(0, 40), 3, 21)
    assert all_same(got, [want.layer(i) for i in range(want.n_layers)])
    assert not bus.n_gathered


@pytest.mark.parametrize("name", ["qwen3", "qwen3_next", "gemma3_text", "falcon_h1", "deepseek_v3"])
def test_what_spilling_needs_is_compiled_at_the_start(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each part of a record. On CUDA, every set of types needs a kernel that locates arrays."""

    class Compiling(Bus):
        types: ClassVar[set[tuple[mx.Dtype, ...]]] = set()

        def locate(self, arrays: Sequence[mx.array]) -> list[mx.array]:
            self.types.add(tuple(a.dtype for a in arrays))
            return super().locate(arrays)

    model = build(name)
    layers: list[Any] = make_prompt_cache(model)
    model(mx.array([[1]]), cache=layers)
    layout = Layout.of(layers)
    bus = Compiling()
    drive(bus, monkeypatch)
    layout.prepare(layers)
    compiled = set(bus.types)
    assert compiled
    model(mx.array([[2, 3, 4, 5]]), cache=layers)
    for part in {codec.part for codec in layout.codecs}:
        host.to_host(layout.cut(part, layers, At(0, 5), 1, 5))
    assert bus.types == compiled


@pytest.mark.parametrize("fault", ["wrong", "other cells", "other row", "raises"])
def test_a_kernel_that_is_wrong_is_not_used(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Bad(Bus):
        def gather(
            self, arrays: Sequence[mx.array], row: int, bounds: Sequence[tuple[int, int]]
        ) -> list[mx.array]:
            if fault == "raises":
                raise RuntimeError("it does not compile")
            if fault == "other cells":
                bounds = [*bounds[:-1], (bounds[-1][0] - 1, bounds[-1][1] - 1)]
            if fault == "other row":
                row = 0
            pieces = super().gather(arrays, row, bounds)
            return [*pieces[:-1], pieces[-1] + 1] if fault == "wrong" else pieces

    bus = Bad()
    layers = kv_layers(1)
    layout = Layout.of(layers)
    want = layout.cut(Part.PAGES, layers, At(0, 1), 0, 1)
    drive(bus, monkeypatch)
    layout.prepare(layers)
    assert bus.why_not
    got = layout.cut(Part.PAGES, layers, At(0, 1), 0, 1)
    assert all_same(got, [want.layer(i) for i in range(want.n_layers)])


@pytest.mark.parametrize(
    ("shape", "n", "can"),
    [
        ((2, 2, 64, 8), 3, True),
        ((2, 2, 64, 3), 2, False),
        ((2, 64, 8), 2, False),
        ((1, 1, 1, 8), MAX_GATHERED + 1, False),
    ],
    ids=["plain", "odd width", "three axes", "too many"],
)
def test_which_buffers_a_kernel_can_read(shape: tuple[int, ...], n: int, can: bool) -> None:
    assert BusTransfers(Bus()).can_gather([mx.zeros(shape)] * n) is can


def test_what_cannot_be_pinned_is_read_from_where_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(Bus):
        def stage(self, buffers: Sequence[memoryview]) -> list[memoryview]:
            raise CudaError("cuMemHostAlloc: CUDA error 2")

    drive(Full(), monkeypatch)
    buffers = [memoryview(b"abc")]
    assert list(host.staged(buffers)) == buffers


# --- when copies are computed --------------------------------------------------------------


@pytest.mark.parametrize("on_cuda", [False, True])
def test_copies_are_computed_at_once_and_awaited_where_that_holds_up_no_step(
    on_cuda: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def spy(name: str) -> Any:
        evaluate_now = getattr(mx, name)

        def call(arrays: Any) -> None:
            calls.append(name)
            evaluate_now(arrays)

        return call

    if on_cuda:
        drive(Bus(), monkeypatch)
    for name in ("eval", "async_eval"):
        monkeypatch.setattr(payload.mx, name, spy(name))
    evaluate([stacked(arrays_of([[((1, 2, 6, 4), mx.float32)]]))])
    payload.evaluate_layers(arrays_of([[None, ((1, 2, 6, 4), mx.float32)]]))
    payload.evaluate_layers([])
    assert calls == ["async_eval" if on_cuda else "eval"] * 2
