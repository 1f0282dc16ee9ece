"""Memory full, prompts evicted, the server restarted: what comes back is, bit for bit, what went.

On tiny random models of every kind of layer, in exact mode: an answer from the cache is the same
arithmetic as one without, so a single bit that is lost on the way to the SSD and back is seen.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache

from firn.cache.parts import Part
from firn.cache.tiers import TierOptions
from firn.cache.tiers.ssd import SsdTier
from tests.cache.pending import settle
from tests.cache.story import (
    GIB,
    KINDS,
    N_CACHED,
    N_HELD,
    N_MORE,
    PROMPTS,
    Contents,
    ask,
    contents,
    open_engine,
)
from tests.cache.tiny import Build, same_bits, tiny, tokens
from tests.harness import Result, running

ROOT = Path(__file__).parents[2]
EACH = pytest.mark.parametrize("kind", KINDS)


@dataclass(frozen=True)
class Told:
    """One kind's story: cold answers and their records, then two rounds in a small memory."""

    cold: list[Result]
    records: Contents
    room_nbytes: int
    first: list[Result]
    again: list[Result]
    evictions: dict[str, int]
    counts: dict[str, int]
    n_faults: int


class Teller:
    """Tells each kind's story once, all of them in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._told: dict[str, Told] = {}

    def __call__(self, kind: str) -> Told:
        if kind not in self._told:
            self._told[kind] = self._tell(kind)
        return self._told[kind]

    def _tell(self, kind: str) -> Told:
        large = open_engine(kind, None)
        cold = [ask(large, ids) for ids in PROMPTS]
        records = contents(large)
        room = large.cache.records.memory.nbytes * N_HELD // len(PROMPTS)
        large.close()
        small = open_engine(kind, self.folder, memory_nbytes=room)
        first = [ask(small, ids) for ids in PROMPTS]
        settle(small)
        again = [ask(small, ids) for ids in PROMPTS]
        settle(small)
        stats, usage = small.cache.stats, small.worker.usage()
        small.close()
        return Told(
            cold,
            records,
            room,
            first,
            again,
            dict(stats.evictions),
            dict(usage.counts),
            sum(stats.faults.values()),
        )


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Teller:
    return Teller(tmp_path_factory.mktemp("story"))


@EACH
def test_more_prompts_than_memory_holds(told: Teller, kind: str) -> None:
    story = told(kind)
    assert sum(story.evictions.values()) >= N_MORE
    assert story.counts["writes"] >= len(PROMPTS)
    assert list(told.folder.glob("??/*"))
    for cold, first, again in zip(story.cold, story.first, story.again, strict=True):
        assert cold.n_cached == first.n_cached == 0
        assert same_bits(first, cold)
        assert again.n_cached == N_CACHED
        assert same_bits(again, cold)
    assert all(r.tiers.get("ssd") for r in story.again[:N_MORE])
    assert story.counts["reads"] > 0
    assert story.n_faults == 0


@EACH
def test_the_next_engine_on_the_folder(told: Teller, kind: str) -> None:
    """A new engine and a new tier: the same answers, and the same bits in every record it loads."""
    story = told(kind)
    harness = open_engine(kind, told.folder)
    try:
        for ids, cold in zip(PROMPTS, story.cold, strict=True):
            got = ask(harness, ids)
            assert got.tiers == {"ssd": N_CACHED}
            assert same_bits(got, cold)
        loaded = contents(harness)
        assert len(loaded) >= 0.5 * len(story.records)
        for name, arrays in loaded.items():
            assert arrays == story.records[name]
        assert not harness.cache.stats.faults
        settle(harness)
    finally:
        harness.close()


def test_a_fresh_process_on_the_folder(told: Teller) -> None:
    stories = {kind: told(kind) for kind in KINDS}
    run = subprocess.run(
        [sys.executable, "-m", "tests.cache.story", str(told.folder)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=ROOT,
    )
    assert run.returncode == 0, run.stderr
    said = json.loads(run.stdout)
    for kind, story in stories.items():
        for got, cold in zip(said[kind], story.cold, strict=True):
            assert got == [N_CACHED, {"ssd": N_CACHED}, cold.reply, cold.logprobs[0]], kind


# --- bytes ---------------------------------------------------------------------------------

PAGE = 256
HEADER_NBYTES = 4096
HEADS, LAYERS, WIDTH = 2, 3, 64


def n_distinct(texts: Sequence[Sequence[int]]) -> int:
    """How many tokens must be stored for these texts: one for each distinct prefix."""
    return len({tuple(ids[: n + 1]) for ids in texts for n in range(len(ids))})


def plain(itemsize: int) -> float:
    return 2 * LAYERS * HEADS * WIDTH * itemsize


def packed(bits: int, scale_size: int) -> float:
    """Each group of 32 values has a scale and a bias."""
    return 2 * LAYERS * HEADS * WIDTH * (bits / 8 + 2 * scale_size / 32)


def on_disk(folder: Path, part: Part) -> tuple[int, int]:
    """How many files a part has, and how many bytes of the disk they take up."""
    files = [p.stat() for p in folder.glob(f"??/*.{part.value}.*")]
    return len(files), sum(st.st_blocks * 512 for st in files)


@pytest.mark.parametrize(
    ("options", "token_nbytes"),
    [
        ({}, plain(4)),
        ({"dtype": mx.bfloat16}, plain(2)),
        ({"bits": 8}, packed(8, 4)),
        ({"bits": 4}, packed(4, 4)),
    ],
    ids=["float32", "bfloat16", "8 bits", "4 bits"],
)
def test_a_token_is_stored_once_and_as_it_is(
    tmp_path: Path, options: dict[str, Any], token_nbytes: float
) -> None:
    """Branches share what they have in common, and a prompt that grows takes over its tail."""
    build = tiny("llama", head_dim=WIDTH, **options)
    shared = tokens(1, PAGE)
    prompts = [shared + tokens(2 + i, PAGE + 150 + i) for i in range(2)]
    with running(
        build, chunk=PAGE, block=PAGE, tier=SsdTier(TierOptions(str(tmp_path), GIB))
    ) as warm:
        texts = [ids + warm.ask(ids, 4).reply for ids in prompts]
        grown = texts[0] + tokens(9, 200)
        texts.append(grown + warm.ask(grown, 4).reply)
        settle(warm)
        n_files, nbytes = on_disk(tmp_path, Part.PAGES)
        wanted = n_distinct(texts) * token_nbytes
        assert wanted <= nbytes <= wanted * 1.03 + n_files * HEADER_NBYTES
        written = warm.worker.usage().counts["bytes_written"]
        for ids in prompts:
            warm.ask(ids, 4)
        settle(warm)
        assert warm.worker.usage().counts["bytes_written"] == written, "a record was written twice"


def row_nbytes(build: Build) -> tuple[int, int]:
    """Bytes of a row's state, and of one token of its pages."""
    model, make_layers = build()
    layers = make_layers()
    model(mx.array([tokens(1, 8)]), cache=layers)
    state = sum(x.nbytes for x in layers if isinstance(x, ArraysCache))
    pages = [x for x in layers if isinstance(x, KVCache)]
    return state, sum(a[:, :, :1].nbytes for x in pages for a in (x.keys, x.values))


def test_states_are_few_and_weigh_what_the_layers_hold(tmp_path: Path) -> None:
    build = tiny("qwen3_5")
    state_nbytes, token_nbytes = row_nbytes(build)
    ids = tokens(1, 4 * PAGE + 1)
    with running(
        build, chunk=PAGE, block=PAGE, tier=SsdTier(TierOptions(str(tmp_path), GIB))
    ) as warm:
        text = ids + warm.ask(ids, 4, boundaries=(PAGE, 3 * PAGE)).reply
        settle(warm)
    n_states, nbytes = on_disk(tmp_path, Part.STATE)
    assert n_states == 3, "two boundaries and the end of the reply"
    assert n_states * state_nbytes <= nbytes <= n_states * (state_nbytes + 2 * HEADER_NBYTES)
    n_files, nbytes = on_disk(tmp_path, Part.PAGES)
    wanted = len(text) * token_nbytes
    assert wanted <= nbytes <= wanted * 1.03 + n_files * HEADER_NBYTES
