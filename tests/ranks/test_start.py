"""What does not go with sharded models is said in one line, before anything is loaded."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from firn.config import Config, EngineConfig, ModelConfig
from firn.core.errors import SetupError
from firn.ranks.team import agree, check_options
from tests import zoo
from tests.ranks import processes


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (Config(model=ModelConfig(adapter=Path("/x"))), "--adapter"),
        (Config(engine=EngineConfig(draft_model="x")), "--draft-model"),
        (Config(engine=EngineConfig(speculation="lookup")), "--speculation lookup"),
    ],
)
def test_options_that_do_not_go_with_it(config: Config, said: str) -> None:
    with pytest.raises(SetupError, match=said):
        check_options(config)


def test_the_defaults_do() -> None:
    check_options(Config())


def test_ranks_that_do_not_agree() -> None:
    own = {"error": "", "options": "a"}
    agree(own, {1: {"error": "", "options": "a", "node": "x"}})
    with pytest.raises(SetupError, match="rank 2 has other options"):
        agree(own, {1: dict(own), 2: own | {"options": "b"}})
    with pytest.raises(SetupError, match="rank 1: no such model"):
        agree(own, {1: {"error": "no such model"}})


def test_alone(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "firn", "serve", str(tmp_path), "--tensor-parallel"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    assert "needs several processes" in ended.stderr.splitlines()[-1]


def test_heads_that_cannot_be_shared(tmp_path: Path) -> None:
    entry = zoo.ZOO["llama"]
    odd = {**entry.config, "num_key_value_heads": 1}
    model = tmp_path / "model"
    model.mkdir()
    zoo.folder.write(zoo.build_entry(replace(entry, config=odd)), odd, model)
    ranks = processes.start(model, folder=tmp_path)
    try:
        assert [code != 0 for code in ranks.wait()] == [True, True]
        said = [line for line in ranks.log(0).splitlines() if "key-value heads" in line]
        assert len(said) == 1
        assert "1 key-value heads, which 2 ranks cannot share evenly" in said[0]
        assert "Traceback" not in ranks.log(0) + ranks.log(1)
    finally:
        processes.end(ranks)
