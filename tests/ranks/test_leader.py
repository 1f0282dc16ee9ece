"""Rank 0's end of the connections, after a rank is lost and until the process exits."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from firn.ranks.calls import RankCall, RankLost
from firn.ranks.leader import Leader
from firn.ranks.wire import RankLink
from tests.waiting import wait_until


@pytest.fixture
def bereft(monkeypatch: pytest.MonkeyPatch) -> Iterator[Leader]:
    """A leader whose only follower is gone, in a process that does not exit."""
    monkeypatch.setattr(Leader, "_leave", lambda self: None)
    with socket.create_server(("127.0.0.1", 0)) as server:
        far = socket.create_connection(server.getsockname())
        link = RankLink(server.accept()[0])
    leader = Leader({1: link})
    far.close()
    wait_until(lambda: leader.is_lost)
    yield leader
    link.close()


def tell(leader: Leader) -> None:
    leader.tell("launch", 7)


def tell_much_later(leader: Leader) -> None:
    leader.tell_later("drop", list(range(1 << 15)))


def flush(leader: Leader) -> None:
    leader.tell_later("drop", [1])
    leader.flush()


@pytest.mark.parametrize("call", [tell, tell_much_later, flush])
def test_no_call_after_a_loss_can_pass_for_the_fault_of_one_request(
    bereft: Leader, call: Callable[[Leader], None]
) -> None:
    with pytest.raises(RankLost):
        call(bereft)


def test_answers_that_lead_to_calls_after_a_loss_are_not_reported_as_a_bug(
    bereft: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[Any] = []
    called_on: list[threading.Thread] = []
    monkeypatch.setattr(threading, "excepthook", reported.append)

    def written(rank: int, call: RankCall) -> None:
        called_on.append(threading.current_thread())
        bereft.tell("delete", [])

    bereft.on_answer("written", written)
    bereft._answers.put((1, RankCall("written")))
    wait_until(lambda: called_on and not called_on[0].is_alive())
    assert not reported
