"""A small model drafts for a large one: it has rows of its own, rewound, cached, read in chunks."""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from mlx_lm.models.cache import make_prompt_cache

from firn.cache.layout import Layout
from firn.cache.off import CacheOff
from firn.cache.prefix import CacheSettings, PrefixCache
from firn.core.values import Job
from firn.models.decode.batch import Group
from firn.models.decode.ragged import Columns
from firn.models.decode.step_profile import PLAIN_PROFILE, StepProfile
from firn.models.speculation.drafters import NO_DRAFT, Draft
from firn.models.speculation.drafters.lookup import Lookup
from firn.models.speculation.drafters.model import ModelDrafter
from firn.models.speculation.speculator import FAULT_REST_S, DraftPlan, Speculation
from tests.harness import GREEDY, Result, running
from tests.models.alone import plain, prompt_of
from tests.models.speculation.drafting import Tireless
from tests.models.speculation.test_speculation import SAMPLINGS, Story, assert_equal, story, tell
from tests.zoo import build


class AsksWhenReady(Tireless):
    """Asks the costly drafter for most rows that are ready, for a random number of tokens."""

    def __init__(self, *drafters: Any, seed: int = 0, **more: Any) -> None:
        super().__init__(*drafters, **more)
        self._rng = random.Random(seed)

    def _plan(self, group: Group, *, step_in_flight: bool = False) -> DraftPlan:
        ready = [r for r in group.rows if r in self._rows and self._rows[r].is_ready]
        asks = [r for r in ready if self._rng.random() < 0.8]
        return DraftPlan(self._rng.randint(1, 9), tuple(asks))


def drafter(
    name: str, *, seed: int = 0, cached: bool = True, profile: StepProfile = PLAIN_PROFILE
) -> ModelDrafter:
    model = build(name, seed=seed)

    def make_layers() -> list[Any]:
        return list(make_prompt_cache(model))

    cache: Any = CacheOff()
    if cached:
        settings = CacheSettings(1 << 30, 32)
        layout = Layout.of(make_layers())
        cache = PrefixCache(layout, settings, fingerprint=b"small", dtype="float32")
    return ModelDrafter(model, make_layers, cache=cache, batchable=True, chunk=32, profile=profile)


def told(requests: Any, speculation: Any = None, *, name: str = "qwen3") -> list[Result]:
    with running(plain(name), chunk=32, max_rows=4, speculation=speculation) as harness:
        return tell(harness, requests)


@cache
def told_greedily() -> tuple[Story, list[Result]]:
    """A story of greedy requests, and the results without drafts."""
    requests = story(3, samplings=[GREEDY], n_requests=5, longest=24)
    return requests, told(requests)


def assert_all_equal(got: Sequence[Result], want: Sequence[Result]) -> None:
    n = sum(assert_equal(g, w) for g, w in zip(got, want, strict=True))
    assert n > 0.8 * sum(len(reply) for w in want for reply in w.tokens.values())


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "deepseek_v32"])
@pytest.mark.parametrize("seed", [0, 1])
def test_text_stays_the_same_whatever_it_drafts(name: str, seed: int) -> None:
    """Seed 0 is the large model itself: nearly all of its drafts are right."""
    samplings = [GREEDY, SAMPLINGS["penalised"]] if seed else [GREEDY]
    requests = story(3, samplings=samplings, n_requests=5, longest=20)
    want = told(requests, name=name)
    made: list[AsksWhenReady] = []

    def speculation() -> AsksWhenReady:
        made.append(AsksWhenReady(drafter(name, seed=seed)))
        return made[0]

    assert_all_equal(told(requests, speculation, name=name), want)
    totals = made[0].totals
    assert totals.n_drafted > 50
    share = totals.n_accepted / totals.n_drafted
    assert share > 0.9 if seed == 0 else share < 0.5


@pytest.mark.parametrize("has_bias", [False, True])
def test_in_few_shapes_it_drafts_the_same(has_bias: bool) -> None:
    """As on CUDA: padded to few widths, in blocks of columns."""
    shapes = StepProfile(0.1, shapes=(4, 16, 32), columns=Columns(64, has_bias))
    requests, want = told_greedily()
    made: list[AsksWhenReady] = []

    def speculation() -> AsksWhenReady:
        made.append(AsksWhenReady(drafter("qwen3", profile=shapes)))
        return made[0]

    assert_all_equal(told(requests, speculation), want)
    assert made[0].totals.n_accepted > 0.9 * made[0].totals.n_drafted > 40


def test_text_stays_the_same_beside_lookups_and_with_the_real_gate() -> None:
    requests = story(4, samplings=list(SAMPLINGS.values()))
    want = told(requests)
    got = told(requests, lambda: Speculation(Lookup(), drafter("qwen3")))
    assert_all_equal(got, want)


def test_a_second_turn_is_read_from_its_own_cache() -> None:
    rng = random.Random(5)
    prompt = prompt_of(rng, 200)
    made: list[ModelDrafter] = []

    def speculation() -> AsksWhenReady:
        made.append(drafter("qwen3"))
        return AsksWhenReady(made[0])

    with running(plain("qwen3"), chunk=64, speculation=speculation) as harness:
        first = harness.ask(prompt, 40)
        cache: Any = made[0]._cache
        again = harness.ask([*prompt, *first.reply, 20, 21], 20)
        assert again.error is None
        assert harness.between_steps(lambda: cache.stats.n_tokens_cached) > 200


def test_a_model_that_cannot_take_back_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot undo single tokens"):
        drafter("qwen3_next", cached=False)


def test_a_long_prompt_is_read_between_steps_and_what_was_missed_is_caught_up() -> None:
    rng = random.Random(6)
    prompt = prompt_of(rng, 500)
    with running(plain("qwen3"), chunk=512) as harness:
        want = harness.ask(prompt, 90)
    made: list[AsksWhenReady] = []

    def speculation() -> AsksWhenReady:
        made.append(AsksWhenReady(drafter("qwen3", cached=False)))
        return made[0]

    with running(plain("qwen3"), chunk=512, speculation=speculation) as harness:
        assert_equal(harness.ask(prompt, 90), want)
    assert made[0].totals.n_accepted > 40


class Failing:
    """A costly drafter that fails in one of its methods, with this error."""

    is_free = False

    def __init__(self, where: str, error: Exception) -> None:
        self._where, self._error = where, error
        self.n_failed = 0
        self.n_open = 0

    def _work(self, name: str) -> None:
        if name == self._where:
            self.n_failed += 1
            raise self._error

    def odds(self, kind: int) -> float:
        return 0.9

    def open(self, row: Hashable, job: Job) -> None:
        self._work("open")
        self.n_open += 1

    def prepare(self, row: Hashable) -> bool:
        self._work("prepare")
        return self.n_open > 0

    def extend(self, row: Hashable, tokens: Sequence[int]) -> None:
        pass

    def draft(self, rows: Sequence[Hashable], n_most: int) -> list[Draft]:
        self._work("draft")
        return [NO_DRAFT for _ in rows]

    def close(self, row: Hashable) -> None:
        self.n_open = 0

    def end(self) -> None:
        pass


@pytest.mark.parametrize("error", [ValueError("no such tensor"), RuntimeError("out of memory")])
@pytest.mark.parametrize("where", ["open", "prepare", "draft"])
def test_a_drafter_that_fails_costs_drafts_and_no_request(where: str, error: Exception) -> None:
    requests, want = told_greedily()
    failing = Failing(where, error)
    got = told(requests, lambda: AsksWhenReady(failing))
    assert failing.n_failed == 1  # later requests go without it
    for g, w in zip(got, want, strict=True):
        assert_equal(g, w)


def test_a_drafter_that_failed_is_tried_again_after_a_while() -> None:
    now = 0.0
    failing = Failing("prepare", ValueError("a bad moment"))
    speculation = AsksWhenReady(failing, clock=lambda: now)
    with running(plain("qwen3"), speculation=lambda: speculation) as harness:
        harness.ask([20, 21], 4)
        harness.ask([20, 21], 4)
        assert failing.n_failed == 1
        now = FAULT_REST_S
        harness.ask([20, 21], 4)
        assert failing.n_failed == 2


@pytest.mark.parametrize("error", [ValueError, RuntimeError])
def test_a_drafter_that_fails_for_a_later_choice_leaves_no_choice_behind(
    error: type[Exception],
) -> None:
    small = drafter("qwen3")
    open_row, n_opened = small.open, [0]

    def fails(row: Hashable, job: Job) -> None:
        n_opened[0] += 1
        if n_opened[0] == 2:
            raise error("no more rows")
        open_row(row, job)

    small.open = fails  # type: ignore[method-assign]
    speculation = AsksWhenReady(small, Lookup())
    prompt = prompt_of(random.Random(3), 40)
    with running(plain("qwen3"), chunk=32, speculation=lambda: speculation) as harness:
        result = harness.submit(prompt, 8, n=3).wait()
        assert result.error is None
        assert harness.between_steps(lambda: dict(speculation._rows)) == {}
        assert n_opened[0] == 2


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), MemoryError()])
def test_what_may_be_the_devices_fault_is_raised(error: Exception) -> None:
    """Other rows may be wrong as well: the engine computes all of them again."""
    speculation = Speculation(Failing("open", error))
    row: Any = object()
    job: Any = SimpleNamespace(speculates=True)
    with pytest.raises(type(error)):
        speculation.open(row, job)


def test_the_time_of_a_drafter_is_no_steps_time() -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 0.001
        return now

    class Slow(Failing):
        """Reads on for a minute before each step, and is never ready."""

        def prepare(self, row: Hashable) -> bool:
            nonlocal now
            now += 60.0
            return False

    speculation = Speculation(Slow("", ValueError()), clock=clock)
    with running(plain("qwen3"), speculation=lambda: speculation) as harness:
        harness.ask([20, 21], 20)
    assert speculation.times.knows(1)
    assert speculation.times.plain_s(1) < 1.0
