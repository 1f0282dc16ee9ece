"""A server with few descriptors and many open connections: health checks and the cache still work.

Slow: a real server with hundreds of connections.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from firn.demo.server import _free_port

N_FILES = 160
HALF = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
BODY = {"messages": [{"role": "user", "content": "Hello! " * 60}], "max_tokens": 2}


SCRIPT = """
import resource, sys
from pathlib import Path
from firn import app
from firn.config import CacheConfig, Config, ModelConfig, ServerConfig

resource.setrlimit(resource.RLIMIT_NOFILE, ({n}, {n}))  # mlx-lm has set its own
sys.exit(app.serve(Config(
    server=ServerConfig(port={port}, api_keys=("secret",), admin_keys=("root",)),
    model=ModelConfig(path="firn-demo"),
    cache=CacheConfig(ssd_cache_dir=Path({folder!r}), cache_block_tokens=16),
)))
"""


@contextmanager
def serving(folder: Path) -> Iterator[tuple[str, int]]:
    """The address and pid of a real server that may open at most N_FILES files."""
    port = _free_port()
    script = SCRIPT.format(n=N_FILES, port=port, folder=str(folder / "cache"))
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-c", script], stdout=log, stderr=log)
    try:
        url = f"http://127.0.0.1:{port}"
        while process.poll() is None:
            try:
                httpx.get(f"{url}/ready", timeout=30)
                break
            except httpx.TransportError:
                time.sleep(0.02)
        yield url, process.pid
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="no /proc")
def test_half_requests_take_no_descriptor_from_others(tmp_path: Path) -> None:
    with serving(tmp_path) as (url, pid), ExitStack() as held:
        port = int(url.rpartition(":")[2])
        for _ in range(3 * N_FILES):
            sock = held.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
            sock.sendall(HALF)
            assert len(os.listdir(f"/proc/{pid}/fd")) < N_FILES
        assert httpx.get(f"{url}/health", timeout=30).json()["status"] == "ok"
        headers = {"x-api-key": "secret"}
        reply = httpx.post(f"{url}/v1/chat/completions", json=BODY, headers=headers, timeout=60)
        assert reply.status_code == 200
        headers = {"x-api-key": "root"}
        while True:  # records are written in the background, within seconds
            stats = httpx.get(f"{url}/v1/cache/stats", headers=headers, timeout=30).json()
            assert stats["ssd"]["folder"]["state"] == "ok"
            if stats["ssd"]["records"]:
                break
            time.sleep(0.02)


def test_the_limit_is_raised_as_far_as_it_goes() -> None:
    script = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, {hard}));"
        "from firn.host.machine import raise_descriptor_limit as r; n = r();"
        "assert n == resource.getrlimit(resource.RLIMIT_NOFILE)[0]; print(n)"
    )
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    for hard, want in ((200, 200), (5000, 5000), (64, 64)):
        if most != resource.RLIM_INFINITY and hard > most:
            continue
        command = [sys.executable, "-c", script.format(hard=hard)]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        assert int(run.stdout) == want


def test_where_mlx_lm_cannot_be_imported_one_line_says_why() -> None:
    limits = "resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))"
    script = f"import resource; {limits}; from firn.cli import main; main()"
    command = [sys.executable, "-c", script, "serve"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 1
    assert run.stderr.strip().splitlines()[-1].startswith("firn: mlx-lm needs a limit of 4096")
