"""A device that reports faults one step late: nothing that it spoiled becomes a record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from firn.core.errors import EngineDead, StepFailed
from firn.core.ports import LiveRow, Restored
from firn.core.values import Sampling
from firn.engine import recovery
from firn.engine.recovery import ABSORBED_EVERY_S, MAX_DEVICE_FAULTS
from tests.dict_cache import DictCache, DictCursor
from tests.hash_engine import HashEngine, Outcome
from tests.hash_runner import GARBAGE, Faults, HashLayer, HashRow, prompt_of

WARM = Sampling(temperature=1.0, seed=5)


class LateDevice:
    """Spoils the work of some calls silently, and raises when it is next used."""

    def __init__(self, *, chunks: Sequence[int] = (), steps: Sequence[int] = ()) -> None:
        self.chunks, self.steps = set(chunks), set(steps)
        self.n_chunks = self.n_steps = 0
        self.parked = False
        self.n_told = 0

    def faults(self) -> Faults:
        return Faults(prefill=self.prefill, launch=self.launch, confirm=self.tell)

    def silent_faults(self) -> Faults:
        """The engine's own steps do not raise; whatever else uses the device does."""

        def restores(restored: Restored | None) -> None:
            if restored is not None:
                self.tell()

        return Faults(prefill=self.spoil_chunk, launch=self.spoil_step, start=restores)

    def tell(self) -> None:
        if self.parked:
            self.parked = False
            self.n_told += 1
            raise RuntimeError("Command buffer execution failed: Insufficient Memory")

    def prefill(self, row: HashRow, chunk: Sequence[int]) -> None:
        self.tell()
        self.spoil_chunk(row, chunk)

    def launch(self, rows: Sequence[HashRow]) -> None:
        self.tell()
        self.spoil_step(rows)

    def spoil_chunk(self, row: HashRow, chunk: Sequence[int]) -> None:
        self.n_chunks += 1
        if self.n_chunks in self.chunks:
            chunk[0] = GARBAGE  # type: ignore[index]
            self.parked = True

    def spoil_step(self, rows: Sequence[HashRow]) -> None:
        self.n_steps += 1
        if self.n_steps in self.steps:
            for row in rows:
                row.next = GARBAGE
            self.parked = True


def check_records(cache: DictCache) -> None:
    for (_, tokens), state in cache.store.items():
        assert list(tokens) == state, "a record holds what a failed command left"


def say(lab: HashEngine, n: int, n_reply: int = 60) -> list[Outcome]:
    gate = lab.hold()
    outcomes = [lab.submit(prompt_of(i, 30), n_reply, sampling=WARM) for i in range(n)]
    gate.set()
    for outcome in outcomes:
        outcome.wait()
    return outcomes


@pytest.mark.parametrize("chunk", [1, 2, 3, 5])
def test_a_spoiled_chunk_is_computed_again_without_a_trace(chunk: int) -> None:
    device, cache = LateDevice(chunks=[chunk]), DictCache()
    with HashEngine(device.faults(), cache=cache, chunk=8) as lab:
        for outcome in say(lab, 4):
            outcome.check()
        assert lab.leftovers() == {}
    assert device.n_told == 1
    assert cache.n_doubted >= 1
    check_records(cache)


@pytest.mark.parametrize("step", [1, 7, 8, 20, 33, 59])
def test_a_spoiled_decode_step_leaves_no_record(step: int) -> None:
    """Its token may have been sent, but nothing may be stored from it."""
    device, cache = LateDevice(steps=[step]), DictCache()
    with HashEngine(device.faults(), cache=cache, chunk=8) as lab:
        outcomes = say(lab, 3)
        assert all(outcome.error is None for outcome in outcomes)
        assert all(len(outcome.tokens()) == 60 for outcome in outcomes)
        check_records(cache)
        for i in range(3):  # and replies resumed from the records are right
            lab.submit(prompt_of(i, 30), 20, sampling=WARM).wait().check()
        assert lab.leftovers() == {}
    check_records(cache)


@pytest.mark.parametrize("step", [1, 2, 7, 8, 21])
def test_a_fault_in_one_group_puts_the_other_replies_of_its_request_in_doubt(step: int) -> None:
    """Groups of one row, as for models that cannot batch: the fault of one reply's step is raised
    in the other's."""
    device, cache = LateDevice(steps=[step]), DictCache()
    with HashEngine(device.faults(), cache=cache, chunk=8, group_rows=1) as lab:
        outcome = lab.submit(prompt_of(1, 30), 60, n=2, sampling=WARM).wait()
        assert outcome.error is None
        assert device.n_told == 1
        assert lab.leftovers() == {}
    check_records(cache)


def test_a_row_that_ends_with_a_spoiled_step_stores_nothing_of_it() -> None:
    device, cache = LateDevice(steps=[8]), DictCache()
    with HashEngine(device.faults(), cache=cache) as lab:
        lab.submit(prompt_of(1, 30), 8).wait()
        lab.between_steps()
        assert device.n_told == 1
    check_records(cache)


def test_prompt_logprobs_are_never_sent_twice_the_request_fails() -> None:
    device = LateDevice(chunks=[2])
    with HashEngine(device.faults(), cache=DictCache(), chunk=8) as lab:
        outcome = lab.submit(prompt_of(1, 40), 4, scored=0).wait()
        assert isinstance(outcome.error, StepFailed)
        assert lab.leftovers() == {}


def test_a_device_that_goes_on_failing_ends_the_process() -> None:
    device = LateDevice(chunks=range(1, 1000))
    with HashEngine(device.faults(), cache=DictCache(), chunk=8) as lab:
        outcomes = say(lab, 3)
        assert lab.died.wait(60), "for a supervisor to start it anew"
        assert device.n_told >= MAX_DEVICE_FAULTS
        for outcome in outcomes:
            assert isinstance(outcome.error, EngineDead)


def test_faults_of_long_ago_do_not_end_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "DEVICE_FAULTS_S", 0.0)
    n_faults, n_chunks = MAX_DEVICE_FAULTS + 1, 4
    device = LateDevice(chunks=range(1, 1000, 1 + n_chunks))  # the first of each prompt
    with HashEngine(device.faults(), chunk=8) as lab:
        for i in range(n_faults):
            lab.submit(prompt_of(i, 8 * n_chunks + 1), 2).wait().check()
        assert device.n_told == n_faults
        assert not lab.died.is_set()


def test_a_request_that_meets_anothers_fault_is_not_given_up() -> None:
    """The error of one request's work is raised in the work of the next."""
    met: list[int] = []

    def prefill(row: HashRow, chunk: Sequence[int]) -> None:
        if not met and row.n_tokens == 0 and chunk[0] == prompt_of(2, 30)[0]:
            met.append(1)
            raise RuntimeError("of another's command")

    with HashEngine(Faults(prefill=prefill), cache=DictCache(), chunk=8) as lab:
        for outcome in say(lab, 4):
            outcome.check()
        assert met
        assert lab.leftovers() == {}


# --- faults that somebody else absorbs -----------------------------------------------------


class TellingCursor(DictCursor):
    """Its commit is the next use of the device and absorbs the fault, as a `PrefixCursor`'s does."""

    cache: TellsWhereItCommits

    def commit(self, row: LiveRow) -> None:
        try:
            self.cache.device.tell()
        except RuntimeError as e:
            self.cache.fault = e
        else:
            super().commit(row)


class TellsWhereItCommits(DictCache):
    cursor = TellingCursor

    def __init__(self, device: LateDevice) -> None:
        super().__init__()
        self.device = device


@pytest.mark.parametrize("chunk", [1, 2, 4])
def test_a_fault_that_the_cache_absorbs_spoils_no_reply(chunk: int) -> None:
    device = LateDevice(chunks=[chunk])
    cache = TellsWhereItCommits(device)
    with HashEngine(device.silent_faults(), cache=cache, chunk=8) as lab:
        for outcome in say(lab, 4):
            outcome.check()
        assert lab.leftovers() == {}
    assert device.n_told == 1
    assert cache.n_doubted == 1
    check_records(cache)


@pytest.mark.parametrize("where", ["restore", "call"])
@pytest.mark.parametrize("step", [3, 12, 30])
def test_a_fault_that_a_restore_or_a_caller_meets_puts_the_rows_of_others_in_doubt(
    where: str, step: int
) -> None:
    device, cache = LateDevice(), DictCache()
    faults = device.silent_faults()
    others: list[Outcome] = []

    def launch(rows: Sequence[HashRow]) -> None:
        device.spoil_step(rows)
        if device.parked and where == "restore":
            others.append(lab.submit(prompt_of(1, 30), 8))
        elif device.parked:
            lab.engine.call(lambda _: device.tell())

    with HashEngine(replace(faults, launch=launch), cache=cache, chunk=8) as lab:
        lab.submit(prompt_of(1, 30), 8).wait().check()
        device.steps = {device.n_steps + step}
        spoiled = lab.submit(prompt_of(2, 30), 60, sampling=WARM).wait()
        assert spoiled.error is None
        for other in others:
            other.wait().check()
        assert device.n_told == 1
        assert cache.n_doubted == 1
        assert lab.leftovers() == {}
    check_records(cache)


def test_a_record_that_always_fails_is_taken_for_the_devices_fault_once() -> None:
    """Every request for it is still answered, and the others are not preempted every time."""

    class Bad(DictCache):
        def fill(self, state: list[int], layers: list[HashLayer]) -> None:
            raise RuntimeError("a damaged record")

    cache = Bad()
    with HashEngine(cache=cache, chunk=8) as lab:
        for _ in range(5):
            lab.submit(prompt_of(1, 30), 8).wait().check()
        now = lab.engine._loop._recovery._absorbed_at + ABSORBED_EVERY_S
        lab.engine._loop._recovery._clock = lambda: now
        assert cache.n_doubted == 1
        lab.submit(prompt_of(1, 30), 8).wait().check()
        assert cache.n_doubted == 2
        assert lab.leftovers() == {}


def test_a_reply_whose_token_is_a_fault_is_not_stored() -> None:
    cache, prompt = DictCache(), prompt_of(1, 20)
    with HashEngine(cache=cache, chunk=8) as lab:
        runner: Any = lab.runner
        collect = runner.collect

        def faulty(rows: Sequence[HashRow], **more: Any) -> list[Any]:
            return [replace(p, fault=StepFailed("bad")) for p in collect(rows, **more)]

        runner.collect = faulty
        assert isinstance(lab.submit(prompt, 5).wait().error, StepFailed)
        assert lab.leftovers() == {}
    assert max(len(tokens) for _, tokens in cache.store) == len(prompt) - 1


def test_a_reply_that_ends_beside_a_fault_of_its_request_ends_once() -> None:
    """Two choices of a request: one has its last token in the step in which the other fails."""
    with HashEngine(cache=DictCache(), chunk=8) as lab:
        runner: Any = lab.runner
        collect = runner.collect

        n_picked: Counter[HashRow] = Counter()

        def faulty(rows: Sequence[HashRow], **more: Any) -> list[Any]:
            picked = collect(rows, **more)
            n_picked.update(p.row for p in picked)
            is_over = bool(picked) and n_picked[picked[-1].row] == 3
            return (
                [*picked[:-1], replace(picked[-1], fault=StepFailed("bad"))] if is_over else picked
            )

        runner.collect = faulty
        failed = lab.submit(prompt_of(1, 20), 3, n=2)
        assert isinstance(failed.wait().error, StepFailed)
        runner.collect = collect
        lab.submit(prompt_of(2, 20), 3).wait().check()
        assert failed.n_ends == 1
        assert lab.leftovers() == {}
