"""`firn doctor`: what it says about machines and models, and its exit code.

Slow: it runs as a user would run it, with everything that it imports.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3
from rich.console import Console

from firn.assembly import memory as memory_plans
from firn.backends import named, product_check
from firn.backends.cpu.dtype import widened_nbytes
from firn.backends.report import DeviceReport
from firn.cli.doctor import examine
from firn.cli.doctor.examine import (
    Finding,
    as_computed,
    budget_rows,
    describe_model,
    doctor,
    machine_findings,
    machine_of,
    model_findings,
    model_of,
    snapshot_findings,
    template_findings,
    verdict,
)
from firn.cli.terminal import size
from firn.config import BUILTIN_MODEL
from firn.core.memory_plan import MemoryOptions
from firn.host.machine import (
    SystemMemory,
    disk_free,
    is_loopback,
    memory,
    usable_cores,
    vm_stat_available,
)
from firn.models.load.inspect import CacheCost, ModelReport, inspect_folder
from firn.text.prompt.template_losses import TOOLS_MOVE
from tests import families
from tests.cli import command

GIB = 2**30
MAC = DeviceReport(named("metal").profile, "Apple M9", 64 * GIB, 48 * GIB)
LINUX = DeviceReport(named("cpu").profile, "EPYC", None, None)
METAL = MemoryOptions(chunk=512)
GPU = DeviceReport(named("cuda").profile, "H200", 139 * GIB, None)


@pytest.fixture(autouse=True)
def _no_other_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory reserved by servers on this machine would be subtracted from what fits."""
    monkeypatch.setattr(memory_plans, "reservations_folder", lambda: tmp_path / "nobody")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    config = {
        "model_type": "qwen3", "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 32,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "rms_norm_eps": 1e-6,
        "vocab_size": 32, "max_position_embeddings": 512, "rope_theta": 1e4,
        "tie_word_embeddings": True,
    }  # fmt: skip
    model = qwen3.Model(qwen3.ModelArgs.from_dict(config))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    return folder


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return command.run("doctor", *arguments, COLUMNS="300")


def test_the_machine_alone_is_well() -> None:
    """In its own process, where nothing else has imported what it looks at."""
    script = "from firn.cli import main; main()"
    result = subprocess.run(
        [sys.executable, "-c", script, "doctor"],
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "300"},
    )
    assert result.returncode == 0, result.stdout
    for word in ("firn", "Python", "mlx", "mlx-lm", "platform", "device", "memory", "disk"):
        assert word in result.stdout
    assert "Nothing is wrong." in result.stdout


def test_a_good_model_is_described(tiny: Path) -> None:
    result = run(str(tiny))
    assert result.returncode == 0, result.stdout
    for text in (
        "qwen3, supported by mlx-lm",
        "in 1 file, float32",
        "512 tokens",
        "128 bytes a token, 64.0 KiB for a full context",
        "yes, with a full context",
        "no chat template",
    ):
        assert text in result.stdout


def test_a_broken_model_exits_1_and_says_why(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    result = run(str(tmp_path))
    assert result.returncode == 1
    assert "The tokenizer is missing" in result.stdout
    assert "The weights are missing" in result.stdout
    assert "2 things are wrong" in result.stdout
    assert "Traceback" not in result.stderr
    assert run(str(tmp_path / "none")).returncode == 1


def test_what_the_chat_template_loses_is_told(tmp_path: Path) -> None:
    told = {}
    for family in ("nemo", "deepseek"):
        (tmp_path / family).mkdir()
        families.write(tmp_path / family, families.FAMILIES[family], families.template(family))
        told[family] = [(f.text, f.mark) for f in template_findings(tmp_path / family)]
    assert (TOOLS_MOVE, "note") in told["nemo"]
    assert [mark for _, mark in told["deepseek"]] == ["ok"]
    families.write(tmp_path, families.FAMILIES["nemo"], None)
    assert list(template_findings(tmp_path)) == []


def test_printing_is_plain(tiny: Path) -> None:
    console = Console(file=io.StringIO(), width=200)
    assert doctor(str(tiny / "none"), console=console) == 1
    assert isinstance(console.file, io.StringIO)
    assert "1 thing is wrong" in console.file.getvalue()


def test_the_built_in_model_and_a_hub_id_are_no_problem() -> None:
    assert [f.mark for f in model_findings(BUILTIN_MODEL)] == ["ok"]
    (finding,) = model_findings("firn-tests/no-such-model")
    assert finding.mark == "note"
    assert "would download it" in finding.text
    for name in ("not an id!", "nonsense"):
        (wrong,) = model_findings(name)
        assert wrong.mark == "problem"
    assert list(model_findings(None)) == []


def test_versions_come_first(tmp_path: Path) -> None:
    topics = [finding.topic for finding in machine_findings(tmp_path)]
    assert topics[:4] == ["firn", "mlx", "mlx-lm", "mlx-vlm"]


# --- does it fit ---------------------------------------------------------------------------


def fits(
    weights_gib: float,
    device: DeviceReport,
    now: SystemMemory,
    *,
    cache: CacheCost | None = None,
    context: int | None = None,
) -> Finding:
    report = ModelReport(
        Path("m"), weights_nbytes=int(weights_gib * GIB), cache=cache, context_length=context
    )
    (finding,) = (f for f in describe_model(report, device, now) if f.topic == "fits")
    return finding


COST = CacheCost(2**19, fixed_nbytes=0, n_layers=2, n_window=0, n_state=0)


@pytest.mark.parametrize(
    ("weights_gib", "device", "now", "mark"),
    [
        (40, MAC, SystemMemory(64 * GIB, 60 * GIB), "ok"),
        (49, MAC, SystemMemory(64 * GIB, 60 * GIB), "problem"),  # the working set, not the memory
        (40, MAC, SystemMemory(64 * GIB, 30 * GIB), "note"),
        (20, LINUX, SystemMemory(16 * GIB, 12 * GIB), "problem"),
        (13, LINUX, SystemMemory(16 * GIB, 12 * GIB), "note"),
        (10, LINUX, SystemMemory(16 * GIB, None), "ok"),
        (100, GPU, SystemMemory(32 * GIB, 16 * GIB), "ok"),  # the host's memory does not matter
        (140, GPU, SystemMemory(900 * GIB, 800 * GIB), "problem"),
    ],
)
def test_whether_weights_fit(
    weights_gib: float, device: DeviceReport, now: SystemMemory, mark: str
) -> None:
    assert fits(weights_gib, device, now).mark == mark


def test_how_long_a_conversation_may_get() -> None:
    now = SystemMemory(16 * GIB, 16 * GIB)
    short = fits(6, LINUX, now, cache=COST, context=100_000)
    n_tokens = int(short.text.split()[-4])
    assert 8192 < n_tokens < 16 * 1024, "less than what weights leave: chunks and queues are in it"
    assert fits(6, LINUX, now, cache=COST, context=10_000).text == "yes, with a full context"
    assert fits(15, LINUX, now, cache=COST, context=10_000).mark == "problem"


def test_the_budget_is_a_table_that_adds_up() -> None:
    report = ModelReport(Path("m"), weights_nbytes=8 * GIB, cache=COST, context_length=100_000)
    rows = list(
        budget_rows(
            machine_of(MAC, SystemMemory(64 * GIB, 40 * GIB)),
            verdict(machine_of(MAC, SystemMemory(64 * GIB, 40 * GIB)), model_of(report), METAL)[0],
            memory_name=MAC.profile.memory_name,
        )
    )
    *taken, (left, what) = rows
    assert sum(nbytes for nbytes, _ in taken) == left > 0
    assert what == "requests and stored prefixes"
    assert "used by other programs" in [text for _, text in rows]
    printed = [f.text for f in describe_model(report, MAC, SystemMemory(64 * GIB, 60 * GIB))]
    assert any(text.endswith("Metal's working set") for text in printed)
    assert any(text.endswith("a prefill chunk while it runs") for text in printed)


@pytest.mark.parametrize(
    ("device", "free_gib", "weights_gib", "token_nbytes"),
    [
        (LINUX, 30, 16, 2**20),
        (LINUX, 20, 8, 2**19),  # too little memory: they stay as they are
        (MAC, 30, 8, 2**19),
    ],
)
def test_a_cpu_computes_in_float32(
    device: DeviceReport, free_gib: int, weights_gib: int, token_nbytes: int
) -> None:
    report = ModelReport(
        Path("m"), weights_nbytes=8 * GIB, float32_nbytes=16 * GIB, n_files=1, cache=COST
    )
    now = SystemMemory(64 * GIB, free_gib * GIB)
    computed = as_computed(report, device, now)
    assert computed.weights_nbytes == weights_gib * GIB
    assert computed.cache is not None
    assert computed.cache.per_token_nbytes == token_nbytes
    (told,) = (f.text for f in describe_model(report, device, now) if f.topic == "weights")
    assert told.startswith("8.0 GiB in 1 file")
    assert ("16.0 GiB in float32" in told) == (weights_gib == 16)


@pytest.mark.parametrize("bits", [None, 4, 8])
def test_what_weights_take_in_float32(bits: int | None, tiny: Path, tmp_path: Path) -> None:
    """The same number that the widening itself counts."""
    config = json.loads((tiny / "config.json").read_text())
    model = qwen3.Model(qwen3.ModelArgs.from_dict(config))
    model.set_dtype(mx.bfloat16)
    if bits is not None:
        nn.quantize(model, group_size=32, bits=bits)
        config["quantization"] = {"group_size": 32, "bits": bits}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text("{}")
    mx.save_safetensors(str(tmp_path / "model.safetensors"), dict(tree_flatten(model.parameters())))
    assert inspect_folder(tmp_path).float32_nbytes == widened_nbytes(model)


# --- the machine ---------------------------------------------------------------------------


def make_root(root: Path, *, limit: str | None = None, used: int = 0) -> Path:
    (root / "proc").mkdir(parents=True)
    (root / "proc/meminfo").write_text(
        "MemTotal:       16 kB\nMemFree: 1 kB\nMemAvailable:   8 kB\nHugePages_Total: 0\n"
    )
    if limit is not None:
        (root / "sys/fs/cgroup").mkdir(parents=True)
        (root / "sys/fs/cgroup/memory.max").write_text(f"{limit}\n")
        (root / "sys/fs/cgroup/memory.current").write_text(f"{used}\n")
    return root


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [
        (None, 0, SystemMemory(16384, 8192)),
        ("max", 0, SystemMemory(16384, 8192)),
        ("99999", 0, SystemMemory(16384, 8192)),
        ("10000", 4000, SystemMemory(10000, 6000)),
        ("10000", 12000, SystemMemory(10000, 0)),
        ("12000", 1000, SystemMemory(12000, 8192)),
    ],
)
def test_memory_on_linux(
    tmp_path: Path, limit: str | None, used: int, expected: SystemMemory
) -> None:
    assert memory(make_root(tmp_path / "root", limit=limit, used=used)) == expected


def test_memory_here() -> None:
    now = memory()
    assert now.total > 0
    assert now.available is None or 0 < now.available <= now.total


def test_memory_on_a_mac() -> None:
    text = (
        "Mach Virtual Memory Statistics: (page size of 16384 bytes)\n"
        "Pages free:                               100.\n"
        "Pages active:                             900.\n"
        "Pages inactive:                            30.\n"
        "Pages speculative:                          4.\n"
        "Pages purgeable:                            1.\n"
        "File-backed pages:                         34.\n"
        "Anonymous pages:                          900.\n"
    )
    assert vm_stat_available(text, page_nbytes=10) == 1350
    assert vm_stat_available("", page_nbytes=10) is None
    assert vm_stat_available("Pages free: 100.\n", page_nbytes=10) is None


def test_a_device_that_multiplies_wrongly_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert product_check.product_error() < product_check.LARGEST_ERROR
    assert any(f.topic == "products" and f.mark == "ok" for f in machine_findings(tmp_path))
    for wrong in (mx.zeros_like, lambda product: product * mx.nan):

        def multiply(left: mx.array, right: mx.array, wrong: object = wrong) -> mx.array:
            return wrong(left @ right) if len(left) > 1 else left @ right  # type: ignore[operator]

        error = product_check.product_error(multiply)
        assert error > 0.5
        monkeypatch.setattr(product_check, "product_error", lambda error=error: error)
        assert any(
            f.topic == "products" and f.mark == "problem" for f in machine_findings(tmp_path)
        )
        monkeypatch.undo()


def test_a_device_that_cannot_multiply_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> float:
        raise RuntimeError("[METAL] Command buffer execution failed")

    monkeypatch.setattr(product_check, "product_error", fails)
    (finding,) = [f for f in machine_findings(tmp_path) if f.topic == "products"]
    assert finding.mark == "problem"
    assert "[METAL]" in finding.text


def test_what_snapshots_keep_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(snapshot_findings(tmp_path, [])) == []
    for free, mark in ((GIB, "note"), (500 * GIB, "ok")):
        monkeypatch.setattr(examine, "disk_free", lambda folder, free=free: free)
        (finding,) = snapshot_findings(tmp_path, ["com.apple.TimeMachine.2026-11-18-101010.local"])
        assert finding.mark == mark
        assert "--ssd-write-budget-gb-per-day" in finding.text
    asked: list[Path] = []
    monkeypatch.setattr(examine.mac, "local_snapshots", lambda f: asked.append(f) or ["one"])
    assert any("1 local snapshots" in f.text for f in machine_findings(tmp_path))
    assert asked == [tmp_path]


def test_disk_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    assert disk_free(tmp_path / "a" / "b") > 0


def test_the_cores_that_a_process_may_use(tmp_path: Path) -> None:
    limits = tmp_path / "sys/fs/cgroup"
    limits.mkdir(parents=True)
    allowed = usable_cores(tmp_path)
    assert allowed >= 1
    for text, n in (("max 100000", allowed), ("50000 100000", 1), ("x", allowed), ("1 0", allowed)):
        (limits / "cpu.max").write_text(text)
        assert usable_cores(tmp_path) == n


def test_addresses_of_this_machine() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.1.2.3", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.com", "")))


def test_sizes_read_well() -> None:
    assert [size(n) for n in (512, 2048, 3 * 2**20, 5 * GIB)] == [
        "512 bytes", "2.0 KiB", "3.0 MiB", "5.0 GiB",
    ]  # fmt: skip


def test_a_cache_folder_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (disk,) = (f for f in machine_findings(tmp_path / "file" / "cache") if f.topic == "disk")
    assert disk.mark == "problem"
    assert f"{tmp_path / 'file'} is not a folder" in disk.text
