"""Durations in every form that clients send."""

from __future__ import annotations

import math

import pytest

from firn.core.units import FOREVER, seconds


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (90, 90.0),
        (0, 0.0),
        (1.5, 1.5),
        ("90", 90.0),
        ("1h30m", 5400.0),
        ("0", 0.0),
        ("2.5s", 2.5),
        (1e300, FOREVER),
        ("250ms", 0.25),
        (-1, FOREVER),
        ("-1m", FOREVER),
        (10**400, FOREVER),
        (-(10**400), FOREVER),
        (math.inf, FOREVER),
        ("9" * 400, FOREVER),
    ],
)
def test_seconds(value: object, expected: float) -> None:
    assert seconds(value) == expected


@pytest.mark.parametrize(
    "value", [True, None, [], "", "soon", "1x", "m", "5 m", "m5", "1h1", math.nan]
)
def test_what_is_no_time(value: object) -> None:
    with pytest.raises(ValueError, match="30m"):
        seconds(value)


@pytest.mark.parametrize("text", ["1" * 1_000_000 + "x", "1s" * 500_000 + "x", "1." * 500_000])
def test_a_long_text_that_is_no_duration_takes_linear_time(text: str) -> None:
    """Searched for units from each digit on, it would take half an hour."""
    with pytest.raises(ValueError, match="must be a number of seconds"):
        seconds(text)
