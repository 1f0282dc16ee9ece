"""Decode steps that are traced once for each shape: the same tokens as steps that are built."""

from __future__ import annotations

import copy
import dataclasses
import logging
import time
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, make_prompt_cache

from firn.backends import named
from firn.backends.cuda import traced as traced_module
from firn.backends.cuda.traced import PLAIN, TracedSteps, traced_steps
from firn.models.decode.ragged import Columns, RaggedKVCache
from firn.models.decode.rewind import ready
from firn.models.speculation.step_clock import StepClock
from tests.harness import GREEDY, running
from tests.models.alone import plain
from tests.models.speculation.drafting import AnyWidth, KnownReplies
from tests.models.speculation.test_speculation import SAMPLINGS, assert_equal, known, story, tell
from tests.zoo import VOCAB_SIZE, build

NAMES = ("qwen3", "llama", "deepseek_v3", "qwen3_moe")
TEXTS = ([3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1], [1, 6, 1, 8, 0, 3])


def prefilled(model: Any, ids: list[int]) -> list[Any]:
    layers: list[Any] = make_prompt_cache(model)
    model(mx.array([ids]), cache=layers)
    mx.eval([c.state for c in layers])
    return layers


def merged(model: Any) -> list[Any]:
    rows = [prefilled(model, text) for text in TEXTS]
    return [KVCache.merge(list(same)) for same in zip(*rows, strict=True)]


def near(got: mx.array | None, want: mx.array) -> bool:
    assert got is not None
    return bool(mx.allclose(got, want, rtol=1e-4, atol=1e-4))


def at_once(model: Any, make_layers: Any) -> TracedSteps:
    return TracedSteps(model, n_built=0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("block", [1, 8, 256])
def test_a_group_of_mlx_lms_caches(name: str, block: int) -> None:
    """Rows of unequal lengths, through several blocks of columns."""
    model = build(name)
    traced, layers, built = TracedSteps(model, n_built=0), merged(model), merged(model)
    for i in range(12):
        ids = mx.array([[i % 7], [3], [(5 * i) % 11]])
        assert near(traced.wide(ids, layers, Columns(block)), model(ids, cache=built))
    for mine, its in zip(layers, built, strict=True):
        assert mine._idx == its._idx
        assert mx.array_equal(mine.offset, its.offset)
        for a, b in ((mine.keys, its.keys), (mine.values, its.values)):
            # cells before a row's first token may hold anything
            assert near(a[0, :, : its._idx], b[0, :, : its._idx])


@pytest.mark.parametrize("name", NAMES)
def test_rows_that_took_unequal_numbers(name: str) -> None:
    model = build(name)
    traced, columns = TracedSteps(model, n_built=0), Columns(16)
    layers, built = ready(merged(model), columns), ready(merged(model), columns)
    for i in range(6):
        ids = mx.array([[i, 2, 3, 4], [5, i, 7, 8], [9, 1, i, 2]])
        assert near(traced.wide(ids, layers, columns), model(ids, cache=built))
        assert [c.lengths for c in layers] == [c.lengths for c in built]
        kept = [
            layers[0].lengths[0] - 4 + 1 + i % 4,
            layers[0].lengths[1] - 1,
            layers[0].lengths[2],
        ]
        for layer in (*layers, *built):
            assert isinstance(layer, RaggedKVCache)
            layer.keep(kept)
    one = mx.array([[1], [2], [3]])
    assert near(traced.wide(one, layers, PLAIN), model(one, cache=built))


@pytest.mark.parametrize("name", NAMES)
def test_a_lone_row_with_a_draft(name: str) -> None:
    model = build(name)
    traced, layers, built = (
        TracedSteps(model, n_built=0),
        prefilled(model, [1, 2, 3]),
        prefilled(model, [1, 2, 3]),
    )
    for i in range(5):
        ids = mx.array([[i, 4, 5, 6]])
        assert near(traced.wide(ids, layers, Columns(8)), model(ids, cache=built))
        for layer in (*layers, *built):
            layer.trim(i % 4)
    assert layers[0].offset == built[0].offset
    # it is still mlx-lm's own cache
    one = mx.array([[7]])
    assert near(model(one, cache=layers), model(one, cache=built))


def test_a_shape_is_traced_once() -> None:
    model = build("qwen3")
    calls = []

    class Counted:
        def __call__(self, ids: mx.array, cache: Any) -> Any:
            calls.append(ids.shape)
            return model(ids, cache=cache)

    traced, layers = TracedSteps(Counted(), n_built=0), merged(model)
    for _ in range(20):
        assert traced.wide(mx.array([[1], [2], [3]]), layers, Columns(64)) is not None
    assert calls == [(3, 1)]
    traced.wide(mx.array([[1, 1], [2, 2], [3, 3]]), layers, Columns(64))
    assert calls == [(3, 1), (3, 2)]


def test_a_new_shape_is_built_for_a_while() -> None:
    """Tracing takes longer than a few steps, and while rows come and go a shape lasts for one or two."""
    model = build("qwen3")
    traced, layers = TracedSteps(model, n_built=2), merged(model)
    ids = mx.array([[1], [2], [3]])
    is_traced = [traced.wide(ids, layers, Columns(64)) is not None for _ in range(4)]
    assert is_traced == [False, False, True, True]
    assert not traced.had_new_shape()
    wide = mx.array([[1, 1], [2, 2], [3, 3]])
    assert traced.wide(wide, layers, Columns(64)) is None
    assert traced.had_new_shape()
    assert not traced.had_new_shape(), "the next step may be one that is never traced"


@pytest.mark.parametrize("width", [1, 8])
def test_a_row_that_grows_has_a_new_shape_now_and_then(width: int) -> None:
    """Such steps take longer than those that follow, and say nothing about them."""
    model, prompt, steps = build("qwen3"), list(range(1, 40)), []
    own = named("cuda").step_profile(model, lambda: list(make_prompt_cache(model)))
    profile = dataclasses.replace(own, columns=dataclasses.replace(own.columns, block=64))

    class Watching(StepClock):
        def read(self, group: Any, taken: Any, step: Any, **more: Any) -> None:
            steps.append(step)

    def speculation() -> AnyWidth:
        never_right = {(tuple(prompt), 0): [VOCAB_SIZE - 2] * 100}
        drafter = KnownReplies(never_right, right=0.0, vocab_size=VOCAB_SIZE)
        made = AnyWidth(drafter, profile=profile, least=width, most=width)
        made.step_clock = Watching(made.times, made.allowance, time.perf_counter)
        return made

    def traced(model: Any, make_layers: Any) -> TracedSteps:
        return TracedSteps(model, n_built=2)

    options: dict[str, Any] = {"cache_nbytes": None, "speculation": speculation, "traced": traced}
    with running(plain("qwen3"), **options) as harness:
        harness.ask(prompt, 60)
    new = [i for i, step in enumerate(steps) if step.width == width and step.is_new]
    assert new[:3] == [0, 1, 2]
    # 256 columns hold all steps of one token; wide ones see blocks of 64.
    assert (len(new) > 3) == (width > 1)
    assert len(new) < 10


def test_old_shapes_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traced_module, "MAX_SHAPES", 3)
    model = build("qwen3")
    traced = TracedSteps(model, n_built=0)
    for _ in range(2):
        for width in range(1, 7):
            layers, built = merged(model), merged(model)
            ids = mx.ones((3, width), dtype=mx.int32)
            assert near(traced.wide(ids, layers, Columns(64)), model(ids, cache=built))
            assert len(traced._shapes) <= 3


def test_buffers_are_written_in_place() -> None:
    """A copy of every buffer at every step would cost more than the trace saves."""
    model = build("qwen3")
    traced, layers = TracedSteps(model, n_built=0), merged(model)
    columns, ids = Columns(1 << 16), mx.array([[1], [2], [3]])
    mx.eval(traced.wide(ids, layers, columns))
    nbytes = layers[0].keys.nbytes
    assert nbytes > 1 << 20
    mx.eval([(c.keys, c.values) for c in layers])
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for _ in range(3):
        mx.eval(traced.wide(ids, layers, columns))
    assert mx.get_peak_memory() - before < nbytes


def test_other_layers_are_left_alone() -> None:
    for name in ("gemma3_text", "qwen3_next", "mamba2"):
        model = build(name)
        layers = prefilled(model, [1, 2, 3])
        assert TracedSteps(model, n_built=0).wide(mx.array([[4]]), layers, PLAIN) is None
        with pytest.raises(ValueError, match="plain attention"):
            traced_steps(model, lambda model=model: make_prompt_cache(model))


def test_an_empty_cache_is_left_alone() -> None:
    model = build("qwen3")
    assert (
        TracedSteps(model, n_built=0).wide(mx.array([[4]]), make_prompt_cache(model), PLAIN) is None
    )


def test_a_model_that_cannot_be_traced_is_built_from_there_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = build("qwen3")

    class Peeking:
        def __call__(self, ids: mx.array, cache: Any) -> Any:
            ids[0, 0].item()
            return model(ids, cache=cache)

    traced, layers = TracedSteps(Peeking(), n_built=0), merged(model)
    before = copy.copy(layers[0].keys), layers[0]._idx
    with caplog.at_level(logging.WARNING, "firn.models"):
        assert traced.wide(mx.array([[1], [2], [3]]), layers, PLAIN) is None
    assert "steps are not traced from now on" in caplog.text
    assert mx.array_equal(layers[0].keys, before[0])
    assert layers[0]._idx == before[1]
    caplog.clear()
    assert traced.wide(mx.array([[1], [2], [3]]), layers, PLAIN) is None
    assert not caplog.text
    with pytest.raises(ValueError):
        traced_steps(Peeking(), lambda: make_prompt_cache(model))


def test_a_model_that_comes_out_different_is_refused() -> None:
    """When it is traced, it reads other tokens than when it is built."""
    model = build("qwen3")

    class Counting:
        n = 0

        def __call__(self, ids: mx.array, cache: Any) -> Any:
            self.n += 1
            return model(ids + (self.n if hasattr(cache[0], "_new") else 0), cache=cache)

    with pytest.raises(ValueError, match="come out different"):
        traced_steps(Counting(), lambda: make_prompt_cache(model))


@pytest.mark.parametrize("name", NAMES)
def test_an_engine_says_the_same(name: str) -> None:
    """Rows join and leave, with drafts and without."""
    requests = story(4, samplings=list(SAMPLINGS.values()), n_requests=5, longest=30)
    options: dict[str, Any] = {"chunk": 32, "cache_nbytes": None, "max_rows": 3}
    with running(plain(name), **options) as harness:
        want = tell(harness, requests)
    n_said = sum(len(reply) for result in want for reply in result.tokens.values())
    model = build(name)
    own = named("cuda").step_profile(model, lambda: list(make_prompt_cache(model)))
    profile = dataclasses.replace(own, columns=dataclasses.replace(own.columns, block=64))
    drafter = KnownReplies(known(requests, want), right=0.7, vocab_size=VOCAB_SIZE)
    made: list[TracedSteps] = []

    def traced(model: Any, make_layers: Any) -> TracedSteps:
        traced_steps(model, make_layers)
        made.append(TracedSteps(model, n_built=1))
        return made[-1]

    for speculation in (None, AnyWidth(drafter, profile=profile)):
        more: dict[str, Any] = {"speculation": lambda s=speculation: s} if speculation else {}
        with running(plain(name), traced=traced, **more, **options) as harness:
            got = tell(harness, requests)
        assert sum(assert_equal(g, w) for g, w in zip(got, want, strict=True)) > 0.8 * n_said
        widths = {shape[1] for shape, known in made[-1]._shapes.items() if known.step is not None}
        assert widths == {1} if speculation is None else max(widths) > 1


def test_tokens_are_fed_in_one_type() -> None:
    """Rows join and leave, with drafts and without. Another type is another trace, and other kernels."""
    requests = story(4, samplings=list(SAMPLINGS.values()), n_requests=5)
    types: dict[bool, set[mx.Dtype]] = {False: set(), True: set()}

    class Watching(TracedSteps):
        def wide(self, ids: mx.array, *arguments: Any, **more: Any) -> mx.array | None:
            types[ids.shape[1] > 1].add(ids.dtype)
            return super().wide(ids, *arguments, **more)

    model = build("qwen3")
    profile = named("cuda").step_profile(model, lambda: list(make_prompt_cache(model)))
    never_right = {(tuple(prompt), 0): [1] * 100 for prompt, *_ in requests}
    speculation = AnyWidth(
        KnownReplies(never_right, right=0.5, vocab_size=VOCAB_SIZE), profile=profile, most=4
    )
    options: dict[str, Any] = {"chunk": 32, "cache_nbytes": None, "max_rows": 3}
    with running(
        plain("qwen3"),
        traced=lambda model, make_layers: Watching(model, n_built=1),
        speculation=lambda: speculation,
        **options,
    ) as harness:
        tell(harness, requests)
    assert types == {False: {mx.uint32}, True: {mx.int32}}


@pytest.mark.parametrize(("n_columns", "n_traced"), [(0, 0), (60, 21), (1 << 20, 51)])
def test_a_lone_row_is_traced_until_it_is_long(
    n_columns: int, n_traced: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its attention is faster without a mask, which matters where there is much to attend to."""
    monkeypatch.setattr(traced_module, "LONE_COLUMNS", n_columns)
    requests = [(list(range(1, 40)), 50, 1, GREEDY)]
    with running(plain("qwen3"), cache_nbytes=None) as harness:
        want = tell(harness, requests)
    made: list[TracedSteps] = []

    def traced(model: Any, make_layers: Any) -> TracedSteps:
        made.append(TracedSteps(model, n_built=0))
        return made[-1]

    with running(plain("qwen3"), cache_nbytes=None, traced=traced) as harness:
        got = tell(harness, requests)
    assert_equal(got[0], want[0])
    # A step is in flight when the reply of 50 tokens ends.
    assert sum(known.n_steps for known in made[0]._shapes.values()) == n_traced


def test_turns_resume_from_what_traced_steps_wrote() -> None:
    requests = [(p, n + 36, 1, s) for p, n, _, s in story(2, samplings=[GREEDY], n_requests=4)]
    options: dict[str, Any] = {"chunk": 32, "max_rows": 3}
    with running(plain("qwen3"), cache_nbytes=None, **options) as harness:
        first = tell(harness, requests)
        turns = [
            ([*p, *r.reply, 50, 51, 52], 12, 1, GREEDY)
            for (p, *_), r in zip(requests, first, strict=True)
        ]
        want = tell(harness, turns)
    with running(plain("qwen3"), traced=at_once, block=32, **options) as harness:
        again = tell(harness, requests)
        got = tell(harness, turns)
    for a, b in zip(again, first, strict=True):
        assert_equal(a, b)
    assert sum(assert_equal(g, w) for g, w in zip(got, want, strict=True)) > 0.6 * 12 * len(turns)
    same = [
        (r, t) for r, t, a, b in zip(got, turns, again, first, strict=True) if a.reply == b.reply
    ]
    assert same
    for result, (prompt, *_) in same:
        assert result.n_cached > len(prompt) - 3 - 32, "nearly all of the reply"
