"""Rank 0 while it waits for the others: what strangers may do to it."""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any

import pytest

from firn import __version__
from firn.ranks import joining, wire
from firn.ranks.calls import RankCall
from firn.ranks.wire import RankLink, encode

SECRET = "5ec7e7" * 5


class Stranger:
    """A socket that brings a beginning, then zeros without end, so many bytes every four seconds."""

    def __init__(self, beginning: bytes, *, step: int) -> None:
        self._left = beginning
        self._step = step
        self.now = 0.0
        self.n_received = 0
        self.timeout: float | None = None

    def settimeout(self, timeout: float | None) -> None:
        self.timeout = timeout

    def setsockopt(self, *args: int) -> None: ...

    def recv(self, bufsize: int) -> bytes:
        assert self.timeout is not None
        if self.timeout < 4.0:
            self.now += self.timeout
            raise TimeoutError
        self.now += 4.0
        n = min(bufsize, self._step)
        data, self._left = self._left[:n].ljust(n, b"\0"), self._left[n:]
        self.n_received += n
        return data


def greeted(stranger: Stranger, monkeypatch: pytest.MonkeyPatch) -> int | None:
    monkeypatch.setattr(wire, "time", SimpleNamespace(monotonic=lambda: stranger.now))
    sock: Any = stranger
    return joining._greeted(RankLink(sock), SECRET)


def test_a_rank_that_shows_the_secret_is_greeted(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Stranger(encode(RankCall("hello", (65_535, SECRET, __version__))), step=1 << 16)
    assert greeted(rank, monkeypatch) == 65_535
    assert rank.timeout is None, "from now on it may be silent"


def test_a_stranger_cannot_announce_more_than_a_greeting(monkeypatch: pytest.MonkeyPatch) -> None:
    stranger = Stranger(struct.pack("<II", 8 << 20, 0), step=1 << 30)
    assert greeted(stranger, monkeypatch) is None
    assert stranger.n_received <= 1 << 16


@pytest.mark.parametrize(
    "beginning",
    [encode(RankCall("hello", (1, "guessed", "1"))), 100 * encode(RankCall("alive"))],
    ids=["byte by byte", "heartbeats"],
)
def test_a_strangers_greeting_has_its_time(
    monkeypatch: pytest.MonkeyPatch, beginning: bytes
) -> None:
    stranger = Stranger(beginning, step=1)
    assert greeted(stranger, monkeypatch) is None
    assert stranger.now == joining.GREET_S


@pytest.mark.parametrize("secret", ["é", "\ud800", None, [SECRET], ""], ids=repr)
def test_whatever_a_stranger_shows_for_the_secret_it_is_not_greeted(
    monkeypatch: pytest.MonkeyPatch, secret: object
) -> None:
    stranger = Stranger(encode(RankCall("hello", (1, secret, __version__))), step=1 << 16)
    assert greeted(stranger, monkeypatch) is None
