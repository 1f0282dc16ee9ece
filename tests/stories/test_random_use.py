"""Random use of everything at once: no record and no reply differs from a fresh computation.

Requests branch, repeat, grow, are edited, joined, cancelled, stopped and forced between any two steps,
over every kind of layer, with drafts of every kind and of every width, with pictures, thinned or not,
while steps, chunks and the device fail or not.
"""

from __future__ import annotations

import random
from functools import partial

import pytest

from firn.models.speculation.drafters.model import ModelDrafter
from firn.sparse.rules import Sparse
from tests.harness import Result
from tests.models.alone import prompt_of
from tests.stories.random_use import (
    DRAFTS,
    INTEGERS,
    PICTURES,
    REAL,
    SMALL,
    SPARSE,
    TRACED,
    Drafts,
    Kind,
    Used,
    clairvoyant,
    draft_model,
    use,
)

N_ASKED = 30
IN_DEPTH = ("dense", "window of a third of a block", "window smaller than a draft", "hybrid")
"""Kinds that are tried with drafts of every sort, and the others only with right ones."""
IN_SHORT = (
    "gpt_oss",
    "llama4, chunked",
    "mimo, windows with a head",
    "qwen3_next with a head",
    "qwen3_vl",
    "qwen3, sparse",
)
DRAFTED_ONE_WAY = [name for name in REAL if name.endswith("with a head")]
"""By the model's own head."""
WINDOWS = [name for name in INTEGERS if name.startswith("window")]


def assert_used(used: Used) -> None:
    """It was used as was meant: prompts were cached, tokens forced, drafts right, and rows came and
    went while they were verified, unless that was done at once."""
    results = [asked.result for asked in used.asked]
    assert sum(result.n_cached for result in results) > 10 * len(results)
    assert any(result.forced for result in results)
    if used.speculation is not None:
        assert used.speculation.totals.n_accepted > 100
        assert used.runner.seen["left"] or not used.drafts_stay_in_flight


EXACT = INTEGERS | PICTURES | SPARSE | TRACED
PICTURES_IN_SHORT = ("pictures, window", "pictures, hybrid", "whole pictures, window")
SPARSE_IN_SHORT = ("sparse", "sparse, kept quantised", "sparse, short of memory")
FAILING_IN_SHORT = ("window of a third of a block", "pictures, short of memory", "sparse")


@pytest.mark.parametrize("name", INTEGERS)
def test_random_use_of_every_kind_of_layer(name: str) -> None:
    assert_used(use(INTEGERS[name], clairvoyant, 1, N_ASKED))


@pytest.mark.parametrize("name", PICTURES_IN_SHORT)
def test_random_use_with_pictures(name: str) -> None:
    used = use(PICTURES[name], clairvoyant, 1, N_ASKED)
    assert_used(used)
    jobs = [asked.job for asked in used.asked]
    assert sum(bool(job.prompt.picture_spans) for job in jobs) > N_ASKED // 3


@pytest.mark.parametrize("name", SPARSE_IN_SHORT)
def test_random_use_of_thinned_prompts(name: str) -> None:
    used = use(SPARSE[name], clairvoyant, 1, N_ASKED)
    assert_used(used)
    assert used.runner.seen["thinned"]


def test_random_use_of_steps_launched_behind_unread_ones() -> None:
    used = use(TRACED["traced"], DRAFTS["short drafts"], 1, N_ASKED)
    assert_used(used)
    assert used.runner.seen["pipelined"] > 50


@pytest.mark.parametrize("name", FAILING_IN_SHORT)
def test_random_use_while_steps_and_the_device_fail(name: str) -> None:
    used = use(EXACT[name], DRAFTS["short drafts"], 1, N_ASKED, fails=True)
    assert used.runner.n_failed > 1


@pytest.mark.parametrize("drafts", [name for name in DRAFTS if name != "right drafts"])
@pytest.mark.parametrize("name", IN_DEPTH)
def test_random_use_with_every_kind_of_draft(name: str, drafts: str) -> None:
    use(INTEGERS[name], DRAFTS[drafts], 2, N_ASKED)


@pytest.mark.parametrize("name", IN_SHORT)
def test_random_use_of_architectures(name: str) -> None:
    use(REAL[name], clairvoyant, 3, N_ASKED // 3)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "drafts"),
    [
        (name, drafts)
        for name in (*EXACT, *REAL)
        for drafts in DRAFTS
        if drafts == "right drafts" or name not in DRAFTED_ONE_WAY
    ],
)
def test_random_use_for_minutes(name: str, drafts: str) -> None:
    use((EXACT | REAL)[name], DRAFTS[drafts], 100, 2 * N_ASKED)


@pytest.mark.soak
@pytest.mark.parametrize("drafts", ["right drafts", "short drafts"])
@pytest.mark.parametrize("name", EXACT)
def test_random_use_for_minutes_while_steps_and_the_device_fail(name: str, drafts: str) -> None:
    use(EXACT[name], DRAFTS[drafts], 100, 2 * N_ASKED, fails=True)


# --- what random use meets too seldom ----------------------------------------------------------


@pytest.mark.parametrize("name", [*WINDOWS, "dense", "hybrid", "hybrid with a window"])
def test_a_row_that_drafts_alone_is_joined_by_a_prompt_that_is_stored_whole(name: str) -> None:
    """The join reads its unread step and changes its layers, before the engine commits its tokens."""
    kind, rng = INTEGERS[name], random.Random(7)
    stored = prompt_of(rng, 90)
    with Used(kind, clairvoyant) as used:
        used.ask(stored, 1)
        used.wait()
        for n in range(20, 130, 11):
            one = used.ask(prompt_of(rng, 64 + n % 50), 200)
            while len(one.reply) < n:
                used.loop.step()
            other = used.ask(stored, 3)
            used.wait()
            assert other.n_cached == len(stored) - 1
        used.check()
    # Where it is loaded from a tier, the first row may have ended before it joins.
    if used.drafts_stay_in_flight and not kind.memory_tokens:
        assert used.runner.seen["joined"] > 5


@pytest.mark.parametrize("right", [True, False])
def test_a_draft_model_with_windows_finds_its_replies_again(right: bool) -> None:
    """It stores its windows while it drafts: right drafts are consumed, wrong ones are cut off."""
    small = Kind(SMALL.build, block=64)
    with Used(small if right else INTEGERS["dense"], partial(draft_model, small=small)) as used:
        said = prompt_of(random.Random(3), 60)
        for _ in range(3):
            reply = used.ask(said, 220)
            used.wait()
            said = [*said, *reply.reply]
        used.check()
        assert _drafter(used)._cache.stats.n_tokens_cached > 60 + 2 * 200  # type: ignore[attr-defined]
        assert used.speculation is not None
        assert used.speculation.totals.n_drafted > 100


@pytest.mark.parametrize("right", [True, False])
def test_a_draft_model_keeps_true_tokens_only_while_its_rows_come_and_go(right: bool) -> None:
    """A row that leaves, or a pass for one row, drops what was drafted for the others; and a row that
    is left alone has plain layers again."""
    kind, rng = SMALL if right else INTEGERS["dense"], random.Random(11)
    drafts: Drafts = partial(draft_model, small=SMALL)
    with Used(kind, drafts) as used:
        for _ in range(4):
            for n in (25, 70, 90, 160):
                used.ask(prompt_of(rng, 40), n)
            used.wait()
        used.check()


# --- thinned prompts ---------------------------------------------------------------------------

HALF = Sparse(0.5, over=64)


def thinned(used: Used, said: list[int], n_reply: int = 4) -> Result:
    """Ask, and return as soon as the reply is said: before the whole prompt is read."""
    n_before = used.runner.seen["thinned"]
    result = used.ask(said, n_reply, preparation=HALF)
    while not result.finished.is_set():
        used.loop.step()
    assert used.runner.seen["thinned"] == n_before + 1
    return result


def test_what_a_thinned_prompt_resumed_from_stays_cached() -> None:
    kind, rng = SPARSE["sparse"], random.Random(1)
    said = kind.tokens(rng, 200)
    with Used(kind, None) as used:
        used.ask(said, 1)
        used.wait()
        assert thinned(used, [*said, *kind.tokens(rng, 150)]).n_cached == 200
        exact = used.ask([*said, *kind.tokens(rng, 20)], 1)
        used.wait()
        assert exact.n_cached == 200
        used.check()


def test_a_prompt_that_is_read_later_goes_on_after_every_request() -> None:
    """Its parked row is taken over each time."""
    kind, rng = SPARSE["sparse"], random.Random(2)
    said = kind.tokens(rng, 600)
    with Used(kind, None) as used:
        thinned(used, said)
        for _ in range(3):
            for _ in range(2):
                used.loop.step()
            used.ask(kind.tokens(rng, 5), 1)
            while used.running:
                used.loop.step()
        used.wait()
        exact = used.ask(said, 1)
        used.wait()
        assert exact.n_cached == len(said) - 1
        used.check()


def test_a_thinned_prompt_keeps_what_an_earlier_one_stored_though_its_row_holds_more() -> None:
    kind, rng = SPARSE["sparse"], random.Random(3)
    said = kind.tokens(rng, 200)
    with Used(kind, None) as used:
        used.ask(said[:130], 1)
        used.wait()
        thinned(used, [*said[:140], *kind.tokens(rng, 150)])
        used.ask(said, 1)
        used.wait()
        thinned(used, [*said, *kind.tokens(rng, 150)])
        used.wait()
        used.check()


def _drafter(used: Used) -> ModelDrafter:
    (drafter,) = (d for d in used.drafters if isinstance(d, ModelDrafter))
    return drafter
