"""What loading and computing cost, as learned while it happens."""

from __future__ import annotations

import pytest

from firn.cache.estimates import (
    FIRST_LOAD_NBYTES_PER_S,
    LOAD_OVERHEAD_S,
    STALE_S,
    Estimates,
)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def attend(known: Estimates, *starts: int, times: int = 50) -> None:
    """Chunks of 256 on a machine that takes 1 ms a token and 1 us more for each one before it."""
    for _ in range(times):
        for start in starts:
            known.saw_prefill(start, start + 256, 256 * (1e-3 + 1e-6 * (start + 128)))


def test_deep_tokens_cost_what_deep_tokens_cost() -> None:
    known = Estimates()
    attend(known, *range(0, 65_536, 1024))
    for start, end in ((0, 1024), (60_000, 61_000), (0, 60_000), (30_000, 50_000)):
        really = (end - start) * (1e-3 + 1e-6 * (start + end) / 2)
        assert known.prefill_s(start, end) == pytest.approx(really, rel=0.1)
    parts = known.prefill_s(0, 30_000) + known.prefill_s(30_000, 60_000)
    assert known.prefill_s(0, 60_000) == pytest.approx(parts, rel=0.05)


def test_what_was_never_seen_is_the_line_drawn_on() -> None:
    known = Estimates()
    attend(known, 0, 2048, 4096)
    assert known.seconds_per_token(32_768) == pytest.approx(1e-3 + 32.768e-3, rel=0.1)
    one = Estimates()
    attend(one, 2048)
    assert one.seconds_per_token(0) == one.seconds_per_token(100_000)


def test_noise_never_makes_depth_cheaper_nor_dearer_than_it_can_be() -> None:
    known = Estimates()
    known.saw_prefill(0, 256, 1.0)
    known.saw_prefill(256, 512, 0.5)
    assert known.seconds_per_token(10_000) == known.seconds_per_token(1000)
    known = Estimates()
    known.saw_prefill(0, 256, 0.001)
    known.saw_prefill(256, 512, 1.0)
    assert known.seconds_per_token(3840) <= 10 * known.seconds_per_token(384) + 1e-9


def test_the_end_of_a_chunk_is_no_measure() -> None:
    known = Estimates()
    known.saw_prefill(0, 256, 0.256)
    known.saw_prefill(256, 258, 1.0)
    assert known.prefill_s(256, 512) == pytest.approx(0.256)


def test_a_chunk_that_compiled_its_kernels_is_soon_forgotten() -> None:
    known = Estimates()
    known.saw_prefill(0, 2048, 3.0)
    known.saw_prefill(0, 2048, 0.06)
    assert known.prefill_s(0, 2048) == pytest.approx(0.06)
    known.saw_prefill(0, 2048, 0.06)
    known.saw_prefill(0, 2048, 1.5)
    assert known.prefill_s(0, 2048) == pytest.approx(0.06), "one that met with other work"


def gpu_chunk_s(n_tokens: int) -> float:
    """So a GPU computes: most of a short chunk's time goes whatever its length."""
    return 0.05 + n_tokens * 30e-6


def test_a_short_chunk_costs_more_than_its_share_and_says_nothing_of_long_ones() -> None:
    known = Estimates()
    for n in (2048, 64, 2048, 256, 512, 2048):
        known.saw_prefill(8192, 8192 + n, gpu_chunk_s(n))
    for n in (64, 256, 1000, 2048):
        assert known.prefill_s(8192, 8192 + n) == pytest.approx(gpu_chunk_s(n), rel=0.01)
    both = gpu_chunk_s(2048) + gpu_chunk_s(256)
    assert known.prefill_s(8192, 8192 + 2304) == pytest.approx(both, rel=0.01)


def test_short_chunks_are_the_measure_until_a_whole_one_comes() -> None:
    known = Estimates()
    known.saw_prefill(0, 64, gpu_chunk_s(64))
    assert known.prefill_s(0, 64) == pytest.approx(gpu_chunk_s(64))
    known.saw_prefill(64, 64 + 2048, gpu_chunk_s(2048))
    assert known.prefill_s(0, 2048) == pytest.approx(gpu_chunk_s(2048))


def test_filling_a_row_is_a_part_of_loading() -> None:
    known = Estimates()
    known.saw_load(10**9, LOAD_OVERHEAD_S + 1.0)
    known.saw_fill(10**9, 0.5)
    assert known.load_s(10**9) == pytest.approx(LOAD_OVERHEAD_S + 1.5)
    known.saw_load(10**9, LOAD_OVERHEAD_S + 1.0)
    assert known.load_error == 0.0, "of the reading alone"


def test_a_load_that_was_never_tried_is_hoped_to_be_fast() -> None:
    known = Estimates()
    assert known.load_s(0) == 0.0
    assert known.load_s(10**9) == pytest.approx(LOAD_OVERHEAD_S + 1e9 / FIRST_LOAD_NBYTES_PER_S)


def test_the_first_load_is_believed_and_the_others_weighed() -> None:
    known = Estimates()
    known.saw_load(10**8, LOAD_OVERHEAD_S + 1.0)
    assert known.load_s(10**8) == pytest.approx(LOAD_OVERHEAD_S + 1.0)
    assert known.load_error == 0.0, "hope is no prediction"
    known.saw_load(10**8, LOAD_OVERHEAD_S + 0.5)
    assert 0.5 < known.load_s(10**8) - LOAD_OVERHEAD_S < 1.0
    assert known.load_error == pytest.approx(1.0, rel=0.01)
    for _ in range(40):
        known.saw_load(10**8, LOAD_OVERHEAD_S + 0.5)
    assert known.load_s(10**8) == pytest.approx(LOAD_OVERHEAD_S + 0.5, rel=0.01)
    assert known.load_error < 0.2


def test_a_slow_disk_is_given_another_chance() -> None:
    clock = Clock()
    known = Estimates(clock)
    known.saw_load(10**8, 10.0)
    slow = known.load_s(10**8)
    clock.now += STALE_S
    assert known.load_s(10**8) == slow
    clock.now += 1
    assert known.load_s(10**8) < slow / 50
    known.saw_load(10**8, 5.0)
    assert known.load_s(10**8) == pytest.approx(5.0, rel=0.01)


def test_what_is_known_is_shown() -> None:
    known = Estimates()
    known.saw_prefill(0, 1000, 0.5)
    known.saw_load(10**8, LOAD_OVERHEAD_S + 0.1)
    assert known.view() == {
        "prefill_tokens_per_s": {"500": 2000},
        "short_chunk_s": 0.0,
        "load_bytes_per_s": 10**9,
        "loads": 1,
        "load_error": 0.0,
    }
