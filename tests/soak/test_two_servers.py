"""Two servers on one folder, one of them killed repeatedly: right answers, within one limit."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from firn.demo.facts import FactSession
from tests.soak.house import N_QUESTIONS, SMALL, House, ask, at_once, sessions

LIMIT_GIB = 0.002
N_SESSIONS = 24
N_KILLS = 8
N_BETWEEN = 60
"""Questions to the server that stays, between two kills of the other."""


def du(folder: Path) -> int:
    """Bytes on disk, including files being written; files that vanish meanwhile do not count."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(place, name)).st_blocks * 512
            except FileNotFoundError:
                continue
    return total


@contextmanager
def measured(folder: Path) -> Iterator[list[int]]:
    stop, samples = threading.Event(), []

    def measure() -> None:
        while not stop.wait(0.2):
            samples.append(du(folder))

    thread = threading.Thread(target=measure)
    thread.start()
    try:
        yield samples
    finally:
        stop.set()
        thread.join()


@pytest.mark.soak
def test_one_stays_and_one_is_killed(tmp_path: Path) -> None:
    talks = sessions(N_SESSIONS)
    flags = (*SMALL, "--ssd-cache-max-gb", str(LIMIT_GIB))
    with House(tmp_path) as house:
        stays = house.start(*flags)
        n_cached: list[int] = []
        n_other = 0

        def talk_to(url: str, number: int, n: int) -> None:
            with httpx.Client() as client:
                for i in range(7 * number, 7 * number + n):
                    talk, question = talks[i % N_SESSIONS], i // N_SESSIONS % N_QUESTIONS
                    answer = ask(url, talk, question, client=client)
                    assert answer.right, (url, i)
                    n_cached.append(answer.n_cached)

        with measured(house.folder) as samples:
            for kill in range(N_KILLS):
                dies = house.start(*flags)
                with ThreadPoolExecutor(1) as pool:
                    asked = pool.submit(until_it_dies, dies.url, kill, talks)
                    at_once(
                        2, lambda k, kill=kill: talk_to(stays.url, 3 * kill + k, N_BETWEEN // 2)
                    )
                    dies.kill()
                    n_other += asked.result()
            at_once(2, lambda k: talk_to(stays.url, k, 2 * N_SESSIONS))
        assert sum(n_cached) > 0
        assert n_other > 0
        print(
            f"{len(n_cached)} and {n_other} answers, {sum(n_cached)} tokens cached, {N_KILLS} kills"
        )
        limit = int(LIMIT_GIB * (1 << 30))
        # The files are not counted at the same moment.
        assert max(samples) <= limit * 1.1, (max(samples), limit)
        assert max(samples) > limit * 0.5, "it was never near its limit"
        stats = stays.get("/v1/cache/stats")
        assert stats["ssd"]["folder"]["quarantined"] == 0, "a kill tears no file that is found"
        assert stays.stop() == 0
        assert du(house.folder) <= limit


def until_it_dies(url: str, seed: int, talks: list[FactSession]) -> int:
    """Asks until the server dies. Returns the number of answers, all of which must be right."""
    for i in itertools.count(seed):
        try:
            assert ask(url, talks[i % N_SESSIONS], i // N_SESSIONS % N_QUESTIONS).right
        except httpx.HTTPError:
            return i - seed
    raise AssertionError
