"""Rows of real (tiny) models, batched: each says what a plain mlx-lm loop says for it alone.

One model for each kind of layer. Random models are sharp enough that a token in the wrong place shows.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from firn.core.values import RequestId, Sampling
from firn.models.decode.batch import MAX_WASTE, SLACK_TOKENS, VACANT_STEPS, Group, Row, _margin
from firn.models.decode.runner import Runner
from tests.cache.lab import n_leases
from tests.harness import GREEDY, Harness, Result, model_info, running
from tests.models.alone import Built, assert_same, plain, prompt_of, with_caches
from tests.zoo import build

KINDS = {
    "qwen3": "KVCache",
    "gemma3_text": "RotatingKVCache and KVCache",
    "qwen3_next": "ArraysCache and KVCache",
    "mamba2": "ArraysCache",
    "falcon_h1": "CacheList of ArraysCache and KVCache",
    "recurrent_gemma": "ArraysCache and RotatingKVCache",
    "deepseek_v32": "CacheList of two KVCaches",
    "llama4": "ChunkedKVCache: no batched form",
}
every_kind = pytest.mark.parametrize("name", KINDS)


class CountedModel:
    """A model whose calls are counted, and may fail after they have written to their caches."""

    def __init__(self, name: str, *, fail_at: Callable[[int, int], bool] | None = None) -> None:
        self.model = build(name)
        self.fail_at = fail_at
        self.calls: list[tuple[int, int]] = []
        """(rows, tokens) of each call."""

    def __call__(self, ids: mx.array, *, cache: list[Any]) -> mx.array:
        self.calls.append((ids.shape[0], ids.shape[1]))
        logits: mx.array = self.model(ids, cache=cache)
        if self.fail_at is not None and self.fail_at(*self.calls[-1]):
            raise RuntimeError("injected")
        return logits

    @property
    def prefills(self) -> list[int]:
        return [n_tokens for _, n_tokens in self.calls if n_tokens > 1]

    def built(self) -> Built:
        _, make_layers = with_caches(self.model)
        return self, make_layers


def id_of(h: Harness, result: Result) -> RequestId:
    return next(i for i, r in h.results.items() if r is result)


# --- batched rows equal single ones ---------------------------------------------------------


@every_kind
def test_a_batch_says_what_each_row_says_alone(name: str) -> None:
    """More jobs than rows, of all lengths: they join and leave at every step."""
    rng = random.Random(7)
    lengths = [1, 1, 2, 31, 32, 33, 64, 65, 110, *(rng.randint(1, 120) for _ in range(5))]
    rng.shuffle(lengths)
    prompts = [prompt_of(rng, n) for n in lengths]
    with running(plain(name), chunk=32, cache_nbytes=None, max_rows=5) as h:
        gone = h.submit(prompts[0], 100_000)
        results = [h.submit(p, rng.randint(1, 24)) for p in prompts]
        results[3].wait()
        h.engine.cancel(id_of(h, gone))
        for result in results:
            result.wait()
        assert h.runner.info.batchable == (name != "llama4")
    n_compared = n_said = 0
    for prompt, result in zip(prompts, results, strict=True):
        assert result.error is None
        n_said += len(result.reply)
        n_compared += assert_same(name, prompt, result.reply)
    assert n_compared > 0.8 * n_said, "too many ties to tell"


@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_next", "mamba2", "deepseek_v32"])
def test_rows_that_leave_do_not_disturb_the_rest(name: str) -> None:
    """One long reply while short ones come and go, until it is alone."""
    rng = random.Random(8)
    long = prompt_of(rng, 40)
    with running(plain(name), chunk=16, cache_nbytes=None, max_rows=4) as h:
        stay = h.submit(long, 60)
        for wave in range(3):
            prompts = [prompt_of(rng, rng.randint(1, 50)) for _ in range(3)]
            results = [h.submit(p, 3 + 5 * wave) for p in prompts]
            for prompt, result in zip(prompts, results, strict=True):
                assert_same(name, prompt, result.wait().reply)
        assert assert_same(name, long, stay.wait().reply) > 20


@every_kind
def test_a_vacant_seat_is_taken_by_the_next_row(name: str) -> None:
    """Eight rows: again and again one leaves and a longer or shorter one joins."""
    rng = random.Random(11)
    prompts = [prompt_of(rng, rng.choice([5, 30, 60, 100])) for _ in range(18)]
    with running(plain(name), chunk=128, cache_nbytes=None, max_rows=8) as h:
        results = [h.submit(p, 4 + 2 * (i % 8)) for i, p in enumerate(prompts)]
        for result in results:
            result.wait()
    for prompt, result in zip(prompts, results, strict=True):
        assert_same(name, prompt, result.reply)


def rows_of(name: str, *lengths: int) -> tuple[Group, list[Row]]:
    """A group that decodes, on real caches."""
    model = build(name)
    rows = []
    for n in lengths:
        layers = make_prompt_cache(model)
        model(mx.zeros((1, n), dtype=mx.int32), cache=layers)
        rows.append(Row(layers, n))
    group = Group.of_one(rows[0], 0)
    for row in rows[1:]:
        group.join(row, 0)
    return group, rows


@pytest.mark.parametrize("name", [n for n in KINDS if n != "llama4"])
def test_seats_are_reused_kept_vacant_for_a_while_and_removed(name: str) -> None:
    group, rows = rows_of(name, 9, 20, 30, 40, 50)
    others, _ = rows_of(name, 12)
    group.leave([rows[1]])
    assert len(group.seats) == 5
    assert group.rows == [rows[0], *rows[2:]]
    new = Row(others.layers, 12)
    group.join(new, 3)
    assert group.seats[1] is new
    assert new.index == 1
    assert len(group.rows) == 5
    assert group.next_tokens.tolist() == [0, 3, 0, 0, 0]
    group.leave([rows[0]])
    for _ in range(VACANT_STEPS):
        assert len(group.seats) == 5
        group.tick()
    assert group.seats == [new, *rows[2:]], "nobody came"
    group.leave([rows[2], new])
    assert len(group.seats) == 4
    group.leave([rows[3]])
    assert group.seats == [rows[4]], "too many vacant seats"


@pytest.mark.parametrize("name", [n for n in KINDS if n != "llama4"])
def test_a_group_adds_seats_for_rows_that_follow_soon(name: str) -> None:
    group, rows = rows_of(name, 9, 20, 30)
    a, b = (Row(rows_of(name, n)[0].layers, n) for n in (25, 12))
    group.join(a, 4, n_seats=16)
    assert group.rows == [*rows, a]
    assert len(group.seats) == 6, "as many as it has, at most"
    group.join(b, 5, n_seats=16)
    assert group.seats[4] is b
    assert group.next_tokens.tolist() == [0, 0, 0, 4, 5, 4]
    for _ in range(VACANT_STEPS):
        assert len(group.seats) == 6
        group.tick()
    assert group.seats == [*rows, a, b], "nobody else came"


def test_padding_that_no_row_needs_is_removed() -> None:
    """Seats are reused indefinitely: the caches must not grow with the number of steps."""
    group, _ = rows_of("qwen3", 20, 24, 28, 32, 36)
    widest = 0
    for _ in range(10 * _margin(40)):
        group.tick()
        for layer in group.layers:
            news = (mx.zeros((5, a.shape[1], 1, a.shape[3])) for a in (layer.keys, layer.values))
            layer.update_and_fetch(*news)
        for row in group.seats:
            row.n_tokens += 1
        for row in [r for r in group.rows if r.n_tokens > 40]:
            group.leave([row])
            others, _ = rows_of("qwen3", 20)
            group.join(Row(others.layers, 20), 0)
        assert group.width == group.layers[0].size()
        widest = max(widest, group.width)
    assert 40 + _margin(40) - 5 <= widest <= 40 + _margin(40) + 5


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "qwen3_next", "recurrent_gemma"])
def test_prompts_of_one_token_start_from_nothing(name: str) -> None:
    """Their caches are empty, which is not the same as full of zeros."""
    with running(plain(name), cache_nbytes=None) as h:
        results = [h.submit([77 + i], 12) for i in range(4)]
        for i, result in enumerate(results):
            assert_same(name, [77 + i], result.wait().reply)


@every_kind
def test_choices_share_one_prefill_and_agree_when_greedy(name: str) -> None:
    prompt = prompt_of(random.Random(9), 50)
    counted: list[CountedModel] = []

    def make() -> Built:
        counted.append(CountedModel(name))
        return counted[0].built()

    with running(make, chunk=32, cache_nbytes=None) as h:
        result = h.ask(prompt, 12, n=3)
        assert counted[0].prefills == [32, 17], "[0, 32) and [32, 49), once"
    assert result.tokens[0] == result.tokens[1] == result.tokens[2]
    assert_same(name, prompt, result.reply)


# --- groups --------------------------------------------------------------------------------


def group_of(*lengths: int) -> Group:
    group = Group([Row([], n) for n in lengths], [], mx.array([0] * len(lengths)))
    for row in group.seats:
        row.group = group
    return group


def test_short_rows_always_share_a_group() -> None:
    assert group_of(1, SLACK_TOKENS, 1, 1, 1).has_room_for(Row([], 1), 32)


def test_where_memory_is_short_even_short_rows_are_kept_apart() -> None:
    group = group_of(1, 301)
    assert group.has_room_for(Row([], 1), 32, max_padding=600)
    assert not group.has_room_for(Row([], 1), 32, max_padding=599)
    assert group.has_room_for(Row([], 301), 32, max_padding=0), "little of it would be padding"


@pytest.mark.parametrize(("max_padding", "n_seats"), [(1000, 6), (60, 5), (30, 4), (0, 4)])
def test_where_memory_is_short_few_seats_wait_for_rows(max_padding: int, n_seats: int) -> None:
    model = build("qwen3")

    def make_layers() -> list[Any]:
        return make_prompt_cache(model)

    info = model_info(model, make_layers)
    runner = Runner(model, info, make_layers=make_layers, max_rows=16, max_padding=max_padding)
    for n in (40, 40, 40):
        row = Row(make_layers(), n)
        model(mx.zeros((1, n), dtype=mx.int32), cache=row.layers)
        runner.join(row, 0)
    row = Row(make_layers(), 30)
    model(mx.zeros((1, 30), dtype=mx.int32), cache=row.layers)
    runner.join(row, 0, n_coming=9)
    assert len(runner._groups[0].seats) == n_seats


def test_padding_never_wastes_more_than_its_limit() -> None:
    long = 10 * SLACK_TOKENS
    assert group_of(long).has_room_for(Row([], long // 2), 32)
    assert group_of(long, 1).has_room_for(Row([], long), 32)
    assert not group_of(long, 1).has_room_for(Row([], 1), 32)
    assert not group_of(1, 1, 1).has_room_for(Row([], long), 32)
    rng = random.Random(3)
    for _ in range(200):
        lengths = [rng.randint(1, 20_000) for _ in range(rng.randint(1, 8))]
        row = Row([], rng.randint(1, 20_000))
        held = [*lengths, row.n_tokens]
        cells = max(held) * len(held)
        fits = cells <= MAX_WASTE * sum(held) or max(held) <= SLACK_TOKENS
        assert group_of(*lengths).has_room_for(row, 32) == fits


def test_a_group_has_a_limit_and_rows_that_failed_stay_alone() -> None:
    assert not group_of(5, 5).has_room_for(Row([], 5), 2)
    assert not group_of(5).has_room_for(Row([], 5, alone=True), 32)
    lonely = group_of(5)
    lonely.rows[0].alone = True
    assert not lonely.has_room_for(Row([], 5), 32)


def test_rows_of_very_different_lengths_step_in_groups_of_their_own() -> None:
    rng = random.Random(10)
    lengths = [SLACK_TOKENS + 300, 20, 30, 40]
    prompts = [prompt_of(rng, n) for n in lengths]
    counted: list[CountedModel] = []

    def make() -> Built:
        counted.append(CountedModel("qwen3"))
        return counted[0].built()

    with running(make, chunk=512, cache_nbytes=None) as h:
        results = [h.submit(p, 16) for p in prompts]
        for prompt, result in zip(prompts, results, strict=True):
            assert_same("qwen3", prompt, result.wait().reply)
    rows = {n_rows for n_rows, n_tokens in counted[0].calls if n_tokens == 1}
    assert max(rows) < 4, "not all four in one group"


def test_leaving_rows_that_never_joined_is_fine() -> None:
    with running(plain("qwen3"), cache_nbytes=None) as h:

        def leave(parts: Any) -> list[list[Row]]:
            runner: Runner = parts.runner
            row = runner.start(None)
            runner.leave([row])
            runner.leave([row])
            return runner.groups()

        assert h.engine.call(leave).result(60) == []


# --- faults --------------------------------------------------------------------------------


def leases(h: Harness) -> int:
    def count(parts: Any) -> int:
        return n_leases(parts.cache)

    return h.engine.call(count).result(60)


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "qwen3_next", "falcon_h1", "llama4"])
def test_replies_go_on_after_a_failed_decode_step(name: str) -> None:
    """Greedy, seeded and penalised rows go on as if nothing had happened."""
    rng = random.Random(11)
    prompts = [prompt_of(rng, n) for n in (40, 70, 9)]
    samplings = [
        GREEDY,
        Sampling(temperature=0.8, seed=5),
        Sampling(temperature=0.0, repetition_penalty=1.5, frequency_penalty=0.5),
    ]
    steps: list[int] = []
    """The number of rows of each step."""

    def fail_at(n_rows: int, n_tokens: int) -> bool:
        if n_tokens == 1:
            steps.append(n_rows)
        return n_tokens == 1 and len(steps) == 15

    def replies(make: Callable[[], Built]) -> list[list[int]]:
        with running(make, chunk=32) as h:
            results = [h.submit(p, 20, sampling=s) for p, s in zip(prompts, samplings, strict=True)]
            said = [r.wait().reply for r in results]
            assert all(r.error is None for r in results)
            assert leases(h) == 0
        return said

    undisturbed = replies(plain(name))
    assert replies(lambda: CountedModel(name, fail_at=fail_at).built()) == undisturbed
    assert (steps[14] > 1) == (name != "llama4")
    assert set(steps[15:]) == {1}, "each goes on alone, or the one at fault would not be said"


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "qwen3_next", "falcon_h1"])
@pytest.mark.parametrize("nth", [2, 3])
def test_a_chunk_that_failed_leaves_nothing_wrong_in_the_cache(name: str, nth: int) -> None:
    """The layers had already advanced when it failed; no request may resume from that state."""
    prompt = prompt_of(random.Random(12), 120)
    n_calls = 0

    def fail_at(n_rows: int, n_tokens: int) -> bool:
        nonlocal n_calls
        n_calls += n_tokens > 1
        return n_calls == nth

    with running(lambda: CountedModel(name, fail_at=fail_at).built(), chunk=32) as h:
        first = h.ask(prompt, 4, boundaries=[40, 80])
        assert_same(name, prompt, first.reply)
        assert leases(h) == 0
        n_calls = 100
        again = h.ask(prompt, 30, boundaries=[40, 80])
        assert_same(name, prompt, again.reply)
        assert leases(h) == 0
        assert h.cache.stats.faults == {}


@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_next"])
def test_clients_that_go_away_leave_no_lease_and_no_wrong_record(name: str) -> None:
    """Cancelled at any point; what they left in the cache is right for the next request."""
    rng = random.Random(13)
    roots = [prompt_of(rng, 90) for _ in range(3)]
    with running(plain(name), chunk=16, max_rows=4) as h:
        for _ in range(4):
            results = []
            for _ in range(6):
                prompt = rng.choice(roots)[: rng.randint(10, 90)] + prompt_of(rng, 3)
                results.append(h.submit(prompt, 40, n=rng.choice([1, 2]), boundaries=[8]))
            survivor = h.submit(rng.choice(roots), 10)
            for result in results:
                h.engine.cancel(id_of(h, result))
                h.engine.call(lambda parts: None).result(60)
            survivor.wait()
            assert leases(h) == 0
        for root in roots:
            assert_same(name, root, h.ask(root, 20).reply)
        assert h.cache.stats.faults == {}
        assert h.runner.groups() == []


def test_a_bad_bias_ends_its_own_request_only() -> None:
    with running(plain("qwen3"), cache_nbytes=None) as h:
        good = h.submit([20, 21, 22], 12)
        bad = h.submit([20, 21, 22], 12, sampling=Sampling(logit_bias=((1 << 20, 5.0),)))
        error = bad.wait().error
        assert error is not None
        assert error.code == "invalid_value"
        assert error.param == "logit_bias"
        assert good.wait().error is None
        assert_same("qwen3", [20, 21, 22], good.reply)
