"""What every runner owes the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from firn.core import ports
from firn.core.values import Job, Prompt, RequestId, Sampling
from tests.contracts.stands import (
    RUNNERS,
    assert_fits,
    job_of,
    prompt_of,
    read,
    reply,
    started,
    step,
)
from tests.dict_cache import DictPrefix


@pytest.mark.parametrize("kind", RUNNERS)
def test_runners_rows_and_picks_have_the_ports_shape(kind: str) -> None:
    runner = RUNNERS[kind]()
    assert_fits(ports.Runner, runner)
    row = started(runner, prompt_of(5))
    assert_fits(ports.LiveRow, row)
    (picked,) = step(runner)
    assert_fits(ports.TakenTokens, picked)


every_runner = pytest.mark.parametrize("kind", RUNNERS)


@every_runner
def test_a_row_counts_what_it_has_consumed(kind: str) -> None:
    runner, prompt = RUNNERS[kind](), prompt_of(11)
    row = runner.start(None)
    assert row.n_tokens == 0
    runner.prefill(row, prompt, 4)
    runner.finish_chunk(row)
    assert row.n_tokens == 4
    read(runner, row, prompt)
    assert row.n_tokens == 10
    (row,) = runner.choices(row, job_of(prompt), [0])
    runner.join(row, int(prompt.ids[-1]))
    assert step(runner, keep_in_flight=1) == []
    assert row.n_tokens == 11, "the step in flight counts"
    assert len(step(runner, keep_in_flight=1)) == 1
    assert len(step(runner)) == 2
    assert row.n_tokens == 13


@every_runner
def test_a_joined_row_is_in_one_group(kind: str) -> None:
    runner = RUNNERS[kind]()
    assert runner.groups() == []
    rows = [started(runner, prompt_of(5 + i, salt=i)) for i in range(4)]
    found = [row for group in runner.groups() for row in group]
    assert sorted(map(id, found)) == sorted(map(id, rows))
    for group in runner.groups():
        assert [row.view().at.index for row in group] == list(range(len(group)))
    assert {id(p.row) for p in step(runner)} == set(map(id, rows))


@every_runner
def test_rows_that_leave_do_not_change_the_others(kind: str) -> None:
    want = reply(alone := RUNNERS[kind](), started(alone, prompt_of(20)), 12)
    runner = RUNNERS[kind]()
    others = [started(runner, prompt_of(5 + i, salt=i)) for i in range(2)]
    row = started(runner, prompt_of(20))
    said = reply(runner, row, 4)
    runner.leave(others[:1])
    said += reply(runner, row, 4)
    runner.leave(others[1:])
    said += reply(runner, row, 4)
    assert said == want
    runner.leave([row])
    assert runner.groups() == []


@every_runner
def test_a_row_may_leave_wherever_it_is(kind: str) -> None:
    runner = RUNNERS[kind]()
    unread = runner.start(None)
    half = runner.start(None)
    runner.prefill(half, prompt_of(9), 5)
    runner.leave([unread, half])
    row = started(runner, prompt_of(5))
    step(runner, keep_in_flight=1)  # one step is in flight
    runner.leave([row])
    assert runner.groups() == []


@every_runner
def test_choices_have_the_same_past(kind: str) -> None:
    runner, prompt = RUNNERS[kind](), prompt_of(14)
    row = runner.start(None)
    read(runner, row, prompt)
    rows = runner.choices(row, job_of(prompt, n=3), [0, 1, 2])
    assert len(rows) == 3
    assert len(set(map(id, rows))) == 3
    assert [r.n_tokens for r in rows] == [13] * 3
    for r in rows:
        runner.join(r, int(prompt.ids[-1]))
    said: dict[int, list[int]] = {id(r): [] for r in rows}
    for _ in range(6):
        for picked in step(runner):
            said[id(picked.row)] += picked.tokens
    first = said[id(rows[0])]
    assert len(first) == 6
    assert all(tokens == first for tokens in said.values())


@every_runner
def test_a_restored_row_starts_where_it_was_filled_to(kind: str) -> None:
    runner = RUNNERS[kind]()
    filled: list[list[Any]] = []
    row = runner.start(DictPrefix(7, filled.append))
    assert row.n_tokens == 7
    assert len(filled) == 1
    assert len(filled[0]) == len(runner.start(None).view().layers)


@every_runner
def test_a_forced_token_is_taken_for_picked(kind: str) -> None:
    prompt = prompt_of(9)
    runner = RUNNERS[kind]()
    row = started(runner, prompt)
    runner.force(row, [33, 44], at=len(prompt) + 2)
    said = reply(runner, row, 6)
    assert said[2:4] == [33, 44]
    again = RUNNERS[kind]()
    longer = Prompt(np.concatenate([prompt.ids, np.array(said[:4], dtype=np.int64)]))
    assert reply(again, started(again, longer), 2) == said[4:]


def resumed(runner: Any, prompt: Prompt, reply: Sequence[int], *, alone: bool, job: Job) -> Any:
    """A row that has read a prompt and a part of its reply again, and continues from there."""
    grown = prompt.grown(reply)
    row = runner.start(None)
    read(runner, row, grown)
    (row,) = runner.choices(row, job, [0])
    runner.resume(row, reply, alone=alone)
    runner.join(row, int(grown.ids[-1]))
    return row


@every_runner
def test_a_row_that_resumes_alone_has_a_group_of_its_own(kind: str) -> None:
    """It joins no group, and no later row joins its group."""
    runner, prompt = RUNNERS[kind](), prompt_of(9)
    started(runner, prompt_of(5, salt=1))
    row = resumed(runner, prompt, [17], alone=True, job=job_of(prompt))
    started(runner, prompt_of(5, salt=2))
    assert [row] in runner.groups()
    assert reply(runner, row, 3) == reply_behind(kind, prompt, [17], 3)


@every_runner
def test_a_row_that_resumes_in_company_may_share_a_group(kind: str) -> None:
    runner, prompt = RUNNERS[kind](), prompt_of(9)
    first = started(runner, prompt_of(5, salt=1))
    row = resumed(runner, prompt, [17], alone=False, job=job_of(prompt))
    if kind == "row by row":
        assert runner.groups() == [[first], [row]]
    else:
        assert runner.groups() == [[first, row]]


def reply_behind(kind: str, prompt: Prompt, begun: Sequence[int], n: int) -> list[int]:
    runner = RUNNERS[kind]()
    return reply(runner, started(runner, prompt.grown(begun)), n)


@every_runner
def test_a_resumed_row_samples_as_if_nothing_had_happened(kind: str) -> None:
    prompt = prompt_of(9)
    sampling = Sampling(temperature=1.0, seed=5, frequency_penalty=1.5)
    job = Job(RequestId("job"), prompt, 12, sampling=sampling)
    runner = RUNNERS[kind]()
    row = runner.start(None)
    read(runner, row, prompt)
    (row,) = runner.choices(row, job, [0])
    runner.join(row, int(prompt.ids[-1]))
    said = reply(runner, row, 10)
    for alone in (True, False):
        again = RUNNERS[kind]()
        assert reply(again, resumed(again, prompt, said[:4], alone=alone, job=job), 6) == said[4:]
