"""What is told of measurements."""

from __future__ import annotations

from firn.core.measure import writing_speed


def test_a_reply_of_one_piece_has_no_speed() -> None:
    assert writing_speed(11, 1.0) == 10
    assert writing_speed(1, 1.0) is None
    assert writing_speed(18, 1e-6) is None
    assert writing_speed(18, -0.1) is None, "clocks"
