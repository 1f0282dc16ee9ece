"""Options that sharded models do not support are refused in one line, before anything is loaded."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from firn.cli.serve import serve
from firn.config import Config, EngineConfig, ModelConfig, ModelTable
from firn.core.errors import SetupError
from firn.ranks.joining import agree, check_options, host_of_first
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
def test_unsupported_options_are_refused_by_name(config: Config, said: str) -> None:
    with pytest.raises(SetupError, match=said):
        check_options(config)


def test_several_models_are_refused() -> None:
    tables = (ModelTable("a", "/a"), ModelTable("b", "/b"))
    with pytest.raises(SetupError, match="several were given"):
        serve(Config(model=ModelConfig(tensor_parallel=True), tables=tables))


@pytest.mark.parametrize(
    ("environ", "host"),
    [
        ({"MLX_JACCL_COORDINATOR": "10.0.0.1:32323"}, "10.0.0.1"),
        ({"MLX_JACCL_COORDINATOR": "[fe80::1]:32323"}, "fe80::1"),
        ({"NCCL_HOST_IP": "10.0.0.2", "NCCL_PORT": "1"}, "10.0.0.2"),
    ],
)
def test_rank_0s_address_comes_from_the_launchers_variables(
    environ: dict[str, str], host: str
) -> None:
    assert host_of_first(environ) == host


def test_rank_0s_address_comes_from_the_rings_host_file(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.json"
    hosts.write_text('[["10.0.0.3:5000", "10.0.1.3:5000"], ["10.0.0.4:5001"]]')
    assert host_of_first({"MLX_HOSTFILE": str(hosts)}) == "10.0.0.3"


def test_the_default_options_are_accepted() -> None:
    check_options(Config())


def test_a_rank_that_differs_or_fails_is_named() -> None:
    own = {"error": "", "options": "a"}
    agree(own, {1: {"error": "", "options": "a", "node": "x"}})
    with pytest.raises(SetupError, match="rank 2's options differ"):
        agree(own, {1: dict(own), 2: own | {"options": "b"}})
    with pytest.raises(SetupError, match="rank 1: no such model"):
        agree(own, {1: {"error": "no such model"}})


def test_a_single_process_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "firn", "serve", str(tmp_path), "--tensor-parallel"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    assert "needs several processes" in ended.stderr.splitlines()[-1]


def test_a_model_whose_heads_cannot_be_divided_is_refused_in_one_line(tmp_path: Path) -> None:
    entry = zoo.ZOO["llama"]
    odd = {**entry.config, "num_key_value_heads": 1}
    model = tmp_path / "model"
    model.mkdir()
    zoo.folder.write(zoo.build_entry(replace(entry, config=odd)), odd, model)
    ranks = processes.start(model, folder=tmp_path)
    try:
        assert ranks.wait() == [1, 1]
        lines = [line for line in ranks.log(0).splitlines() if "key-value heads" in line]
        assert len(lines) == 1
        assert "1 key-value heads, which 2 ranks cannot share evenly" in lines[0]
        assert "Traceback" not in ranks.log(0) + ranks.log(1)
    finally:
        processes.end(ranks)
