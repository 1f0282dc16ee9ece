"""The `firn` command inside the test process.

Building it from its hundred options takes longer than most of what tests do with it, so it is built
once. What only a separate process can show (signals, pipes, imports) has tests that start one.
"""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Mapping
from typing import Any

import pytest
import typer
from typer import testing

from firn.cli.commands import Start, make_cli
from firn.config import Config

_starts: list[Start] = []


def invoke(
    *arguments: str,
    start: Start | None = None,
    env: Mapping[str, str | None] | None = None,
    **more: Any,
) -> testing.Result:
    """start: stands in for the server. more: passed to typer's runner."""
    if start is not None:
        _starts.append(start)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(testing, "_get_command", lambda app: _command(start is not None))
        try:
            return testing.CliRunner(env=env).invoke(typer.Typer(), arguments, **more)
        finally:
            _starts.clear()


def run(*arguments: str, stdin: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    """The result that a process without other settings would give. Raises instead of printing a
    traceback."""
    others = dict.fromkeys(name for name in os.environ if name.startswith("FIRN_"))
    env = {**others, "COLUMNS": "80", **environ}
    result = invoke(*arguments, env=env, input=stdin, catch_exceptions=False)
    return subprocess.CompletedProcess(
        arguments, result.exit_code, stdout=result.stdout, stderr=result.stderr
    )


@functools.cache
def _command(stands_for_server: bool) -> Any:
    return typer.main.get_command(make_cli(_start if stands_for_server else None))


def _start(config: Config) -> int:
    return _starts[-1](config)
