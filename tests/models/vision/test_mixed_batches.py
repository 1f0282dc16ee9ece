"""Text and picture requests in one batch: they join, leave, fail and are cancelled without a trace.

Slow: each family's requests are answered a second time by mlx-vlm, one token at a time.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from firn.core.errors import StepFailed
from firn.core.values import Message, Prompt
from firn.models.vision.picture import FeatureCache, Features
from tests.harness import Harness, running
from tests.models.vision import gallery
from tests.models.vision.gallery import said, user

KINDS = ("qwen3_vl", "qwen3_5", "gemma3", "gemma4", "lfm2_vl", "pixtral")


def chats(rng: random.Random, n: int) -> list[list[Message]]:
    """Of all lengths, with up to three pictures, in one turn or two."""
    made = []
    for i in range(n):
        shown: list[Any] = ["word " * rng.randint(1, 25)]
        shown += [rng.randrange(20) for _ in range(i % 4)]
        rng.shuffle(shown)
        made.append([user(*shown)] if i % 3 else [user(*shown), said("Yes."), user("Go on.")])
    return made


@pytest.mark.parametrize("name", KINDS)
def test_rows_come_and_go(name: str) -> None:
    """More requests than rows, some of them cancelled, with the cache in use."""
    rng = random.Random(3)
    wanted = [(c, rng.randint(1, 24)) for c in chats(rng, 9)]
    with running(gallery.build(name), chunk=16, block=16, max_rows=4) as h:
        results = [h.submit(gallery.prompt_of(name, *c), n) for c, n in wanted]
        gone = [h.submit(gallery.prompt_of(name, *chats(rng, 2)[1]), 100_000) for _ in range(2)]
        results[0].wait()
        for request, result in list(h.results.items()):
            if result in gone:
                h.engine.cancel(request)
        for (chat, n), result in zip(wanted, results, strict=True):
            result.wait()
            _, tokens, margins = gallery.reference(name, chat, n)
            assert gallery.agree(result.reply, tokens, margins)
        assert not h.cache.stats.faults
        assert _n_open(h) == 0


def _n_open(h: Harness) -> int:
    health = h.engine.health()
    return health.n_waiting + health.n_prefilling + health.n_decoding


def test_a_picture_that_breaks_the_tower_ends_its_request_alone() -> None:
    name = "qwen2_5_vl"
    good = [user("Look: ", 1, "?")]
    bad = gallery.prompt_of(name, user("Look: ", 2, "?"))
    tensors = {
        **bad.picture_inputs[0].tensors,
        "pixel_values": bad.picture_inputs[0].tensors["pixel_values"][:5],
    }
    broken = replace(bad, picture_inputs=(replace(bad.picture_inputs[0], tensors=tensors),))
    with running(gallery.build(name), chunk=16) as h:
        before = h.submit(gallery.prompt_of(name, *good), 30)
        failed = h.submit(broken, 8).wait()
        assert isinstance(failed.error, StepFailed)
        _, tokens, margins = gallery.reference(name, good, 30)
        assert gallery.agree(before.wait().reply, tokens, margins)
        assert h.ask(bad, 4).error is None


def test_a_failed_step_reads_pictures_again() -> None:
    """A batch is recovered from its tokens and pictures, at the same positions."""
    name = "qwen3_vl"
    asked = [[user("One ", 1, "?")], [user("Two ", 2, 3, "?")]]
    with running(gallery.build(name), chunk=16) as h:
        launch = h.runner.launch
        failed: list[int] = []

        def fail_once(rows: Any) -> None:
            if len(rows) == 2 and not failed:
                failed.append(1)
                raise RuntimeError("device lost")
            launch(rows)

        h.runner.launch = fail_once  # type: ignore[method-assign]
        results = [h.submit(gallery.prompt_of(name, *c), 20) for c in asked]
        for chat, result in zip(asked, results, strict=True):
            _, tokens, margins = gallery.reference(name, chat, 20)
            assert gallery.agree(result.wait().reply, tokens, margins)
        assert failed


def test_several_choices_share_the_pictures() -> None:
    name = "qwen2_5_vl"
    prompt = gallery.prompt_of(name, user("Look: ", 1, "?"))
    with running(gallery.build(name), chunk=16) as h:
        result = h.ask(prompt, 10, n=3)
        assert result.tokens[0] == result.tokens[1] == result.tokens[2]
        assert h.runner._forward.arguments.features.n_misses == 1  # type: ignore[union-attr]


# --- the vision tower ----------------------------------------------------------------------


def tower_runs(h: Harness) -> int:
    return h.runner._forward.arguments.features.n_misses  # type: ignore[union-attr, no-any-return]


def test_the_tower_runs_for_what_is_behind_the_resume_point() -> None:
    name = "qwen3_vl"
    first = [user("Look: ", 1, " and ", 2, "?")]
    with running(gallery.build(name, feature_nbytes=0), chunk=16, block=16) as h:
        h.ask(gallery.prompt_of(name, *first), 4)
        n = tower_runs(h)
        assert n >= 2
        h.ask(gallery.prompt_of(name, *first), 4)  # nothing to compute but the last token
        assert tower_runs(h) == n
        h.ask(gallery.prompt_of(name, *first, said("Two."), user("Why?")), 4)
        assert tower_runs(h) == n
        h.ask(gallery.prompt_of(name, *first, said("Two."), user(3)), 4)
        assert tower_runs(h) > n


def test_a_picture_is_read_before_its_chunk_if_its_features_are_kept() -> None:
    name = "qwen3_vl"
    prompt = gallery.prompt_of(name, user("Look: ", 1, " and ", 2, "?"))
    with running(gallery.build(name), chunk=16, cache_nbytes=None) as h:
        model = h.runner._forward.arguments
        assert [h.runner.read_picture(prompt, i) for i in (0, 1, 1, 0)] == [
            True,
            True,
            False,
            False,
        ]
        features = model.features  # type: ignore[union-attr]
        assert (features.n_misses, len(features)) == (2, 2)
        h.ask(prompt, 2)
        assert features.n_misses == 2, "the chunks took what was there"
    with running(gallery.build(name, feature_nbytes=0), chunk=16, cache_nbytes=None) as h:
        assert not h.runner.read_picture(prompt, 0), "it would be computed twice"


def test_features_are_held_within_their_limit() -> None:
    name = "qwen3_vl"
    prompt = gallery.prompt_of(name, user("Look: ", 1, "?"))
    with running(gallery.build(name), chunk=16, cache_nbytes=None) as h:
        h.ask(prompt, 2)
        h.ask(prompt, 2)
        features = h.runner._forward.arguments.features  # type: ignore[union-attr]
        assert (features.n_misses, len(features)) == (1, 1)
        one = features.nbytes
    with running(gallery.build(name, feature_nbytes=2 * one), chunk=16, cache_nbytes=None) as h:
        features = h.runner._forward.arguments.features  # type: ignore[union-attr]
        for number in (1, 3, 5, 1, 3, 5):
            h.ask(gallery.prompt_of(name, user("Look: ", number, "?")), 2)
            assert features.nbytes <= features.limit_nbytes
        assert features.n_misses == 6
        h.ask(gallery.prompt_of(name, user("Look: ", 5, "?")), 2)
        assert features.n_misses == 6


def test_features_too_large_to_hold_push_nothing_out() -> None:
    held = FeatureCache(100)
    held.put(b"small", Features(mx.zeros((1, 2, 8))))
    held.put(b"large", Features(mx.zeros((1, 4, 8))))
    assert held.get(b"small") is not None
    assert held.get(b"large") is None


def test_text_alone_never_sees_the_tower(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "qwen3_vl"
    with running(gallery.build(name), chunk=16) as h:
        model: Any = h.runner._forward.arguments
        tower = type(model.model.vision_tower)
        run, n_runs = tower.__call__, 0

        def counted(*args: Any, **more: Any) -> Any:
            nonlocal n_runs
            n_runs += 1
            return run(*args, **more)

        monkeypatch.setattr(tower, "__call__", counted)
        prompt: Prompt = gallery.prompt_of(name, user("Only words, many of them. " * 5))
        assert prompt.picture_spans == ()
        assert h.ask(prompt, 8).error is None
        assert n_runs == 0
        assert h.ask(gallery.prompt_of(name, user("Look: ", 1, "?")), 8).error is None
        assert n_runs == 1
