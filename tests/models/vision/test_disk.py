"""After eviction or a restart, prompts with pictures are restored from the SSD bit for bit.

Slow: one test continues in a process that must import MLX and its models first.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from firn.cache.tiers import TierOptions
from firn.cache.tiers.ssd import SsdTier
from firn.core.values import CacheControl
from tests.cache.pending import settle
from tests.harness import Harness, Result, running
from tests.models.vision import gallery
from tests.models.vision.disk_story import (
    BEHIND,
    BLOCK,
    CHUNK,
    GIB,
    KINDS,
    N_REPLY,
    an_engine,
    another,
    n_looks,
    prompts,
)
from tests.models.vision.gallery import said, user
from tests.zoo.vision import write_vision_folder

ROOT = Path(__file__).parents[3]
EACH = pytest.mark.parametrize("name", KINDS)


@dataclass(frozen=True)
class Told:
    """One family's story: cold answers, then those of a small memory above a folder, twice."""

    cold: dict[str, Result]
    other: Result
    first: dict[str, Result]
    again: dict[str, Result]
    n_evictions: int
    n_faults: int
    n_writes: int
    n_reads: int
    n_looks_again: int


class Teller:
    """Runs each family's story once, all of them in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._told: dict[str, Told] = {}

    def __call__(self, name: str) -> Told:
        if name not in self._told:
            self._told[name] = self._tell(name)
        return self._told[name]

    def _tell(self, name: str) -> Told:
        asked = prompts(name)
        with an_engine(name, None) as large:
            cold = {label: large.ask(prompt, N_REPLY) for label, prompt in asked.items()}
            room = large.cache.records.memory.nbytes // 2
            prompt = gallery.prompt_of(name, *another())
            other = large.ask(prompt, N_REPLY, control=CacheControl(read=False, write=False))
        with an_engine(name, self.folder, memory_nbytes=room) as small:
            first = {label: small.ask(prompt, N_REPLY) for label, prompt in asked.items()}
            settle(small)
            n_before = n_looks(small)
            again = {label: small.ask(prompt, N_REPLY) for label, prompt in asked.items()}
            settle(small)
            stats, counts = small.cache.stats, small.worker.usage().counts
            n_again = n_looks(small) - n_before
        return Told(
            cold,
            other,
            first,
            again,
            n_evictions=sum(stats.evictions.values()),
            n_faults=sum(stats.faults.values()),
            n_writes=counts["writes"],
            n_reads=counts["reads"],
            n_looks_again=n_again,
        )


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Teller:
    return Teller(tmp_path_factory.mktemp("story"))


def same_bits(a: Result, b: Result) -> bool:
    return (a.tokens, a.logprobs) == (b.tokens, b.logprobs)


@EACH
def test_more_prompts_than_memory_holds(told: Teller, name: str) -> None:
    story, asked = told(name), prompts(name)
    assert story.n_evictions > 0
    assert story.n_writes >= len(asked)
    assert story.n_reads > 0
    assert story.n_faults == 0
    for label, prompt in asked.items():
        cold, first, again = story.cold[label], story.first[label], story.again[label]
        assert cold.n_cached == first.n_cached == 0
        assert same_bits(first, cold), label
        assert same_bits(again, cold), label
        assert again.n_cached % CHUNK == 0 < again.n_cached
        assert all(m.end <= again.n_cached for m in prompt.picture_spans), label
    assert any(r.tiers.get("ssd") for r in story.again.values())
    assert story.n_looks_again == 0, "the vision tower's work was asked for again"


@EACH
def test_the_next_engine_on_the_folder(told: Teller, name: str) -> None:
    story = told(name)
    with an_engine(name, told.folder) as h:
        for label, prompt in prompts(name).items():
            got = h.ask(prompt, N_REPLY)
            assert got.tiers == {"ssd": story.again[label].n_cached}, label
            assert same_bits(got, story.cold[label]), label
        assert n_looks(h) == 0
        # The same words about another picture: a miss from the picture on.
        prompt = gallery.prompt_of(name, *another())
        got = h.ask(prompt, N_REPLY)
        assert got.n_cached <= prompt.picture_spans[0].start
        assert same_bits(got, story.other)
        assert not same_bits(got, story.cold["one"])
        assert not h.cache.stats.faults


def test_a_fresh_process_on_the_folder(told: Teller) -> None:
    """Digests of pictures and of their processor's settings are the same in every process."""
    stories = {name: told(name) for name in KINDS}
    run = subprocess.run(
        [sys.executable, "-m", "tests.models.vision.disk_story", str(told.folder)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=ROOT,
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    for name, story in stories.items():
        for label, cold in story.cold.items():
            n_cached = story.again[label].n_cached
            want = [{"ssd": n_cached}, cold.reply, cold.logprobs[0]]
            assert found[name][label] == want, (name, label)


# --- records kept quantised ------------------------------------------------------------------

WIDE: dict[str, dict[str, Any]] = {
    "qwen3_vl": {
        "head_dim": 64,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 8, 8]},
    },
    "gemma3": {"head_dim": 64},
}
"""Heads that can be quantised."""


@pytest.mark.parametrize("name", WIDE)
def test_quantised_records_come_back_too(tmp_path: Path, name: str) -> None:
    """They are smaller in memory, as good as the rounding, and kept apart from the exact ones."""
    home = write_vision_folder(name, tmp_path / "model", text=WIDE[name])
    chat = [user("Look: ", 1, " and ", 2, BEHIND)]
    first = gallery.prompt_of(name, *chat)
    grown = gallery.prompt_of(name, *chat, said("Firn."), user("And ", 3, "?"))

    def quantising_engine(**options: Any) -> AbstractContextManager[Harness]:
        tier = SsdTier(TierOptions(str(tmp_path / "ssd"), GIB))
        build = gallery.build(name, path=home)
        return running(build, chunk=CHUNK, block=BLOCK, tier=tier, **options)

    nbytes: dict[int, int] = {}
    for bits in (0, 8):
        with quantising_engine(kv_bits=bits) as h:
            assert h.ask(first, 1).n_cached == 0
            settle(h)
            nbytes[bits] = h.cache.records.memory.nbytes
    assert nbytes[8] < 0.7 * nbytes[0]
    with quantising_engine(kv_bits=8) as h:
        got = h.ask(grown, 1)
        want = h.ask(grown, 1, control=CacheControl(read=False, write=False))
        assert got.tiers == {"ssd": got.n_cached}
        assert first.picture_spans[1].end < got.n_cached <= grown.picture_spans[2].start
        far = abs(got.logprobs[0][0] - want.logprobs[0][0])
        assert 0 < far < 0.05
        assert not h.cache.stats.faults
