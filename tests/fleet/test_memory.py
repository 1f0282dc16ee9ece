"""The memory a model needs: estimated from its files first, then from its process's reports."""

from __future__ import annotations

from pathlib import Path

from firn.fleet.memory import (
    CONVERSATION_TOKENS,
    LIVE_FLOOR_NBYTES,
    Footprint,
    estimate,
    measured,
)

WEIGHTS = 5 << 30


def report(*, live_peak: int, weights: int = WEIGHTS, per_token: int = 1000) -> dict[str, int]:
    return {
        "weights": weights,
        "live_peak": live_peak,
        "bytes_per_row": 0,
        "bytes_per_token": per_token,
    }


def test_before_a_load_the_weights_files_give_the_estimate(tmp_path: Path) -> None:
    for i in range(2):
        (tmp_path / f"model-{i}.safetensors").write_bytes(bytes(1000))
    (tmp_path / "README.md").write_bytes(bytes(5000))
    (tmp_path / "model-2.safetensors").symlink_to(tmp_path / "a download that was broken off")
    assert estimate(tmp_path) == Footprint(2000)
    assert estimate(None) == Footprint(0)


def test_the_peak_of_live_requests_is_remembered() -> None:
    busy = measured(report(live_peak=1 << 30), Footprint(WEIGHTS))
    assert busy.live_nbytes == 1 << 30
    quiet = measured(report(live_peak=1 << 20), busy)
    assert quiet.live_nbytes == 1 << 30
    other = measured(report(live_peak=1 << 20, weights=WEIGHTS // 2), busy)
    assert other.live_nbytes == CONVERSATION_TOKENS * 1000, "these are other weights"


def test_a_footprint_has_room_for_one_conversation() -> None:
    footprint = measured(report(live_peak=0, per_token=100_000), Footprint(WEIGHTS, live_nbytes=0))
    assert footprint.live_nbytes == CONVERSATION_TOKENS * 100_000 > LIVE_FLOOR_NBYTES
