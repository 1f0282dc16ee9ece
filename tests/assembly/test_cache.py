"""What a stopping server logs about the records that it still has to write."""

from __future__ import annotations

import logging

import pytest

from firn.assembly.cache import FlushProgress


def test_a_stopping_server_says_once_a_second_what_is_left(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 0.0
    progress = FlushProgress(lambda: now)
    with caplog.at_level(logging.INFO):
        for n_left in range(24, -1, -1):
            progress(n_left, n_left << 20)
            now += 0.125
    said = [record.getMessage() for record in caplog.records]
    assert [line.split(": ")[1] for line in said] == [f"{n} left, {n} MiB" for n in (24, 16, 8, 0)]
