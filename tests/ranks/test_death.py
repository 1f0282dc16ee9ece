"""A rank that dies takes the group along, in seconds, and clients are told."""

from __future__ import annotations

import signal
from pathlib import Path

import httpx
import pytest

from tests import zoo
from tests.ranks.processes import serving


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    zoo.write_folder("llama", path)
    return path


BODY = {"prompt": "hello", "max_tokens": 4000, "stream": True, "ignore_eos": True}


def test_a_follower_is_killed(model: Path, tmp_path: Path) -> None:
    lines = []
    with serving(model, "--no-ssd-cache", folder=tmp_path) as ranks:
        with httpx.stream("POST", f"{ranks.url}/v1/completions", json=BODY, timeout=60) as told:
            for line in told.iter_lines():
                if not lines:
                    ranks.processes[1].kill()
                lines.append(line)
        assert any('"error"' in line for line in lines), lines[-3:]
        assert ranks.wait() == [1, -signal.SIGKILL], ranks.log(0)[-3000:]
        assert "rank 1 is gone" in ranks.log(0) or "rank 0 failed" in ranks.log(0)


def test_rank_0_is_killed(model: Path, tmp_path: Path) -> None:
    with serving(model, "--no-ssd-cache", folder=tmp_path) as ranks:
        try:
            with httpx.stream("POST", f"{ranks.url}/v1/completions", json=BODY, timeout=60) as told:
                for _ in told.iter_lines():
                    ranks.processes[0].kill()
        except httpx.TransportError:
            pass
        codes = ranks.wait()
        assert codes[0] == -signal.SIGKILL
        assert codes[1] not in (0, -signal.SIGKILL)
