"""contrib/firn.5s.py, as SwiftBar runs it, over a live server."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from firn.config import CacheConfig, Config, ModelConfig, ServerConfig
from tests.api.real import Real, serving

SCRIPT = Path(__file__).resolve().parents[1] / "contrib" / "firn.5s.py"
KEY = "a-key"


@pytest.fixture(scope="module")
def server() -> Iterator[Real]:
    config = Config(
        model=ModelConfig(path="firn-demo"),
        cache=CacheConfig(no_ssd_cache=True),
        server=ServerConfig(api_keys=(KEY,)),
    )
    with serving(Path("firn-demo"), config=config) as real:
        yield real


def menu(url: str, path: Path, *, key: str = KEY) -> list[str]:
    """What the script prints. path: the PATH that a menu bar program has."""
    environ = {
        "PATH": str(path), "HOME": str(path), "FIRN_URL": url, "FIRN_API_KEY": key,
        "PYTHONIOENCODING": "utf-8",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-I", str(SCRIPT)], capture_output=True, text=True, env=environ,
        timeout=60, encoding="utf-8",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_what_a_server_is_doing(server: Real, tmp_path: Path) -> None:
    client = server.openai().with_options(api_key=KEY)
    text = "The badge number of Dana is 4100. " * 40
    for _ in range(2):
        client.completions.create(model="firn-demo", prompt=text, max_tokens=4)
    title, bar, *items = menu(server.url, tmp_path)
    assert (title, bar) == ("firn", "---")
    assert items[0] == "firn-demo"
    assert "0 writing, 0 reading, 0 waiting" in items
    (reused,) = [item for item in items if "were reused" in item]
    assert not reused.startswith("0%")
    assert any("of prefixes in memory" in item for item in items)
    assert f"Open the dashboard | href={server.url}" in items
    assert not any("bash=" in item for item in items), "firn is not in the PATH"


def test_a_service_can_be_restarted_from_it(server: Real, tmp_path: Path) -> None:
    firn = tmp_path / "firn"
    firn.write_text("#!/bin/sh\n")
    firn.chmod(0o755)
    last = menu(server.url, tmp_path)[-1]
    assert f'bash="{firn}" param1=service param2=restart terminal=false' in last


def test_what_went_wrong_is_in_the_menu(server: Real, tmp_path: Path) -> None:
    title, bar, why, *_ = menu(server.url, tmp_path, key="wrong")
    assert (title, bar) == ("firn !", "---")
    assert "401" in why
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        title, bar, why, *_ = menu(url, tmp_path)
    assert (title, bar) == ("firn –", "---")
    assert url in why


def test_it_runs_by_itself() -> None:
    assert os.access(SCRIPT, os.X_OK)
    assert SCRIPT.read_text().startswith("#!/usr/bin/env python3\n")
