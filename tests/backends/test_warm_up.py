"""A few replies before the first request: everything that requests use is used once."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from mlx_lm.models.cache import make_prompt_cache

from firn.backends import named
from firn.backends.cuda.traced import TracedSteps
from firn.backends.warm_up import REPLIES, WarmUpSpeculation, warm_up, warm_up_speculator
from firn.models.decode.execution import Execution
from firn.models.decode.pipelined import Pipeline, PipelinedVerification
from firn.models.decode.runner import Runner
from firn.models.decode.step_trace import NoStepTrace
from firn.models.decode.steps import NoSpeculation
from firn.models.model_arguments import IDS_ONLY
from firn.models.speculation.speculator import Speculation
from tests.harness import model_info
from tests.models.alone import Built, plain
from tests.models.speculation.drafters.test_mtp import built
from tests.models.vision import gallery

NAMES = ("qwen3", "gemma3_text", "qwen3_next", "falcon_h1", "deepseek_v3", "llama4")


def runner_of(parts: Built, speculation: Any, *, traced: TracedSteps | None = None) -> Runner:
    model, make_layers = parts
    return Runner(
        model,
        model_info(model, make_layers),
        make_layers=make_layers,
        max_rows=8,
        arguments=model if hasattr(model, "chunk") else IDS_ONLY,  # a vision model
        speculator=speculation,
        execution=Execution(trace=traced or NoStepTrace()),
    )


def warming(parts: Built, **options: Any) -> WarmUpSpeculation:
    own = Speculation(**options)
    made = warm_up_speculator(parts[0], own)
    assert isinstance(made, WarmUpSpeculation)
    assert (made.in_groups, made.profile) == (own.in_groups, own.profile)
    return made


@pytest.mark.parametrize("in_groups", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_rows_read_decode_draft_and_leave(
    name: str, in_groups: bool, caplog: pytest.LogCaptureFixture
) -> None:
    parts = plain(name)()
    speculation = warming(parts, in_groups=in_groups)
    runner = runner_of(parts, speculation)
    warm_up(runner)
    assert not caplog.records
    assert runner.groups() == []
    assert speculation._rows == {}
    totals = speculation.totals
    assert totals.n_draft_steps > 5 * len(REPLIES)
    assert totals.n_steps > totals.n_draft_steps


def test_prompts_are_read_and_decoded_without_drafts_where_nothing_is_drafted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    nothing = NoSpeculation()
    assert warm_up_speculator(None, nothing) is nothing
    runner = runner_of(plain("qwen3")(), nothing)
    warm_up(runner)
    assert not caplog.records
    assert runner.groups() == []


@pytest.mark.parametrize("name", gallery.FAMILIES[:2])
def test_a_vision_model_reads_text(name: str, caplog: pytest.LogCaptureFixture) -> None:
    parts = gallery.build(name)()
    speculation = warming(parts)
    warm_up(runner_of(parts, speculation))
    assert not caplog.records
    assert speculation.totals.n_draft_steps


def test_a_prediction_head_drafts(caplog: pytest.LogCaptureFixture) -> None:
    build, _ = built("qwen3_next")
    parts = build()
    speculation = warming(parts)
    warm_up(runner_of(parts, speculation))
    assert not caplog.records
    assert speculation.totals.n_drafted > 0


def test_steps_are_traced_and_dispatched_unread(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    followed: list[int] = []
    launch = Pipeline.launch

    def watched(self: Pipeline, group: Any, drafts: Any) -> PipelinedVerification | None:
        step = launch(self, group, drafts)
        followed.extend([step.width] if step is not None else [])
        return step

    monkeypatch.setattr(Pipeline, "launch", watched)
    parts = plain("qwen3")()
    model = parts[0]
    profile = named("cuda").step_profile(model, lambda: list(make_prompt_cache(model)))
    traced = TracedSteps(model)
    warm_up(runner_of(parts, warming(parts, profile=profile), traced=traced))
    assert not caplog.records
    assert followed
    widths = {shape[1] for shape, known in traced._shapes.items() if known.step is not None}
    assert widths == {1, profile.shape(2)}


def test_a_fault_is_logged_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    model, make_layers = plain("qwen3")()

    class Failing:
        def __call__(self, *arguments: Any, **more: Any) -> Any:
            raise RuntimeError("no such kernel")

    info = model_info(model, make_layers)
    with caplog.at_level(logging.WARNING):
        warm_up(Runner(Failing(), info, make_layers=make_layers, max_rows=8))
    assert "no such kernel" in caplog.text
