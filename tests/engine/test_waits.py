"""The times that an admission reports, for the dashboard."""

from __future__ import annotations

import time

import pytest

from firn.core.events import Admitted
from tests.dict_cache import DictCache
from tests.hash_engine import HashEngine
from tests.hash_runner import prompt_of


@pytest.mark.parametrize("racing", [False, True])
def test_an_admission_says_when_it_was_looked_up_and_when_it_had_a_row(racing: bool) -> None:
    began = time.perf_counter()
    with HashEngine(chunk=8, cache=DictCache(racing=racing)) as lab:
        (admitted,) = lab.submit(prompt_of(3, 30), 2).wait().of(Admitted)
    waits = admitted.waits
    assert began <= waits.lookup_at <= waits.looked_up_at <= waits.row_at <= time.perf_counter()
    assert waits.loads is racing


def test_a_request_that_waits_for_a_row_says_so() -> None:
    with HashEngine(chunk=8, max_rows=1) as lab:
        first, second = (lab.submit(prompt_of(n, 20), 20) for n in (1, 2))
        (before,), (after,) = first.wait().of(Admitted), second.wait().of(Admitted)
    assert before.waits.row_at < after.waits.row_at
    assert after.waits.looked_up_at < after.waits.row_at
