"""`make real`: SmolLM2-135M-Instruct, made from its package as `firn serve smollm2` makes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.utils import dequantize_model, load_model, load_tokenizer

from firn.assembly import model_names
from firn.demo.server import ServerProcess

Figure = Callable[[str], None]
FIGURES = pytest.StashKey[list[str]]()
START_S = 300.0
"""A busy machine needs time for 135 million parameters."""


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty home folder for this process and its servers."""
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(folder))
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.setenv("MLX_ENABLE_TF32", "0")  # some Macs would round float32 products otherwise
        yield folder


@pytest.fixture(scope="session")
def folder(home: Path) -> Path:
    return model_names.resolve("smollm2")


@pytest.fixture(scope="session")
def server(folder: Path, home: Path) -> Iterator[ServerProcess]:
    child = start(home, "shared")
    yield child
    child.stop()


def start(home: Path, name: str, *flags: str) -> ServerProcess:
    """A server with its own folder of records, which it finds again when it is restarted."""
    flags = ("--ssd-cache-dir", str(home / name), *flags)
    return ServerProcess("smollm2", *flags, log=home / f"{name}.log", start_s=START_S)


@pytest.fixture(scope="session")
def reference(folder: Path) -> tuple[Any, Any]:
    """mlx-lm's model and tokenizer from that folder, with the weights dequantised to float32."""
    model, _ = load_model(folder)
    model = dequantize_model(model)
    mx.eval(model.parameters())
    return model, load_tokenizer(folder)


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Figure:
    """Adds a line to the report at the end, which docs/decisions.md quotes."""
    figures = request.config.stash.setdefault(FIGURES, [])
    return lambda text: figures.append(f"{request.node.name}: {text}")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if figures := config.stash.get(FIGURES, []):
        terminalreporter.section("figures")
        terminalreporter.write_line("\n".join(figures))
