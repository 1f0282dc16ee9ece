"""A fault in one request ends that request; a fault of the thread is reported to all."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence

import pytest

from firn.core.errors import (
    EngineDead,
    FirnError,
    InvalidValue,
    ShuttingDown,
    StepFailed,
)
from firn.core.ports import Delivery
from firn.core.values import Sampling
from firn.engine import EngineLimits, EngineParts
from firn.engine.budget import Budget, RowCost
from firn.engine.engine import TASKS, Engine
from tests.dict_cache import DictCache
from tests.hash_engine import WAIT_S, HashEngine, Outcome
from tests.hash_runner import VOCAB_SIZE, Faults, HashRow, HashRunner, prompt_of, reply_to

WARM = Sampling(temperature=1.0, seed=11)
BAD = VOCAB_SIZE + 1
"""A token that no model picks: prompts that contain it are the faulty ones."""


def on_bad(*args: object) -> None:
    """Raise if any of the rows concerned has the bad token in its prompt."""
    rows = args[0] if isinstance(args[0], list) else [args[0]]
    if any(BAD in row.tokens for row in rows):
        raise RuntimeError("a bad token")


def bad_prompt(seed: int, length: int) -> list[int]:
    return [*prompt_of(seed, length), BAD, *prompt_of(seed + 1, length)]


class Once:
    """Raises at its n-th call, and never again. A RuntimeError may be the device's fault."""

    def __init__(self, *at: int, error: type[Exception] = RuntimeError) -> None:
        self.at = set(at)
        self.error = error
        self.n_calls = 0

    def __call__(self, *_: object) -> None:
        self.n_calls += 1
        if self.n_calls in self.at:
            raise self.error(f"fault at call {self.n_calls}")


# --- one request ---------------------------------------------------------------------------


def fault_in_chunk(row: HashRow, chunk: Sequence[int]) -> None:
    if BAD in chunk:
        raise RuntimeError("a bad token")


@pytest.mark.parametrize(
    "faults",
    [Faults(prefill=fault_in_chunk), Faults(finish_chunk=on_bad), Faults(join=on_bad)],
    ids=["prefill", "finish_chunk", "join"],
)
def test_a_request_that_fails_ends_alone(faults: Faults) -> None:
    cache = DictCache()
    with HashEngine(faults, cache=cache, chunk=4) as lab:
        gate = lab.hold()
        before = [lab.submit(prompt_of(i, 30), 40) for i in range(3)]
        bad = lab.submit(bad_prompt(50, 11), 40, n=2)
        after = [lab.submit(prompt_of(10 + i, 30), 40) for i in range(3)]
        gate.set()
        error = bad.wait().error
        assert isinstance(error, StepFailed)
        assert "bad token" in error.message or faults.finish_chunk is on_bad
        assert bad.tokens() == []
        for outcome in before + after:
            outcome.wait().check()
        assert lab.leftovers() == {}


@pytest.mark.parametrize(("stage", "n_rows"), [("choices", 1), ("join", 2)])
def test_no_row_of_a_request_that_cannot_join_is_kept(stage: str, n_rows: int) -> None:
    """The runner keeps drafts of every row until the row leaves."""
    left: set[HashRow] = set()

    def refuse(*_: object) -> None:
        raise ValueError("this reply cannot begin")

    with HashEngine(Faults(**{stage: refuse}, leave=left.update)) as lab:
        assert isinstance(lab.submit(prompt_of(1, 20), n=2).wait().error, StepFailed)
        assert lab.leftovers() == {}
        assert len(left) == n_rows


def test_a_named_fault_keeps_its_name() -> None:
    def refuse(job: object) -> None:
        raise InvalidValue("logit_bias", "no such token")

    with HashEngine(Faults(choices=refuse)) as lab:
        error = lab.submit(prompt_of(1, 20)).wait().error
        assert isinstance(error, InvalidValue)
        assert error.param == "logit_bias"
        assert lab.leftovers() == {}


@pytest.mark.parametrize("stage", ["prefill", "finish_chunk"])
def test_a_row_in_doubt_is_not_stored(stage: str) -> None:
    """The failed chunk has left the row half-written: it must be neither stored nor continued."""
    fault = Once(3)
    faults = Faults(prefill=fault) if stage == "prefill" else Faults(finish_chunk=fault)
    cache = DictCache()
    prompt = prompt_of(1, 60)
    with HashEngine(faults, cache=cache, chunk=8) as lab:
        lab.submit(prompt, 5).wait().check()
        assert lab.runner.prefills[3 if stage == "finish_chunk" else 2][0] == 16, (
            "what was committed before the fault is good"
        )
        lab.submit(prompt, 5).wait().check()
    assert all(list(tokens) == state for (_, tokens), state in cache.store.items())


def test_a_job_that_cannot_be_opened_ends_alone() -> None:
    """A cache must not raise by its contract; if one does, no client may hang."""

    class Broken(DictCache):
        def open(self, *args: object) -> object:  # type: ignore[override]
            raise RuntimeError("no cache today")

    with HashEngine(cache=Broken()) as lab:
        for _ in range(3):
            assert isinstance(lab.submit(prompt_of(1, 9)).wait().error, StepFailed)
        assert lab.leftovers() == {}
        assert lab.engine.health().alive


# --- a decode step -------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["launch", "collect"])
@pytest.mark.parametrize("cached", [False, True])
def test_the_rows_of_a_failed_step_are_computed_again(stage: str, cached: bool) -> None:
    """Clients notice only a pause: all rows are read again from their tokens."""
    fault = Once(9)
    faults = Faults(launch=fault) if stage == "launch" else Faults(collect=fault)
    cache = DictCache() if cached else None
    with HashEngine(faults, cache=cache, chunk=8) as lab:
        gate = lab.hold()
        outcomes = [
            lab.submit(prompt_of(i, 3 + 7 * i), 30, n=1 + i % 3, sampling=WARM) for i in range(4)
        ]
        gate.set()
        for outcome in outcomes:
            outcome.wait().check()
        assert fault.n_calls > 9
        assert lab.leftovers() == {}


def test_a_row_that_fails_alone_is_given_up() -> None:
    """One row fails every step that it takes part in; the others continue."""
    with HashEngine(Faults(launch=on_bad), cache=DictCache(), max_rows=16) as lab:
        gate = lab.hold()
        good = [lab.submit(prompt_of(i, 5 + i), 40, sampling=WARM) for i in range(7)]
        bad = lab.submit(bad_prompt(60, 20), 40)
        more = [lab.submit(prompt_of(20 + i, 5 + i), 40, sampling=WARM) for i in range(7)]
        gate.set()
        assert isinstance(bad.wait().error, StepFailed)
        assert bad.tokens() == []
        for outcome in good + more:
            outcome.wait().check()
        assert lab.leftovers() == {}


def test_several_bad_rows_do_not_end_good_ones() -> None:
    with HashEngine(Faults(launch=on_bad), max_rows=32) as lab:
        gate = lab.hold()
        outcomes = [
            lab.submit(bad_prompt(i, 9) if i % 3 == 1 else prompt_of(i, 19), 25, sampling=WARM)
            for i in range(24)
        ]
        gate.set()
        for i, outcome in enumerate(outcomes):
            outcome.wait()
            if i % 3 == 1:
                assert isinstance(outcome.error, StepFailed)
            else:
                outcome.check()
        assert lab.leftovers() == {}


def test_a_model_that_always_fails_fails_every_request_and_the_engine_lives() -> None:
    def always(rows: object) -> None:
        raise RuntimeError("no")

    with HashEngine(Faults(launch=always), cache=DictCache()) as lab:
        outcomes = [lab.submit(prompt_of(i, 9), n=2) for i in range(6)]
        for outcome in outcomes:
            assert isinstance(outcome.wait().error, StepFailed)
        assert lab.leftovers() == {}
        assert lab.engine.health().alive
        lab.runner.faults.launch = lambda rows: None
        lab.submit(prompt_of(7, 9)).wait().check()


def test_a_request_with_rows_in_two_groups_fails_as_one() -> None:
    """Groups of one row, as for models that cannot batch: the second choice ends with the first."""
    with HashEngine(Faults(launch=on_bad), group_rows=1, cache=DictCache()) as lab:
        gate = lab.hold()
        bad = lab.submit(bad_prompt(1, 9), 20, n=3, sampling=WARM)
        good = lab.submit(prompt_of(2, 9), 20, n=3, sampling=WARM)
        gate.set()
        assert isinstance(bad.wait().error, StepFailed)
        good.wait().check()
        assert lab.leftovers() == {}


def test_one_choice_is_rescued_while_another_continues() -> None:
    """Only one group's step fails, so only its row is read again."""
    fault = Once(9, error=ValueError)  # counts the steps of two groups that alternate
    with HashEngine(Faults(launch=fault), group_rows=1, chunk=4) as lab:
        outcome = lab.submit(prompt_of(3, 40), 30, n=2, sampling=WARM).wait()
        outcome.check()
        assert lab.leftovers() == {}


@pytest.mark.parametrize("action", ["stop", "cancel"])
def test_a_choice_can_be_stopped_while_it_is_read_again(action: str) -> None:
    fault = Once(9, error=ValueError)
    cache = DictCache()
    seen: list[int] = []

    def on_chunk(row: HashRow, chunk: Sequence[int]) -> None:
        if fault.n_calls >= 9:
            seen.append(len(chunk))
            if len(seen) == 2:
                if action == "stop":
                    lab.engine.stop_choice(outcome.job.id, 0)
                else:
                    lab.cancel(outcome)

    with HashEngine(
        Faults(launch=fault, prefill=on_chunk), cache=cache, group_rows=1, chunk=4
    ) as lab:
        gate = lab.hold()
        outcome = lab.submit(prompt_of(3, 40), 60, n=2, sampling=WARM)
        gate.set()
        if action == "stop":
            outcome.wait()
            assert outcome.error is None
            assert outcome.tokens(1) == outcome.expected(1)
        else:
            while len(seen) < 2:
                lab.between_steps()
        assert lab.leftovers() == {}
        assert len(seen) == 2, "the dropped choice is not read to its end"


def test_random_faults_never_make_a_wrong_token() -> None:
    """Random faults in every stage of hundreds of jobs: each is right, or fails with a named error."""
    rng = random.Random(5)

    def maybe(*_: object) -> None:
        if rng.random() < 0.01:
            raise RuntimeError("by chance")

    faults = Faults(
        start=maybe, prefill=maybe, finish_chunk=maybe, choices=maybe, join=maybe, launch=maybe,
        collect=maybe,
    )  # fmt: skip
    cache = DictCache()
    with HashEngine(faults, cache=cache, max_rows=6, chunk=8) as lab:
        outcomes = []
        for i in range(300):
            prompt = prompt_of(i % 5, 40)[: 1 + i % 40] + prompt_of(i, i % 7)
            n = 1 + i % 2
            outcomes.append(lab.submit(prompt, 1 + i % 20, n=n, sampling=WARM))
        for outcome in outcomes:
            outcome.wait()
        assert lab.leftovers() == {}
        assert lab.engine.health().alive
    failed = [o for o in outcomes if o.error is not None]
    assert 0 < len(failed) < 200
    for outcome in outcomes:
        if outcome.error is None:
            outcome.check()
        else:
            assert isinstance(outcome.error, StepFailed)
            assert outcome.n_ends == 1


# --- the thread ----------------------------------------------------------------------------


def dies(*_: object) -> None:
    raise MemoryError("this is the end")


def deadly(lab: HashEngine) -> None:
    """If `leave` fails, the thread dies."""
    lab.runner.faults.leave = dies


def test_all_clients_are_told_at_once_when_the_engine_dies() -> None:
    with HashEngine(max_rows=2, cache=DictCache()) as lab:
        gate = lab.hold()
        deadly(lab)
        decoding = lab.submit(prompt_of(1, 3), 5, n=2)
        queued = [lab.submit(prompt_of(i, 30), 50) for i in range(20)]
        in_inbox: list[Outcome] = []

        def on_collect(rows: object) -> None:
            if not in_inbox:
                in_inbox.extend(lab.submit(prompt_of(i, 30), 50) for i in range(20))
                lab.cancel(in_inbox.pop())

        lab.runner.faults.collect = on_collect
        gate.set()
        assert lab.died.wait(WAIT_S)
        for outcome in [decoding, *queued, *in_inbox]:
            assert outcome.finished.is_set(), "told before anyone hears of the death"
            assert isinstance(outcome.error, EngineDead)
            assert outcome.n_ends == 1
        health = lab.engine.health()
        assert (health.alive, health.n_waiting, health.n_prefilling, health.n_decoding) == (
            False, 0, 0, 0,
        )  # fmt: skip
        with pytest.raises(EngineDead):
            lab.submit(prompt_of(1, 3))
        with pytest.raises(EngineDead):
            lab.engine.call(lambda parts: 1).result(WAIT_S)
        lab.cancel(decoding)
        lab.engine.stop_choice(decoding.job.id, 0)
    assert lab.n_deaths == 1
    assert lab.runner.closed


def test_a_call_in_the_inbox_of_a_dying_engine_is_answered() -> None:
    with HashEngine() as lab:
        gate = lab.hold()
        deadly(lab)
        lab.submit(prompt_of(1, 3), 1)
        futures: list[object] = []

        def on_collect(rows: object) -> None:
            if not futures:
                futures.append(lab.engine.call(lambda parts: parts.limits.max_rows))

        lab.runner.faults.collect = on_collect
        gate.set()
        assert lab.died.wait(WAIT_S)
        assert futures[0].result(WAIT_S) == 8  # type: ignore[attr-defined]


def test_on_death_is_called_even_if_clients_cannot_be_told() -> None:
    """`on_death` makes the server exit, which must happen even if events cannot be delivered."""

    def broken(batch: Sequence[Delivery]) -> None:
        raise RuntimeError("nobody listens")

    with HashEngine(publish=broken) as lab:
        lab.submit(prompt_of(1, 3))
        assert lab.died.wait(WAIT_S)
        assert not lab.engine.health().alive
        assert lab.n_deaths == 1


class Clients:
    """Each of several threads submits and calls 40 times; some are accepted, some refused."""

    def __init__(self, lab: HashEngine) -> None:
        self.lab = lab
        self.accepted: list[Outcome] = []
        self.refused: list[FirnError] = []

    def run(self) -> None:
        for _ in range(40):
            try:
                self.accepted.append(self.lab.submit(prompt_of(1, 5), 2))
                self.lab.engine.call(lambda parts: None).exception(WAIT_S)
            except FirnError as e:
                self.refused.append(e)


@pytest.mark.parametrize("attempt", range(10))
def test_every_request_submitted_to_a_dying_engine_gets_an_error(attempt: int) -> None:
    """Jobs from several threads while the engine dies: each is refused or failed, none waits."""
    with HashEngine(max_rows=4) as lab:
        deadly(lab)
        clients = Clients(lab)
        run_together(clients.run, 4)
        assert lab.died.wait(WAIT_S)
        for outcome in clients.accepted:
            assert isinstance(outcome.wait().error, EngineDead)
        assert all(isinstance(e, EngineDead) for e in clients.refused)
        assert clients.accepted
        assert clients.refused


def run_together(target: Callable[[], None], n: int) -> None:
    threads = [threading.Thread(target=target) for _ in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()


# --- stopping ------------------------------------------------------------------------------


def test_stop_fails_waiting_requests() -> None:
    with HashEngine(max_rows=1) as lab:
        outcomes: list[Outcome] = []
        stopping = threading.Thread(target=lab.engine.stop)

        def on_launch(rows: object) -> None:
            if len(outcomes[0].tokens()) == 3 and not stopping.ident:
                stopping.start()

        lab.runner.faults.launch = on_launch
        gate = lab.hold()
        outcomes += [lab.submit(prompt_of(i, 5), 1 << 40) for i in range(4)]
        gate.set()
        for outcome in outcomes:
            assert isinstance(outcome.wait().error, ShuttingDown)
            assert outcome.n_ends == 1
        stopping.join(WAIT_S)
        assert not lab.engine._thread.is_alive()
        with pytest.raises(ShuttingDown):
            lab.submit(prompt_of(1, 5))
        assert not lab.engine.health().alive
        with pytest.raises(EngineDead):
            lab.engine.call(lambda parts: 1).result(WAIT_S)
        tokens = outcomes[0].tokens()
        assert tokens == reply_to(prompt_of(0, 5), len(tokens))
    assert lab.n_deaths == 0
    assert lab.runner.closed


def test_an_idle_engine_stops_at_once_and_twice() -> None:
    with HashEngine() as lab:
        lab.engine.stop(timeout_s=WAIT_S)
        assert not lab.engine._thread.is_alive()
        lab.engine.stop(timeout_s=WAIT_S)


def test_start_raises_the_error_of_building_the_parts() -> None:
    def build() -> EngineParts:
        raise FileNotFoundError("no such model")

    engine = Engine(build, lambda batch: None)
    with pytest.raises(FileNotFoundError):
        engine.start()
    with pytest.raises(FileNotFoundError):
        _ = engine.model
    assert not engine.health().alive
    with pytest.raises(EngineDead):
        engine.submit(Outcome(HashEngine().job([1])).job)
    engine.stop(timeout_s=WAIT_S)


def test_a_start_that_failed_leaves_no_thread_behind() -> None:
    """MLX frees a thread's objects when the thread ends; a process that exits meanwhile aborts."""
    own, freed = threading.local(), []

    class Kept:
        def __del__(self) -> None:
            freed.append(sum(range(3_000_000)))  # takes its time

    def build() -> EngineParts:
        own.kept = Kept()
        raise FileNotFoundError("no such model")

    engine = Engine(build, lambda batch: None)
    with pytest.raises(FileNotFoundError):
        engine.start()
    assert len(freed) == 1
    assert not (TASKS / str(engine._thread.native_id)).exists()


def test_start_returns_the_model_of_the_built_parts() -> None:
    runner = HashRunner()
    budget = Budget(RowCost(1, 1), capacity_nbytes=1)
    engine = Engine(
        lambda: EngineParts(runner, DictCache(), budget, EngineLimits(1, 1, 1)), lambda batch: None
    )
    assert engine.start() is runner.info
    assert engine.model is runner.info
    engine.stop(timeout_s=WAIT_S)
