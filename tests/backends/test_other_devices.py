"""A whole server on a device that this machine does not have: every branch that depends on one.

FIRN_TEST_DEVICE=metal runs the other tests like this, too, with all processes that they start.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from firn.backends import KINDS
from firn.backends.metal import MetalMemory
from firn.cache.arrays import transfers
from firn.config import CacheConfig, Config, ModelConfig
from firn.core.memory_plan import MIN_CAPACITY_NBYTES
from firn.demo.facts import FactSession, make_session
from tests.api.real import Real, serving
from tests.backends.fakes import FAKES, FakeMetal, pretend
from tests.waiting import wait_until


def config(model: str, ssd: Path) -> Config:
    cache = CacheConfig(cache_memory_mb=64, ssd_cache_dir=str(ssd))
    return Config(model=ModelConfig(path=model), cache=cache)


def right_answers(real: Real, session: FactSession) -> list[int]:
    """Asks all questions; returns the cached tokens of each reply."""
    cached = []
    for i, question in enumerate(session.questions):
        said: Any = real.openai().chat.completions.create(
            model="", messages=session.messages(i), temperature=0, max_tokens=64
        )
        text = said.choices[0].message.content or ""
        assert text.strip() == question.answer
        cached.append(said.usage.prompt_tokens_details.cached_tokens or 0)
    return cached


@pytest.mark.parametrize("model", ["firn-demo", "firn-demo-hybrid"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_answer_is_right_cold_warm_and_after_a_restart(
    kind: str,
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(transfers, "_in_use", list(transfers._in_use))  # so that it is put back
    pretend(kind, monkeypatch)
    session = make_session(5, n_facts=24, n_questions=4)
    with serving(tmp_path, config=config(model, tmp_path / "ssd")) as real:
        first, *others = right_answers(real, session)
        assert first == 0
        assert min(others) > 0
    with serving(tmp_path, config=config(model, tmp_path / "ssd")) as real:
        assert min(right_answers(real, session)) > 0
    own = [r for r in caplog.records if r.name.startswith("firn")]
    assert [r.message for r in own if r.levelno >= logging.WARNING] == []


def test_under_memory_pressure_the_cache_shrinks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "_in_use", list(transfers._in_use))
    metal = pretend("metal", monkeypatch)
    assert isinstance(metal, FakeMetal)
    metal.memory = MetalMemory(metal.profile, metal.recorded, is_short=lambda: True)
    with serving(tmp_path, config=config("firn-demo", tmp_path / "ssd")) as real:
        parts = real.server.engine.parts
        assert parts.planned is not None
        assert parts.planned.plan.capacity_nbytes > MIN_CAPACITY_NBYTES
        wait_until(lambda: parts.budget.capacity_nbytes == MIN_CAPACITY_NBYTES)


@pytest.mark.parametrize("kind", FAKES)
def test_processes_of_the_tests_have_the_device_that_was_asked_for(kind: str) -> None:
    code = "from firn import backends; here = backends.find(); print(type(here).__name__)"
    environ = {**os.environ, "TESTS_DEVICE": kind}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == FAKES[kind].__name__
