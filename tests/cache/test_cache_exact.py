"""Exact mode: an answer from the cache is, bit for bit, what computing all of it gives.

Full mode: the same tokens, away from ties. On tiny random models of every layer kind.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from typing import Any

import mlx.core as mx
import pytest

from firn.backends.recurrence import replaced
from firn.backends.recurrence.forms import Chunked, ChunkedDelta
from firn.core.values import CacheControl
from firn.models.patches import Patches
from tests.cache.lab import check_tree, n_leases
from tests.cache.specimens import all_same
from tests.cache.tiny import (
    WINDOW,
    Reference,
    cold_and_warm,
    payloads,
    same_bits,
    tiny,
    tokens,
)
from tests.harness import Harness, running
from tests.sweep.checks import same_tokens
from tests.zoo import ZOO

CHUNK = 16
TWO: dict[str, Any] = {"num_hidden_layers": 2}
"""Two layers: one of each kind, or two of the same kind, which share a stack."""
SLIDING = {**TWO, "layer_types": ["sliding_attention", "full_attention"]}
HYBRID = {**ZOO["qwen3_5"].config["text_config"], **TWO, "full_attention_interval": 2}
KINDS = {
    "dense": tiny("llama", **TWO),
    "window": tiny("llama-sliding", **SLIDING),
    "chunked": tiny("llama4"),
    "hybrid": tiny("qwen3_5", text_config=HYBRID),
    "recurrent": tiny("mamba2", **TWO),
    "state and window": tiny("recurrent_gemma", **TWO, block_types=["recurrent", "attention"]),
    "quantised 8": tiny("llama", bits=8, head_dim=32, **TWO),
    "quantised 4": tiny("llama", bits=4, head_dim=32, **TWO),
    "quantised and window": tiny("llama-sliding", bits=4, head_dim=32, **SLIDING),
}
EACH = pytest.mark.parametrize("kind", KINDS)


References = Callable[[str], Reference]


@pytest.fixture(scope="module")
def uncached() -> Iterator[References]:
    """What a model says without a cache, in chunks as in exact mode: one engine for each kind."""
    with ExitStack() as engines:

        @cache
        def of(kind: str) -> Reference:
            cold = running(KINDS[kind], cache_nbytes=None, chunk=CHUNK, exact=True)
            return Reference(engines.enter_context(cold))

        yield of


def check(harness: Harness) -> None:
    """Nothing failed quietly, nothing is left behind."""
    assert not harness.cache.stats.faults
    harness.engine.call(lambda parts: check_tree(harness.cache)).result(60)
    assert harness.engine.call(lambda parts: n_leases(harness.cache)).result(60) == 0


@pytest.mark.parametrize(
    ("kind", "block"),
    [*((k, 8) for k in KINDS), *((k, 32) for k in ("dense", "window", "hybrid"))],
)
def test_at_every_boundary_and_beside_it(kind: str, block: int, uncached: References) -> None:
    """Lengths around blocks, chunks and windows: first sight, sent again, and grown by a little."""
    windowed = kind not in ("dense", "hybrid", "recurrent", "quantised 8", "quantised 4")
    lengths = (block, WINDOW, 2 * WINDOW) if windowed else (block, WINDOW)
    around = sorted({m + d for m in lengths for d in (-1, 0, 1)})
    base = tokens(1, 2 * WINDOW + 12)
    want = uncached(kind)
    with running(KINDS[kind], chunk=CHUNK, block=block, exact=True) as warm:
        for n in around:
            for ids in (base[:n], base[:n] + base[n : n + 9]):
                got = warm.ask(ids, 2)
                assert same_bits(got, want(ids)), (n, len(ids), got.n_cached)
        for n in lengths[1:]:  # a prompt whose last token but one ends a chunk
            got = warm.ask(base[: n + 1], 2)
            assert same_bits(got, want(base[: n + 1]))
            assert got.n_cached == n
        check(warm)


@EACH
def test_edited_branched_cut_and_continued(kind: str, uncached: References) -> None:
    want = uncached(kind)
    with running(KINDS[kind], chunk=CHUNK, block=8, exact=True) as warm:
        first = tokens(1, 70)
        reply = want(first, 12).reply
        edited = [*first[:50], 7, *first[51:]]
        conversation = first + reply + tokens(2, 15)
        for ids in (
            first,
            conversation,
            edited,
            first[:61],
            first[:48] + tokens(3, 20),
            conversation + tokens(4, 9),
            edited + tokens(5, 9),
            first,
        ):
            got = warm.ask(ids, 3, boundaries=(33, 64))
            assert same_bits(got, want(ids, 3)), (len(ids), got.n_cached)
        assert warm.cache.stats.n_tokens_cached > 200
        check(warm)


@pytest.mark.parametrize("name", ["qwen3_next", "kimi_linear"])
@pytest.mark.parametrize("chunk", [8, 32])
def test_a_recurrence_in_chunks_gives_the_same_bits(
    name: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pass of exact mode begins at a multiple of its chunk, and so do those of the recurrence,
    whether they divide it or are cut short by it: a resumed prompt has the bits of a whole one."""
    called: list[int] = []

    class Counted(ChunkedDelta):
        def __call__(self, q: mx.array, *more: Any) -> Any:
            called.append(q.shape[1])
            return super().__call__(q, *more)

    library, function = replaced.mlx_lm_delta, replaced.NAMES[0]
    plain = getattr(library, function)  # or what another test has installed
    monkeypatch.setattr(library, function, getattr(plain, "_plain", plain))
    patches = Patches()
    replaced.replace(patches, Counted(Chunked(chunk), channel_chunk=chunk))
    try:
        with cold_and_warm(tiny(name), chunk=CHUNK, block=8, exact=True) as (cold, warm):
            want, first = Reference(cold), tokens(1, 70)
            reply = want(first, 4).reply
            for ids in (
                first,
                first + reply + tokens(2, 15),
                first[:61],
                first[:48] + tokens(3, 20),
            ):
                got = warm.ask(ids, 3, boundaries=(33, 64))
                assert same_bits(got, want(ids, 3)), (len(ids), got.n_cached)
            assert warm.cache.stats.n_tokens_cached > 100
            check(warm)
    finally:
        patches.undo()
    assert CHUNK in called


@EACH
def test_neighbours_leave_no_trace_in_what_is_stored(kind: str) -> None:
    """Prompts read while others are read and decoded leave the same records as when read alone."""
    prompts = [tokens(i, n) for i, n in enumerate((90, 33, 64, 70))]
    prompts.append(prompts[0][:64] + tokens(9, 20))
    options: dict[str, Any] = {"chunk": CHUNK, "block": 8, "exact": True}
    with running(KINDS[kind], **options) as alone, running(KINDS[kind], **options) as crowd:
        want = [alone.ask(ids, 2, boundaries=(16,)) for ids in prompts]
        results = [crowd.submit(ids, 9, boundaries=(16,)) for ids in prompts for _ in range(2)]
        for result in results:
            assert result.wait().error is None
        mine, theirs = payloads(crowd), payloads(alone)
        common = set(mine) & set(theirs)
        assert len(common) >= 0.7 * max(len(mine), len(theirs)) > 0
        for key in common:
            assert all_same(mine[key], theirs[key])
        for ids, cold in zip(prompts, want, strict=True):
            got = crowd.ask(ids, 2)
            assert got.n_cached >= (len(ids) - 1) // CHUNK * CHUNK
            assert same_bits(got, cold)
        check(crowd)


@EACH
def test_evicted_and_committed_again(kind: str, uncached: References) -> None:
    want = uncached(kind)
    with running(KINDS[kind], chunk=CHUNK, block=8, exact=True) as warm:
        ids = tokens(1, 90)
        warm.ask(ids, 2)
        before = {k: [mx.array(a) for a in v] for k, v in payloads(warm).items()}
        whole = sum(a.nbytes for arrays in before.values() for a in arrays)
        n_whole = warm.ask(ids, 2).n_cached
        for room in (whole // 2, whole // 5, 0):
            warm.engine.call(lambda _, room=room: warm.cache.set_room(room)).result(60)
            warm.engine.call(lambda _: warm.cache.set_room(1 << 40)).result(60)
            for _ in range(2):
                got = warm.ask(ids, 2)
                assert same_bits(got, want(ids)), (room, got.n_cached)
            assert got.n_cached == n_whole
            after = payloads(warm)
            missing = set(before) - set(after)
            assert all(part == "window" for _, part in missing), "only old windows may stay away"
            assert all(all_same(after[k], before[k]) for k in before if k in after)
        check(warm)


@pytest.mark.parametrize(
    ("kind", "exact"),
    [("dense", True), ("window", False), ("hybrid", True)],
)
def test_five_times_as_many_sessions_as_there_is_room_for(kind: str, exact: bool) -> None:
    """Interleaved, with evictions all the time: every answer is the uncached one."""
    rng = random.Random(1)
    sessions = [tokens(i, rng.randint(18, 34)) for i in range(20)]
    with running(KINDS[kind], chunk=CHUNK, block=8, exact=exact) as one:
        one.ask(sessions[0] + tokens(99, 20), 2)
        room = 4 * one.cache.records.memory.nbytes
    options: dict[str, Any] = {"chunk": CHUNK, "block": 8, "exact": exact, "cache_nbytes": room}
    with cold_and_warm(KINDS[kind], **options) as (cold, warm):
        n_reused = 0
        order = [
            max(i - back, 0) for i in range(20) for back in (0, rng.choice([2, 4, 8]))[: 1 + i % 2]
        ]
        for i in order:
            ids = sessions[i]
            a, b = cold.ask(ids, 2), warm.ask(ids, 2, boundaries=(16,))
            assert same_bits(a, b) if exact else same_tokens(a, b), (i, b.n_cached)
            n_reused += b.n_cached
            sessions[i] = ids + a.reply + tokens(1000 + i, 7)
            assert warm.cache.records.memory.nbytes <= room
        assert n_reused > 0
        assert sum(warm.cache.stats.evictions.values()) > 16
        check(warm)


@pytest.mark.parametrize("kind", ["dense", "window", "chunked", "hybrid", "quantised and window"])
def test_full_mode_says_the_same_away_from_ties(kind: str) -> None:
    """Reuse is exact to the token, at and around block boundaries and inside blocks."""
    with cold_and_warm(KINDS[kind], chunk=32, block=8) as (cold, warm):
        want = Reference(cold)
        base = tokens(1, 80)
        warm.ask(base, 3, boundaries=(40,))
        for n in (1, 7, 8, 9, 31, 32, 33, 40, 41, 65, 79):
            ids = base[:n] + tokens(n, 12)
            got = warm.ask(ids, 3, control=CacheControl(write=False))
            assert same_tokens(want(ids, 3), got), (n, got.n_cached)
            if not warm.cache.records.needs.state:
                assert got.n_cached >= n
        check(warm)


def test_the_two_modes_and_other_blocks_share_nothing() -> None:
    """A record tells how it was made: a server with other settings does not touch it."""
    roots = set()
    for options in (
        {"exact": True, "block": 8},
        {"exact": False, "block": 8},
        {"exact": True, "block": 16},
        {"exact": True, "block": 8, "fingerprint": b"adapter"},
        {"exact": False, "block": 8, "kv_bits": 8},
        {"exact": False, "block": 8, "kv_bits": 4},
    ):
        with running(tiny("llama", head_dim=32), chunk=CHUNK, **options) as harness:
            roots.add(harness.cache.records.identity.root(""))
    assert len(roots) == 6


# --- records kept quantised ----------------------------------------------------------------


@pytest.mark.parametrize(("bits", "ratio"), [(8, (8 + 2 * 32 / 64) / 32), (4, (4 + 1) / 32)])
def test_quantised_records_are_smaller_and_answer_alike(bits: int, ratio: float) -> None:
    """float32 heads of width 64: `bits` per value, plus a scale and a bias for each 64 values."""
    build = tiny("llama", head_dim=64)
    with (
        running(build, chunk=32, block=16) as plain,
        running(build, chunk=32, block=16, kv_bits=bits) as small,
    ):
        ids = tokens(1, 150)
        for harness in (plain, small):
            harness.ask(ids, 4)
        sizes = [h.cache.records.memory.nbytes for h in (plain, small)]
        assert sizes[1] / sizes[0] == pytest.approx(ratio, rel=1e-6)
        grown = ids + tokens(2, 20)
        a, b = plain.ask(grown, 1), small.ask(grown, 1)
        assert a.n_cached == b.n_cached == 150
        far = abs(a.logprobs[0][0] - b.logprobs[0][0])
        assert far < {8: 0.05, 4: 1.0}[bits]
        assert a.reply == b.reply or a.margins[0][0] < 2 * far
        check(small)


def test_layers_that_cannot_be_quantised_are_kept_as_they_are() -> None:
    """Latent attention has parts too narrow for a group, an index has keys alone: both stay exact."""
    for name in ("deepseek_v3", "deepseek_v32", "gpt_oss", "qwen3_5"):
        with cold_and_warm(tiny(name), chunk=32, block=16, kv_bits=8) as (cold, warm):
            ids = tokens(1, 70)
            warm.ask(ids, 3, boundaries=(40,))
            got = warm.ask(ids, 3)
            assert got.n_cached == 69
            assert same_tokens(cold.ask(ids, 3), got)
            check(warm)
