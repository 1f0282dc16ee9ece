"""Short prompts that wait together are read in one padded pass, and answered as if read alone."""

from __future__ import annotations

import random
import time
from functools import partial
from typing import Any, ClassVar

import pytest

from firn.cache.codecs import leaves
from firn.core.measure import N_SURE
from firn.core.ports import Restored
from firn.core.prefill_speed import PrefillSpeed
from firn.engine import prefill, prompt_batches
from firn.engine.prompt_batches import TRY_EVERY, TRY_FIRST, BatchTrial
from firn.models.decode.batched_prefill import batched_prefill_fault, can_batch
from tests.cache.lab import IN_ROWS, LabEngine, tree
from tests.cache.tiny import Build, Reference, cold_and_warm, tiny, tokens
from tests.dict_cache import DictCache, DictCursor, DictPrefix
from tests.harness import Harness, running
from tests.hash_engine import HashEngine
from tests.hash_runner import Faults, HashRow, reply_to
from tests.hash_runner import prompt_of as words

PLAIN = ["llama", "qwen3", "gemma"]
RECURRENT = ["qwen3_5", "qwen3_next", "mamba2", "kimi_linear", "granitemoehybrid"]


class Always(BatchTrial):
    """Always batches, and counts the passes of several prompts."""

    n_passes = 0

    def should_batch(self) -> bool:
        return True

    def observe(self, seconds: float, *, n_tokens: int, n_prompts: int) -> None:
        self.n_passes += n_prompts > 1


def always_batched(harness: Any) -> Always:
    trial, batches = Always(), harness.engine._loop._prefill._batches
    harness.between_steps(lambda: setattr(batches, "_trial", trial))
    return trial


def submit_at_once(harness: Harness, prompts: list[list[int]], n_reply: int) -> list[Any]:
    return harness.between_steps(lambda: [harness.submit(ids, n_reply) for ids in prompts])


# --- the decision --------------------------------------------------------------------------


def decide(trial: BatchTrial, n: int, *, batched_s: float, alone_s: float) -> list[bool]:
    """n decisions, each followed by a pass that takes this long per token."""
    decisions = []
    for _ in range(n):
        decisions.append(trial.should_batch())
        seconds = batched_s if decisions[-1] else alone_s
        trial.observe(100 * seconds, n_tokens=100, n_prompts=2 if decisions[-1] else 1)
    return decisions


def test_reading_together_and_alone_are_both_tried_and_the_faster_is_used() -> None:
    decisions = decide(BatchTrial(), 60, batched_s=1.0, alone_s=2.0)
    assert decisions[: 2 * N_SURE].count(True) == N_SURE
    assert decisions[2 * N_SURE :].count(False) == 2, "two trials"
    decisions = decide(BatchTrial(), 60, batched_s=1.0, alone_s=1.0)
    assert decisions[2 * N_SURE :].count(True) == 2, "equally fast is not worth it"


def test_the_slower_kind_is_tried_again_now_and_then() -> None:
    trial = BatchTrial()
    decide(trial, TRY_EVERY, batched_s=2.0, alone_s=1.0)
    later = decide(trial, 20 * TRY_EVERY, batched_s=0.5, alone_s=1.0)
    assert later[-TRY_EVERY:].count(False) <= 1, "it has become faster, and a trial noticed"


def test_slow_first_passes_do_not_decide_for_long() -> None:
    """On a GPU the first passes of a shape take several times as long as later ones."""
    trial = BatchTrial()
    decide(trial, 2 * N_SURE, batched_s=5.0, alone_s=1.0)
    later = decide(trial, 80, batched_s=0.7, alone_s=1.0)
    n_learning = TRY_FIRST * (1 + 2 + 4)
    assert later[:n_learning].count(True) == 3, "a trial is one pass"
    assert all(later[n_learning:]), "three outvote the first ones"


# --- the same answers ----------------------------------------------------------------------


@pytest.mark.parametrize("name", [*PLAIN, *RECURRENT])
def test_prompts_of_unequal_lengths_are_answered_as_alone(name: str) -> None:
    head = [5, 6, 7]
    prompts = [[*head, *tokens(i, 30 + 7 * i)] for i in range(6)]
    with cold_and_warm(tiny(name), chunk=400, block=16) as (cold, warm):
        want = Reference(cold)
        trial = always_batched(warm)
        warm.ask([*head, 9], 2)  # so that rows begin with a cached prefix
        for asked, ids in zip(submit_at_once(warm, prompts, 6), prompts, strict=True):
            assert asked.wait().reply == want(ids, 6).reply
        assert trial.n_passes >= 1
        for ids in prompts:
            longer = [*ids, *want(ids, 6).reply, 11, 12]
            again = warm.ask(longer, 6)
            assert again.n_cached >= len(ids), "what was stored came out of the padded pass"
            assert again.reply == want(longer, 6).reply
        assert not warm.cache.stats.faults


def test_rows_of_very_different_lengths_are_not_padded_to_each_other() -> None:
    with running(tiny("llama"), chunk=400, block=16) as harness:
        trial = always_batched(harness)
        prompts = [tokens(1, 20), tokens(2, 300)]
        for asked in submit_at_once(harness, prompts, 3):
            asked.wait()
        assert trial.n_passes == 0


@pytest.mark.parametrize(
    ("name", "can"),
    [("llama", True), ("llama-sliding", False), ("qwen3_5", True), ("mamba2", True)],
)
def test_which_layers_can_be_read_together(name: str, can: bool) -> None:
    build: Build = tiny(name)
    _, make_layers = build()
    assert can_batch(leaves(make_layers())) is can


def test_a_model_that_ignores_masks_is_refused() -> None:
    model, make_layers = tiny("llama")()
    assert batched_prefill_fault(model, make_layers) is None

    def forgets_masks(ids: Any, cache: Any) -> Any:
        """Every row sees the padding of the others."""
        for layer in cache:
            if hasattr(layer, "left_padding"):
                layer.left_padding = layer.left_padding * 0
        return model(ids, cache=cache)

    assert "different" in (batched_prefill_fault(forgets_masks, make_layers) or "")


def test_exact_mode_reads_prompts_one_by_one() -> None:
    with running(tiny("llama"), chunk=32, block=16, exact=True) as harness:
        trial = always_batched(harness)
        for asked in submit_at_once(harness, [tokens(i, 31) for i in range(4)], 3):
            asked.wait()
        assert trial.n_passes == 0


# --- several at a time ---------------------------------------------------------------------


def lab_of(faults: Faults | None = None, **options: Any) -> LabEngine:
    lab = LabEngine(IN_ROWS, faults, cache=tree(IN_ROWS, block=8), **options)
    always_batched(lab)
    return lab


def test_what_two_prompts_share_is_computed_once() -> None:
    with lab_of(chunk=400) as lab:
        shared = words(1, 64)
        gate = lab.hold()
        outcomes = [lab.submit([*shared, *words(10 + i, 12)], 4) for i in range(5)]
        gate.set()
        for outcome in outcomes:
            outcome.wait().check()
        assert lab.runner.n_prefilled <= 64 + 5 * 12 + 8
        lab.check()


def test_a_prompt_that_is_being_loaded_joins_no_pass() -> None:
    cache = DictCache(racing=True)
    with HashEngine(cache=cache, chunk=400) as lab:
        always_batched(lab)
        gate = lab.hold()
        outcomes = [lab.submit(words(i, 40), 2) for i in range(3)]
        gate.set()
        for outcome in outcomes:
            outcome.wait().check()
        assert lab.runner.n_batched == 0
        cache.racing = False
        gate = lab.hold()
        outcomes = [lab.submit(words(10 + i, 40), 2) for i in range(3)]
        gate.set()
        for outcome in outcomes:
            outcome.wait().check()
        assert lab.runner.n_batched == 1


def test_each_prompt_is_charged_its_share_of_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the cache would overestimate computing, and load instead."""
    now = [0.0]

    class Clock:
        sleep = staticmethod(time.sleep)
        perf_counter = staticmethod(lambda: now[0])

    class Noting(PrefillSpeed):
        seen: ClassVar[list[tuple[int, float]]] = []

        def observe(self, start: int, end: int, seconds: float) -> None:
            self.seen.append((end - start, seconds))

    def take_a_second(row: Any, chunk: Any) -> None:
        now[0] += 1.0

    for module in (prefill, prompt_batches):
        monkeypatch.setattr(module, "time", Clock)
    cache = DictCache()
    cache.prefill = Noting()
    with HashEngine(Faults(prefill=take_a_second), cache=cache, chunk=400) as lab:
        always_batched(lab)
        gate = lab.hold()
        outcomes = [lab.submit(words(i, n), 2) for i, n in enumerate((41, 61))]
        gate.set()
        for outcome in outcomes:
            outcome.wait().check()
        assert lab.runner.n_batched == 1
    assert sorted(Noting.seen) == [(40, pytest.approx(0.8)), (60, pytest.approx(1.2))]


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_a_request_cancelled_during_a_pass_leaves_the_others_alone(gone: int) -> None:
    """The cancel arrives between the dispatch of the pass and its end."""
    outcomes: list[Any] = []
    cancelled: list[int] = []

    def cancel(batch: Any) -> None:
        if lab.runner.n_batched and not cancelled:
            cancelled.append(gone)
            lab.engine._loop.cancel(outcomes[gone].job.id)

    with lab_of(chunk=400, publish=cancel) as lab:
        gate = lab.hold()
        outcomes += [lab.submit(words(20 + i, 40 + i), 5) for i in range(3)]
        gate.set()
        for i, outcome in enumerate(outcomes):
            if i != gone:
                outcome.wait().check()
        assert lab.runner.n_batched == 1
        assert cancelled
        lab.check()


def test_a_device_fault_while_a_pass_is_chosen_puts_its_prompts_back() -> None:
    """One of them turns out to be cached and fails to join: the others have lost their rows."""
    bad = words(40, 40)
    met: list[int] = []

    class LateCursor(DictCursor):
        """This prompt is stored, but found only by the second lookup."""

        def restore(self) -> Restored | None:
            return None

        def advance(self, n_tokens: int) -> Restored | None:
            if list(self.prompt) != bad or met:
                return None
            return DictPrefix(len(bad) - 1, partial(self.cache.fill, bad[:-1]))

    class Late(DictCache):
        cursor = LateCursor

    def fail(row: HashRow) -> None:
        if row.tokens == bad[:-1] and not met:
            met.append(1)
            raise RuntimeError("a late fault of the device")

    with HashEngine(Faults(join=fail), cache=Late(), chunk=400) as lab:
        always_batched(lab)
        gate = lab.hold()
        outcomes = [lab.submit(words(41, 39), 5), lab.submit(bad, 5), lab.submit(words(42, 41), 5)]
        gate.set()
        for outcome in outcomes:
            outcome.wait().check()
        assert met
        assert lab.leftovers() == {}


def test_prompts_are_read_one_by_one_after_a_pass_has_failed() -> None:
    with lab_of(chunk=400) as lab:

        def refuse(*_: Any) -> None:
            raise ValueError("shapes cannot be broadcast")

        lab.runner.batched_prefill = refuse  # type: ignore[method-assign]
        gate = lab.hold()
        outcomes = [lab.submit(words(30 + i, 40), 5) for i in range(4)]
        gate.set()
        for outcome in outcomes:
            outcome.wait().check()
        assert lab.runner.n_batched == 0
        lab.check()


def test_prompts_that_come_and_go_are_all_answered_right() -> None:
    rng = random.Random(4)
    with lab_of(chunk=120, max_rows=6) as lab:
        for _ in range(6):
            gate = lab.hold()
            prompts = [words(rng.randrange(9), rng.randrange(12, 90)) for _ in range(8)]
            outcomes = [lab.submit(ids, 7) for ids in prompts]
            gone = rng.sample(outcomes, 2)
            gate.set()
            for outcome in gone:
                lab.cancel(outcome)
            for ids, outcome in zip(prompts, outcomes, strict=True):
                if outcome not in gone:
                    outcome.wait().check()
                    assert outcome.tokens() == reply_to(ids, 7)
            lab.check()
        assert lab.runner.n_batched
