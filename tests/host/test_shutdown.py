"""A server that is told to stop ends in bounded time, even if one of its threads never would.

Slow: real servers, each of which must start before it can be stopped.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

SCRIPT = """
import re, sys, threading
from pathlib import Path, PosixPath
from firn import app
from firn.config import CacheConfig, Config, ModelConfig, ServerConfig

app.DRAIN_S, app.LEAVE_S = 0.2, {leave_s}
built, bound, stopping = app.build, app.kill_after, threading.Event()

def kill_after(seconds):
    bound(seconds)
    stopping.set()

app.kill_after = kill_after

def build(config, **more):
    server = built(config, **more)
    server.pool.submit("", {hang})
    return server

app.build = build
off = CacheConfig(disable_prefix_cache=True, warm_prompts={warm})
config = Config(server=ServerConfig(port=0), model=ModelConfig(path="firn-demo"), cache=off)
sys.exit(app.serve(config))
"""


FAILING = """
import sys
import mlx.core as mx
from firn.core.errors import SetupError
from firn import app
from firn.cli import main
from firn.engine import Engine

def load():
    arrays = [mx.random.normal((300, 300)) for _ in range(200)]
    mx.eval(arrays)
    many = [[object() for _ in range(1000)] for _ in range(300)]
    raise SetupError("no weights")

app.build = lambda config, **more: Engine(load, print, on_death=print).start()
sys.argv = ["firn", "serve", "--port", "0"]
main()
"""
START = """
import sys
import mlx.core as mx
from firn import app
from firn.cli import main
from firn.engine import Engine, engine

def load():
    print("loading", flush=True)
    arrays = [mx.random.normal((300, 300)) for _ in range(200)]
    mx.eval(arrays)
    while True:
        mx.eval([a @ a for a in arrays])

engine.START_FAILED_S = 3600.0
app.build = lambda config, **more: Engine(load, print, on_death=print).start()
sys.argv = ["firn", "serve", "--port", "0"]
main()
"""


def test_a_start_that_fails_ends_in_one_line() -> None:
    """Not in an abort while the engine's thread is still ending."""
    command = [sys.executable, "-c", FAILING]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stderr) == (1, "firn: no weights\n")


def test_ctrl_c_while_the_model_is_loaded() -> None:
    """It does not wait: the thread that loads would go on for minutes."""
    process = subprocess.Popen(
        [sys.executable, "-c", START],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "loading\n"
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, told) == (130, "")


SAVING = """
import sys
from firn import app
from firn.config import CacheConfig, Config, ModelConfig, ServerConfig

close = app.Server.close

def slowly(server):
    print("saving", flush=True)
    sys.stdin.readline()
    close(server)

app.Server.close = slowly
off = CacheConfig(disable_prefix_cache=True)
config = Config(server=ServerConfig(port=0), model=ModelConfig(path="firn-demo"), cache=off)
sys.exit(app.serve(config))
"""


@pytest.mark.parametrize(
    ("second", "code"), [(signal.SIGTERM, 130), (signal.SIGINT, 130), (signal.SIGHUP, 0)]
)
def test_a_second_signal_while_records_are_written(second: signal.Signals, code: int) -> None:
    """The event loop has already ended. A closed terminal alone is no reason to give up."""
    process = subprocess.Popen(
        [sys.executable, "-c", SAVING],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        while "serves" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "saving\n"
        process.send_signal(second)
        if code:
            process.wait(60)
        else:
            process.communicate("\n", timeout=60)
    finally:
        process.kill()
    assert process.returncode == code


def told_to_stop(
    hang: str,
    *,
    leave_s: float = 60.0,
    signals: Sequence[signal.Signals] = (signal.SIGTERM,),
    command: Sequence[str] = (),
    warm: Path | None = None,
    until: str = "serves",
) -> tuple[int, str]:
    """Exit code and log of a server in which a tokenizer thread runs `hang`."""
    script = SCRIPT.format(hang=hang, leave_s=leave_s, warm=repr(warm))
    process = subprocess.Popen(
        [*command, sys.executable, "-c", script],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    seen = ""
    try:
        while until not in seen:
            line = process.stderr.readline()
            assert line, seen
            seen += line
        for number in signals:
            process.send_signal(number)
        _, rest = process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode, seen + rest


def test_a_thread_that_waits_for_ever_is_left_behind() -> None:
    code, log = told_to_stop("threading.Event().wait")
    assert code == 0
    assert "exiting although threads still run: firn-tokenize" in log


def test_a_closed_terminal_is_a_stop_like_any_other() -> None:
    """The shell sends SIGHUP again, after the system has sent it."""
    code, log = told_to_stop("lambda: None", signals=[signal.SIGHUP, signal.SIGHUP])
    assert code == 0
    assert log.count("stopping; ") == 1


def test_a_stop_while_prompts_are_computed_at_the_start(tmp_path: Path) -> None:
    warm = tmp_path / "warm.json"
    warm.write_text(json.dumps(["one two three four five " * 1000 + str(i) for i in range(20)]))
    code, log = told_to_stop("lambda: None", warm=warm, until="warm prompt 1 of 20")
    assert code == 0
    assert "of 20 skipped" in log
    assert "serves" not in log
    assert "failed" not in log


def test_nohup_outlives_the_terminal() -> None:
    signals = [signal.SIGHUP, signal.SIGTERM]
    code, log = told_to_stop("lambda: None", signals=signals, command=["nohup"])
    assert code == 0, "of SIGTERM: two signals that stop would have ended it at once"
    assert log.count("stopping; ") == 1
    assert "threads still run" not in log, "those that end are waited for"


def test_when_nothing_else_helps_the_process_is_ended() -> None:
    """Python's own lock is held, so none of our code can run any more."""
    hang = "lambda: (stopping.wait(), re.match('(a*)*b', 'a' * 60))"
    code, log = told_to_stop(hang, leave_s=1.0)
    assert code == 1
    assert "Timeout" in log
    assert "firn-tokenize" not in log.partition("Timeout")[0]
