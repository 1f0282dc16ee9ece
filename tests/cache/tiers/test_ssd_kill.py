"""SIGKILL at every step: no temp file stays, no wrong bytes are served, the limit holds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_sigkill_at_every_step(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.cache.tiers.killed", str(tmp_path / "cache")]
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=100, check=False, cwd=ROOT
    )
    assert run.returncode == 0, run.stderr
    n_steps, n_killed = map(int, run.stdout.split())
    assert n_steps > 40
    assert n_killed > 0.9 * n_steps
