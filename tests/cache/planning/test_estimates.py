"""What loading and computing cost, as measured while they happen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from firn.cache.planning import estimates_file
from firn.cache.planning.estimates import (
    FIRST_LATENCY_S,
    FIRST_SECONDS_PER_BYTE,
    N_KEPT,
    STALE_S,
    Estimates,
)
from tests.clocks import SetClock

MB = 10**6


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def attend(known: Estimates, *starts: int, times: int = 50) -> None:
    """Chunks of 256 on a machine that takes 1 ms a token and 1 us more for each one before it."""
    for _ in range(times):
        for start in starts:
            known.prefill.observe(start, start + 256, 256 * (1e-3 + 1e-6 * (start + 128)))


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
    assert known.prefill.seconds_per_token(32_768) == pytest.approx(1e-3 + 32.768e-3, rel=0.1)
    one = Estimates()
    attend(one, 2048)
    assert one.prefill.seconds_per_token(0) == one.prefill.seconds_per_token(100_000)


def test_noise_never_makes_depth_cheaper_nor_dearer_than_it_can_be() -> None:
    known = Estimates()
    known.prefill.observe(0, 256, 1.0)
    known.prefill.observe(256, 512, 0.5)
    assert known.prefill.seconds_per_token(10_000) == known.prefill.seconds_per_token(1000)
    known = Estimates()
    known.prefill.observe(0, 256, 0.001)
    known.prefill.observe(256, 512, 1.0)
    assert known.prefill.seconds_per_token(3840) <= 10 * known.prefill.seconds_per_token(384) + 1e-9


def test_the_end_of_a_chunk_is_no_measure() -> None:
    known = Estimates()
    known.prefill.observe(0, 256, 0.256)
    known.prefill.observe(256, 258, 1.0)
    assert known.prefill_s(256, 512) == pytest.approx(0.256)


def test_a_chunk_that_compiled_its_kernels_is_soon_forgotten() -> None:
    known = Estimates()
    known.prefill.observe(0, 2048, 3.0)
    known.prefill.observe(0, 2048, 0.06)
    assert known.prefill_s(0, 2048) == pytest.approx(0.06)
    known.prefill.observe(0, 2048, 0.06)
    known.prefill.observe(0, 2048, 1.5)
    assert known.prefill_s(0, 2048) == pytest.approx(0.06), "one that met with other work"


def gpu_chunk_s(n_tokens: int) -> float:
    """As on a GPU: most of a short chunk's time does not depend on its length."""
    return 0.05 + n_tokens * 30e-6


def test_a_short_chunk_costs_more_than_its_share_and_says_nothing_of_long_ones() -> None:
    known = Estimates()
    for n in (2048, 64, 2048, 256, 512, 2048):
        known.prefill.observe(8192, 8192 + n, gpu_chunk_s(n))
    for n in (64, 256, 1000, 2048):
        assert known.prefill_s(8192, 8192 + n) == pytest.approx(gpu_chunk_s(n), rel=0.01)
    both = gpu_chunk_s(2048) + gpu_chunk_s(256)
    assert known.prefill_s(8192, 8192 + 2304) == pytest.approx(both, rel=0.01)


def test_short_chunks_are_the_measure_until_a_whole_one_comes() -> None:
    known = Estimates()
    known.prefill.observe(0, 64, gpu_chunk_s(64))
    assert known.prefill_s(0, 64) == pytest.approx(gpu_chunk_s(64))
    known.prefill.observe(64, 64 + 2048, gpu_chunk_s(2048))
    assert known.prefill_s(0, 2048) == pytest.approx(gpu_chunk_s(2048))


def test_small_loads_tell_latency_and_large_ones_bandwidth() -> None:
    known = Estimates()
    for _ in range(20):
        known.observe_load("ssd", 10_000, 0.05)  # a tiny record, on a machine that was busy
    assert known.load_s("ssd", 10_000) == pytest.approx(0.05, rel=0.01)
    assert known.load_s("ssd", 1000 * MB) == pytest.approx(0.05 + 0.5, rel=0.01), "2 GB/s is hoped"
    for _ in range(20):
        known.observe_load("ssd", 100 * MB, 0.05 + 0.1)
    assert known.load_s("ssd", 1000 * MB) == pytest.approx(0.05 + 1.0, rel=0.01)
    assert known.load_s("ssd", 10_000) == pytest.approx(0.05, rel=0.01)


def test_tiers_are_told_apart() -> None:
    known = Estimates()
    known.observe_load("s3", 100 * MB, 10.0)
    assert known.load_s("s3", 100 * MB) == pytest.approx(10.0, rel=0.01)
    assert known.load_s("ssd", 100 * MB) < 0.1


def test_the_engines_own_time_is_kept_apart_from_the_tiers() -> None:
    known = Estimates()
    known.observe_load("ssd", 1000 * MB, 1.0)
    known.observe_arrays(1000 * MB, 0.5)
    known.observe_fill(1000 * MB, 0.25)
    assert known.load_s("ssd", 1000 * MB) == pytest.approx(1.0, rel=0.01)
    assert known.engine_s(1000 * MB) == pytest.approx(0.5)
    known.observe_arrays(10, 5.0)
    known.observe_fill(10, 5.0)
    assert known.engine_s(1000 * MB) == pytest.approx(0.5), "a few bytes are no measure"


def test_small_fills_say_nothing_about_the_bytes_of_large_ones() -> None:
    known = Estimates()
    for _ in range(N_KEPT):
        known.observe_fill(4 * MB, 0.012)  # a few tokens on a GPU: all of the time is dispatch
    assert known.fill_s(2000 * MB) == pytest.approx(0.012)
    known.observe_fill(1000 * MB, 0.112)
    assert known.fill_s(2000 * MB) == pytest.approx(0.212)
    assert known.fill_s(0) == 0.0, "nothing is filled"
    known.observe_fill(0, 1.0)
    assert known.fill_s(4 * MB) == pytest.approx(0.0124, rel=0.01)


def test_a_small_fill_that_waited_for_other_work_is_no_measure() -> None:
    known = Estimates()
    for seconds in (0.5, 0.5, 0.002, 0.5, 0.5):
        known.observe_fill(4 * MB, seconds)
    assert known.fill_s(4 * MB) == pytest.approx(0.002)
    for _ in range(N_KEPT):
        known.observe_fill(4 * MB, 0.02)
    assert known.fill_s(4 * MB) == pytest.approx(0.02), "the last few count"


def test_a_load_that_was_never_tried_is_hoped_to_be_fast() -> None:
    known = Estimates()
    assert known.load_s("ssd", 0) == 0.0
    hope = FIRST_LATENCY_S + 1000 * MB * FIRST_SECONDS_PER_BYTE
    assert known.load_s("ssd", 1000 * MB) == pytest.approx(hope)
    assert not known.tiers["ssd"].latency_s


def test_one_slow_load_among_many_is_no_measure() -> None:
    known = Estimates()
    for seconds in (0.1, 0.1, 9.0, 0.1, 0.1):
        known.observe_load("ssd", 100 * MB, seconds)
    assert known.load_s("ssd", 100 * MB) == pytest.approx(0.1, rel=0.05)


@pytest.mark.parametrize("nbytes", [1 << 10, 2 << 20, 64 << 20])
def test_what_never_arrives_is_slow(nbytes: int) -> None:
    now, estimates = [0.0], Estimates(SetClock(lambda: now[0]))
    assert not estimates.observe_delay("ssd", nbytes, 0.001), "given up before it could arrive"
    assert estimates.load_s("ssd", nbytes) < 0.05
    assert estimates.observe_delay("ssd", nbytes, 3.0)
    assert estimates.load_s("ssd", nbytes) == pytest.approx(3.0)
    assert not estimates.observe_delay("ssd", nbytes, 2.0), "that was to be expected"
    assert estimates.load_s("ssd", nbytes) == pytest.approx(3.0)
    now[0] = STALE_S + 1
    assert estimates.load_s("ssd", nbytes) < 0.05, "it is tried again"
    assert estimates.observe_delay("ssd", nbytes, 2.0)
    assert estimates.load_s("ssd", nbytes) == pytest.approx(3.0), "and is no faster"


def test_one_load_that_never_arrives_among_many_that_do_is_no_measure() -> None:
    estimates = Estimates(SetClock(lambda: 0.0))
    for _ in range(3):
        estimates.observe_load("ssd", 1 << 10, 0.001)
    assert estimates.observe_delay("ssd", 1 << 10, 3.0)
    assert estimates.load_s("ssd", 1 << 10) == pytest.approx(0.001, rel=0.01)


def test_a_slow_disk_is_given_another_chance() -> None:
    clock = Clock()
    known = Estimates(SetClock(clock))
    known.observe_load("ssd", 100 * MB, 10.0)
    slow = known.load_s("ssd", 100 * MB)
    clock.now += STALE_S - 1
    assert known.load_s("ssd", 100 * MB) == slow
    clock.now += 1
    assert known.load_s("ssd", 100 * MB) < slow / 50


def taught() -> Estimates:
    known = Estimates()
    attend(known, 0, 4096, 16_384)
    known.prefill.observe(0, 32, 0.1)
    known.observe_arrays(100 * MB, 0.02)
    known.observe_fill(100 * MB, 0.01)
    known.observe_fill(MB, 0.004)
    for _ in range(N_KEPT):
        known.observe_load("ssd", 1000, 0.003)
        known.observe_load("ssd", 100 * MB, 0.2)
    return known


def test_the_next_process_knows_what_this_one_learned() -> None:
    known, later = taught(), Estimates()
    later.restore(json.loads(json.dumps(known.to_save())))
    assert later.knows_prefill
    assert later.tiers["ssd"].seconds_per_byte
    for end in (100, 5000, 30_000):
        assert later.prefill_s(0, end) == pytest.approx(known.prefill_s(0, end), rel=0.01)
    for nbytes in (1000, 100 * MB):
        assert later.tiers["ssd"].load_s(nbytes) == known.tiers["ssd"].load_s(nbytes)
    assert later.engine_s(MB) == known.engine_s(MB)
    assert later.fill_s(100 * MB) == known.fill_s(100 * MB) > 0.01
    assert later.to_save() == known.to_save()


def test_what_was_kept_is_thrown_away_when_it_contradicts_what_is_seen() -> None:
    later = Estimates()
    later.restore(taught().to_save())
    later.prefill.observe(0, 256, 256 * 1e-5)  # a hundred times as fast: another machine
    assert later.prefill_s(0, 256 * 60) == pytest.approx(256 * 60 * 1e-5)
    later.observe_load("ssd", 100 * MB, 20.0)
    assert later.tiers["ssd"].load_s(100 * MB) == pytest.approx(20.0, rel=0.01)


def test_what_was_kept_of_shorter_chunks_contradicts_nothing() -> None:
    """On a GPU, a chunk of 2048 tokens takes hardly longer than one of 128."""
    before, later = Estimates(), Estimates()
    for start in (0, 16_384):
        before.prefill.observe(start, start + 128, gpu_chunk_s(128))
    later.restore(before.to_save())
    later.prefill.observe(4096, 4096 + 2048, gpu_chunk_s(2048))
    later.prefill.observe(16_384, 16_384 + 2048, 1.5 * gpu_chunk_s(2048))
    assert later.chunk_s(4096) == pytest.approx(gpu_chunk_s(2048))


def test_what_agrees_with_what_was_kept_is_weighed_with_it() -> None:
    later = Estimates()
    later.restore(taught().to_save())
    later.observe_load("ssd", 100 * MB, 0.3)
    assert later.tiers["ssd"].load_s(100 * MB) == pytest.approx(0.2, rel=0.01), "the lower of two"


@pytest.mark.parametrize("wrong", [{}, {"whole": "x"}, {"whole": 1, "depths": [[1, -1]]}])
def test_nonsense_is_not_taken(wrong: dict[str, object]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        Estimates().restore(wrong)


def test_what_is_known_is_shown() -> None:
    known = Estimates()
    known.prefill.observe(0, 1000, 0.5)
    known.observe_load("ssd", 100 * MB, FIRST_LATENCY_S + 0.1)
    assert known.view() == {
        "prefill_tokens_per_s": {"500": 2000},
        "short_chunk_s": 0.0,
        "engine_s_per_gib": 0.0,
        "tiers": {"ssd": {"latency_s": 0.002, "bytes_per_s": 10**9, "seen": True}},
    }


def test_a_file_that_cannot_be_replaced_leaves_nothing_behind(tmp_path: Path) -> None:
    known = Estimates()
    attend(known, 0)
    path = tmp_path / "models" / "a.estimates"
    estimates_file.save(path, known)
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    path.unlink()
    path.mkdir()
    estimates_file.save(path, known)
    assert [p.name for p in path.parent.iterdir()] == [path.name]
