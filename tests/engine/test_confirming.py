"""How often the device is asked whether the commits are sound: asking waits for the device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from firn.engine.recovery import CONFIRM_S, Recovery


class Lab:
    """A Recovery with a runner and a cache that record calls, and a clock that tests set."""

    def __init__(self) -> None:
        self.now = 0.0
        self.asked: list[float] = []
        self.confirmed: list[float] = []
        self.inflight: Any = SimpleNamespace(
            has_unconfirmed=False,
            sequences={},
            take_absorbed=lambda: None,
            runner=SimpleNamespace(confirm=lambda: self.asked.append(self.now)),
            cache=SimpleNamespace(confirm=lambda: self.confirmed.append(self.now)),
        )
        self.recovery = Recovery(
            self.inflight,
            on_device_fault=lambda: None,
            on_doubt=lambda: None,
            clock=lambda: self.now,
        )

    def step(self, at: float, *, in_flight: bool = True, commits: bool = False) -> None:
        self.now = at
        self.inflight.has_unconfirmed |= commits
        self.recovery.confirm(in_flight=in_flight)


def test_while_rows_decode_it_is_asked_now_and_then() -> None:
    """Every step commits something; waiting each time would leave a GPU idle."""
    lab = Lab()
    for i in range(1000):
        lab.step(0.02 * CONFIRM_S * i, commits=True)
    gaps = [b - a for a, b in zip(lab.asked, lab.asked[1:], strict=False)]
    assert len(lab.asked) > 10, "what is not confirmed is not written"
    assert min(gaps) >= CONFIRM_S - 1e-9
    assert lab.confirmed == lab.asked


def test_with_no_step_in_flight_it_is_asked_at_once() -> None:
    lab = Lab()
    lab.step(0.1, commits=True)
    assert not lab.asked
    lab.step(0.2, in_flight=False)
    assert lab.confirmed == [0.2]
    lab.step(0.3, in_flight=False)
    assert lab.asked == [0.2], "there was nothing to confirm"


def test_what_was_committed_last_is_not_forgotten() -> None:
    lab = Lab()
    lab.step(CONFIRM_S, commits=True)
    lab.step(CONFIRM_S + 0.1, commits=True)
    lab.step(2 * CONFIRM_S)
    assert lab.confirmed == [CONFIRM_S, 2 * CONFIRM_S]
