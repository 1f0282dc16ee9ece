"""A disk that damages what it stores, below a real server: loads fail, but no answer is wrong."""

from __future__ import annotations

import itertools
from pathlib import Path

import httpx
import pytest

from firn.demo.server import ServerProcess
from tests.soak.house import (
    N_QUESTIONS,
    SMALL,
    FactSession,
    House,
    Saboteur,
    always_healthy,
    ask,
    at_once,
    held_by,
    let_go_of_everything,
    sessions,
)

N_FAULTED = 300
"""For each model."""
N_CLIENTS = 3
N_SESSIONS = 24


def n_faulted(server: ServerProcess) -> int:
    return sum(server.get("/v1/cache/stats")["faults"].values())


def n_stored(server: ServerProcess, talk: FactSession, n: int) -> int:
    """Tokens of a prompt that are stored, including those that are only faster to compute."""
    body = {"messages": talk.messages(n), "max_tokens": 64}
    seen = httpx.post(f"{server.url}/v1/cache/probe", json=body).json()
    return int(
        seen["shared_tokens"] if seen["reason"] == "slower to load" else seen["cached_tokens"]
    )


@pytest.mark.soak
@pytest.mark.parametrize("model", ["firn-demo", "firn-demo-hybrid"])
def test_loads_fail_and_no_answer_does(tmp_path: Path, model: str) -> None:
    talks = sessions(N_SESSIONS)
    with House(tmp_path) as house:
        server = house.start(*SMALL, "--ssd-cache-max-gb", "0.05", model=model)
        assert all(ask(server.url, talk, 0).right for talk in talks)
        before = held_by(server)

        def client(number: int) -> list[tuple[int, int]]:
            """The questions that were answered wrongly."""
            wrong = []
            with httpx.Client() as connection:
                for i in itertools.count(7 * number):
                    talk, n = i % N_SESSIONS, i // N_SESSIONS % N_QUESTIONS
                    if not ask(server.url, talks[talk], n, client=connection).right:
                        wrong.append((talk, n))
                    if i % 50 == 0 and n_faulted(server) >= N_FAULTED:
                        return wrong
            return wrong

        saboteur = Saboteur(house, seed=1, pause_s=0.002)
        with always_healthy(server), saboteur.at_work():
            wrong = at_once(N_CLIENTS, client)
        assert wrong == [[]] * N_CLIENTS
        assert saboteur.n_done > N_FAULTED / 10
        # The disk is good again: what is written from now on is found.
        for n in range(2):
            answers = [ask(server.url, talk, n) for talk in talks]
            assert all(a.right for a in answers)
        stored = [n_stored(server, talk, 1) for talk in talks]
        assert sum(stored) > 0.9 * sum(a.n_prompt for a in answers)
        assert sum(a.n_cached for a in answers)
        let_go_of_everything(server)
        after = held_by(server)
        print(f"{n_faulted(server)} faulted loads, {saboteur.n_done} damages; {before}, {after}")
        assert after.n_files <= before.n_files + 2
        assert after.rss_mib < before.rss_mib * 1.1 + 24
        assert server.stop() == 0
    assert "Traceback" not in house.log()
