"""A head that skips steps has the same drafts and records as one that reads every step."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from firn.cache.tiers import TierOptions
from firn.cache.tiers.ssd import SsdTier
from firn.models.decode.backlog import MAX_STEPS
from firn.models.decode.batch import Group
from firn.models.speculation.drafters import Draft
from firn.models.speculation.drafters.mtp import MtpDrafter
from firn.models.speculation.mtp import split
from firn.models.speculation.speculator import DraftPlan
from tests.cache.pending import settle
from tests.harness import Harness, running
from tests.models.alone import prompt_of
from tests.models.speculation.drafters.test_mtp import NAMES, built
from tests.models.speculation.drafting import Tireless

BLOCK = 32
N_DRAFTED = 4


class DraftsAt(Tireless):
    """Asks the head where `drafts_at` is true; in between, the head skips steps."""

    def __init__(self, drafter: Any, *, drafts_at: Callable[[int], bool]) -> None:
        super().__init__(drafter)
        self._drafts_at = drafts_at
        self.told: dict[int, Draft] = {}
        """Drafts by the number of known tokens of the row, including the newest."""

    def _plan(self, group: Group, *, step_in_flight: bool = False) -> DraftPlan:
        asks = [row for row in group.rows if self._drafts_at(row.n_tokens)]
        return DraftPlan(1 + N_DRAFTED, tuple(asks)) if asks else DraftPlan(1)

    def _ask(self, best: DraftPlan) -> None:
        super()._ask(best)
        for row in best.asks:
            self.told[row.n_tokens + len(row.pending)] = self._rows[row].next


def drafting_at(
    name: str, drafts_at: Callable[[int], bool] = lambda n: False, **options: Any
) -> tuple[Any, list[DraftsAt]]:
    make, made = built(name)
    speculation: list[DraftsAt] = []

    def speculate() -> DraftsAt:
        speculation.append(DraftsAt(MtpDrafter(made[-1]), drafts_at=drafts_at))
        return speculation[0]

    options = {"chunk": BLOCK, "block": BLOCK} | options
    return running(make, speculation=speculate, **options), speculation


def first_draft(name: str, prompt: Sequence[int]) -> Draft:
    """The draft of a head that has read all of it as a prompt, in a server with an empty cache."""
    engine, speculation = drafting_at(name, lambda n: True)
    with engine as harness:
        harness.ask(list(prompt), 3 + N_DRAFTED)
    return speculation[0].told[len(prompt)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n_rest", [5, MAX_STEPS + 9])
def test_after_skipped_steps_the_head_drafts_as_if_it_had_read_along(
    name: str, n_rest: int
) -> None:
    prompt = prompt_of(random.Random(1), 41)
    at = len(prompt) + n_rest
    engine, speculation = drafting_at(name, lambda n: n >= at)
    with engine as harness:
        reply = harness.ask(prompt, n_rest + 3 + N_DRAFTED).reply
    told = speculation[0].told
    n_known = min(told)
    assert n_known == at + 1
    assert told[n_known] == first_draft(name, [*prompt, *reply][:n_known])


@pytest.mark.parametrize("name", NAMES)
def test_rows_that_come_and_go_do_not_disturb_the_backlog(name: str) -> None:
    rng = random.Random(2)
    prompts = [prompt_of(rng, n) for n in (33, 50, 61)]
    engine, speculation = drafting_at(name, lambda n: n == 70, max_rows=4)
    with engine as harness:
        late = harness.submit(prompts[0], 45)
        others = [harness.submit(p, n) for p, n in zip(prompts[1:], (9, 17), strict=True)]
        replies = [r.wait().reply for r in (late, *others)]
    assert [len(r) for r in replies] == [45, 9, 17]
    text = [*prompts[0], *replies[0]]
    assert speculation[0].told[71] == first_draft(name, text[:71])


@pytest.mark.parametrize("name", NAMES)
def test_records_of_a_row_include_what_its_head_had_skipped(name: str) -> None:
    """The next turn follows a reply of which the head itself has read nothing."""
    prompt = prompt_of(random.Random(3), 40)
    engine, speculation = drafting_at(name, lambda n: n > 110)
    with engine as harness:
        text = prompt + harness.ask(prompt, MAX_STEPS + 6).reply
        more = text + prompt_of(random.Random(4), 30)
        assert harness.ask(more, 8).n_cached > len(prompt) + BLOCK
    assert speculation[0].told[len(more)] == first_draft(name, more)


@pytest.mark.parametrize("name", NAMES)
def test_the_heads_memory_survives_a_restart(name: str, tmp_path: Path) -> None:
    """Another server reads the head's KV and the hidden state that it continues from off the SSD.
    Its first draft is that of a server that has read the whole prompt."""
    prompt = prompt_of(random.Random(5), 45)

    def on_disk(drafts_at: Callable[[int], bool] = lambda n: False) -> tuple[Any, list[DraftsAt]]:
        return drafting_at(name, drafts_at, tier=SsdTier(TierOptions(str(tmp_path), 1 << 28)))

    engine, _ = on_disk()
    with engine as harness:
        text = prompt + harness.ask(prompt, MAX_STEPS + 6).reply
        settle(harness)
    more = [*text, 17]
    engine, speculation = on_disk(lambda n: True)
    with engine as harness:
        result = harness.ask(more, 8)
        assert result.tiers.get("ssd", 0) > len(prompt)
        assert not harness.cache.stats.faults
    assert speculation[0].told[len(more)] == first_draft(name, more)


@pytest.mark.parametrize("name", ["qwen3_next", "glm4_moe"])
def test_drafts_after_a_hit_from_disk_are_accepted(name: str, tmp_path: Path) -> None:
    """A new server on the same folder accepts every draft of a head that agrees with its model."""
    prompt = prompt_of(random.Random(6), 70)
    make, made = built(name, agrees=True)

    def server() -> tuple[Any, list[DraftsAt]]:
        speculation: list[DraftsAt] = []

        def speculate() -> DraftsAt:
            speculation.append(DraftsAt(MtpDrafter(made[-1]), drafts_at=lambda n: True))
            return speculation[0]

        tier = SsdTier(TierOptions(str(tmp_path), 1 << 28))
        return running(
            make, chunk=BLOCK, block=BLOCK, tier=tier, speculation=speculate
        ), speculation

    engine, _ = server()
    with engine as harness:
        first = harness.ask(prompt, 12).reply
        settle(harness)
    engine, speculation = server()
    with engine as harness:
        again = harness.ask(prompt, 12)
    assert again.tiers.get("ssd", 0) > BLOCK
    assert again.reply == first
    totals = speculation[0].totals
    assert totals.n_accepted == totals.n_drafted > 4


def test_the_head_takes_no_part_in_steps_without_drafts() -> None:
    """Its KV lags behind the model's by the steps that it has skipped."""
    engine, _ = drafting_at("glm4_moe")
    seen: list[tuple[int, int]] = []

    def look(harness: Harness) -> None:
        for group in harness.runner._groups:
            own, head, _ = split(group.layers)
            seen.append((int(mx.array(own[0].offset).max()), int(mx.array(head.offset).max())))

    with engine as harness:
        result = harness.submit(prompt_of(random.Random(7), 40), 50)
        while not result.finished.is_set():
            harness.between_steps(lambda: look(harness))
    assert any(model > head for model, head in seen)
    assert all(model - head <= MAX_STEPS for model, head in seen)
