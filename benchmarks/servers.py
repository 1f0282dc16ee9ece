"""The servers under test: how each is started and stopped. firn.bench talks to them.

Real processes on a loopback port; only the standard library is needed here. Each server has an
environment in the lab folder (see setup.sh), a home and a cache folder of its own that are empty when it
starts, and the same linear algebra library.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from report import BenchError

from firn.bench.client import Message, Target, TimedReply, models
from firn.bench.client import words as words  # where scripts expect it

HOST = "127.0.0.1"
START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 60.0
MIB = 1 << 20
APC_BLOCKS_PER_MB = 16
"""mlx-vlm counts memory in blocks of 16 tokens; the dense model has 4 KiB per token."""


def lab() -> Path:
    """The folder that setup.sh filled."""
    return Path(os.environ.get("FIRN_LAB") or Path(tempfile.gettempdir()) / "firn-lab")


def model_folder(name: str) -> Path:
    """A model of the lab by its name, or any folder by its path."""
    for folder in (lab() / "models" / name, Path(name)):
        if (folder / "config.json").exists():
            return folder.resolve()
    raise BenchError(f"there is no model {name}: run benchmarks/setup.sh (FIRN_LAB is {lab()})")


@dataclass(frozen=True, slots=True)
class Kind:
    """How to run one server. Texts are templates over the names in `Server.start`."""

    venv: str
    command: tuple[str, ...]
    packages: tuple[str, ...]
    env: Mapping[str, str]
    cache_folders: tuple[str, ...]
    """Where it keeps what survives a restart."""

    @property
    def python(self) -> Path:
        return lab() / self.venv / "bin" / "python"

    def versions(self) -> str:
        code = (
            "import importlib.metadata as m, sys;"
            "print(', '.join(f'{p} {m.version(p)}' for p in sys.argv[1:]))"
        )
        command = [str(self.python), "-c", code, *self.packages]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()


_ADDRESS = ("--host", HOST, "--port", "{port}")
_MLX_LM = ("python", str(Path(__file__).parent / "bounded.py"), "mlx_lm.server")
_FIRN = Kind(
    venv="firn",
    command=(
        *("firn", "serve", "{model}", *_ADDRESS, "--cache-memory-mb", "{memory_mb}"),
        *("--ssd-cache-dir", "{ssd}", "--ssd-cache-max-gb", "{ssd_gb}"),
    ),
    packages=("firn", "mlx", "mlx-lm"),
    env={},
    cache_folders=("{ssd}",),
)
KINDS: dict[str, Kind] = {
    "firn": _FIRN,
    "firn-before": replace(_FIRN, venv="firn-before"),
    "firn-memory": Kind(
        venv="firn",
        command=(
            *("firn", "serve", "{model}", *_ADDRESS, "--cache-memory-mb", "{memory_mb}"),
            "--no-ssd-cache",
        ),
        packages=("firn", "mlx", "mlx-lm"),
        env={},
        cache_folders=(),
    ),
    "firn-off": Kind(
        venv="firn",
        command=(*("firn", "serve", "{model}", *_ADDRESS, "--disable-prefix-cache"),),
        packages=("firn", "mlx", "mlx-lm"),
        env={},
        cache_folders=(),
    ),
    "mlx-lm": Kind(
        venv="mlx",
        command=(
            *(*_MLX_LM, "--model", "{model}", *_ADDRESS, "--log-level", "WARNING"),
            *("--prompt-cache-bytes", "{memory_nbytes}"),
        ),
        packages=("mlx-lm", "mlx"),
        env={},
        cache_folders=(),
    ),
    "mlx-lm-draft": Kind(
        venv="mlx",
        command=(
            *(*_MLX_LM, "--model", "{model}", *_ADDRESS, "--log-level", "WARNING"),
            *("--prompt-cache-bytes", "{memory_nbytes}", "--draft-model", "{draft}"),
        ),
        packages=("mlx-lm", "mlx"),
        env={},
        cache_folders=(),
    ),
    "mlx-vlm": Kind(
        venv="mlx",
        command=("mlx_vlm.server", "--model", "{model}", *_ADDRESS),
        packages=("mlx-vlm", "mlx", "mlx-lm"),
        env={
            "APC_ENABLED": "1",
            "APC_NUM_BLOCKS": "{apc_blocks}",
            "APC_DISK_PATH": "{ssd}",
            "APC_DISK_MAX_GB": "8",
        },
        cache_folders=("{ssd}",),
    ),
    "vllm-mlx": Kind(
        venv="vllm-mlx",
        command=(
            *("vllm-mlx", "serve", "{model}", *_ADDRESS, "--max-tokens", "512"),
            *("--continuous-batching", "--enable-prefix-cache"),
            *("--cache-memory-mb", "{memory_mb}"),
            *("--ssd-cache-dir", "{ssd}", "--ssd-cache-max-gb", "8"),
        ),
        packages=("vllm-mlx", "mlx", "mlx-lm"),
        env={},
        cache_folders=("{ssd}", "{home}/.cache/vllm-mlx/prefix_cache"),
    ),
    "llama.cpp": Kind(
        venv="llama",
        command=(
            *("python", "-m", "llama_cpp.server", "--model", "{model}", *_ADDRESS),
            *("--interrupt_requests", "false"),  # a second request would end the first
            *("--n_threads", "{cores}", "--n_threads_batch", "{cores}", "--n_ctx", "4096"),
        ),
        packages=("llama-cpp-python",),
        env={},
        cache_folders=(),
    ),
}


def kind_of(name: str) -> Kind:
    """Raises BenchError when there is no such server, or it is not installed."""
    if name not in KINDS:
        raise BenchError(f"there is no server {name}; there are {', '.join(KINDS)}")
    kind = KINDS[name]
    if not (lab() / kind.venv / "bin" / kind.command[0]).exists():
        raise BenchError(f"{name} is not in {lab()}: run benchmarks/setup.sh")
    return kind


def environment(*, preload: bool = True, **more: str) -> dict[str, str]:
    """The environment of every process: offline, and with OpenBLAS in place of MLX's slow BLAS.

    preload: False leaves each server as pip installs it.
    """
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", **more}
    libraries = sorted(glob.glob("/usr/lib/*/openblas-pthread/libopenblas.so.0"))
    if libraries and preload:
        env["LD_PRELOAD"] = libraries[0]
    return env


# --- running -------------------------------------------------------------------------------


@dataclass(eq=False)
class Server:
    """A running server. Owner: whoever started it, until `stop`."""

    name: str
    process: subprocess.Popen[bytes]
    port: int
    target: Target
    startup_s: float
    cache_folders: tuple[Path, ...]

    @classmethod
    def start(
        cls,
        name: str,
        model: Path,
        *,
        memory_mb: int,
        ssd_gb: int = 8,
        fresh: bool = True,
        preload: bool = True,
        draft: Path | None = None,
    ) -> Server:
        """fresh: with nothing on disk; otherwise with what the last server of this name left.
        draft: the small model of a server that drafts with one."""
        kind, run = kind_of(name), lab() / "run" / name
        if fresh:
            shutil.rmtree(run, ignore_errors=True)
        # mlx-lm fails to list its model when there is no hub cache.
        for folder in ("ssd", "home/.cache/huggingface/hub"):
            (run / folder).mkdir(parents=True, exist_ok=True)
        values = {
            "model": model,
            "draft": draft or model,
            "port": free_port(),
            "memory_mb": memory_mb,
            "memory_nbytes": memory_mb * MIB,
            "ssd_gb": ssd_gb,
            "apc_blocks": max(memory_mb * APC_BLOCKS_PER_MB, 64),
            "ssd": run / "ssd",
            "home": run / "home",
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2,
        }
        program, *arguments = (word.format(**values) for word in kind.command)
        env = {key: value.format(**values) for key, value in kind.env.items()}
        log = run / "log.txt"
        began = time.perf_counter()
        with log.open("ab") as out:
            process = subprocess.Popen(
                [str(lab() / kind.venv / "bin" / program), *arguments],
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment(preload=preload, HOME=str(run / "home"), **env),
                start_new_session=True,
            )
        port = int(str(values["port"]))
        folders = tuple(Path(f.format(**values)) for f in kind.cache_folders)
        target = Target(f"http://{HOST}:{port}", str(model), name)
        server = cls(name, process, port, target, 0.0, folders)
        try:
            server.target = replace(target, model=server._wait(model, log))
        except BaseException:
            server.stop()
            raise
        server.startup_s = time.perf_counter() - began
        return server

    def chat(self, messages: Sequence[Message], max_tokens: int, **options: Any) -> TimedReply:
        return self.target.chat(messages, max_tokens, **options)

    def disk_nbytes(self) -> int:
        """The total length of its files."""
        files = (f for folder in self.cache_folders for f in folder.rglob("*"))
        total = 0
        for file in files:
            with contextlib.suppress(FileNotFoundError):
                total += file.lstat().st_size if file.is_file() else 0
        return total

    def stop(self) -> None:
        """Asks it to end; a server that does not is killed, with the processes it started."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(STOP_TIMEOUT_S)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _wait(self, model: Path, log: Path) -> str:
        """Waits until it answers. Returns the model's name in its API."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise BenchError(f"{self.name} ended with {self.process.returncode}: see {log}")
            listed = _listed(self.target.url)
            if listed is not None:
                # mlx-lm lists all models on the machine; the one it serves is named like our folder.
                ours = [name for name in listed if Path(name).name == model.name]
                return (ours or listed or [str(model)])[0]
            time.sleep(0.1)
        raise BenchError(f"{self.name} did not answer in {START_TIMEOUT_S:.0f} s: see {log}")


def _listed(url: str) -> list[str] | None:
    """Names of the models; None: not up yet."""
    try:
        return models(url, timeout_s=2)
    except BenchError:
        return None


def free_port() -> int:
    with socket.socket() as s:
        s.bind((HOST, 0))
        return int(s.getsockname()[1])


@dataclass(eq=False)
class Bare:
    """A running bare.py: an mlx-lm loop that does the same work without any server."""

    process: subprocess.Popen[str]
    errors: Path

    @classmethod
    def start(cls, model: Path) -> Bare:
        script, errors = Path(__file__).with_name("bare.py"), lab() / "run" / "bare.txt"
        errors.parent.mkdir(parents=True, exist_ok=True)
        with errors.open("w") as err:
            process = subprocess.Popen(
                [str(kind_of("mlx-lm").python), str(script), str(model)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=err,
                text=True,
                env=environment(),
            )
        return cls(process, errors)

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        assert self.process.stdin
        assert self.process.stdout
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            last = (self.errors.read_text().strip().splitlines() or ["no output"])[-1]
            raise BenchError(f"the bare loop failed: {last}")
        result: dict[str, Any] = json.loads(answer)
        return result

    def __enter__(self) -> Bare:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.communicate()
