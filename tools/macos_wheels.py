"""Does firn install on Macs? Resolves pyproject.toml for Apple silicon, with wheels alone.

    python tools/macos_wheels.py [--python 3.11 3.14]

For each version of Python and each extra, uv looks for a set of wheels that a Mac would take: one that
is missing would have to be compiled there, or does not exist. Runs anywhere; needs a package index.
uv is taken from the PATH, or installed into build/uv.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
PLATFORM = "aarch64-apple-darwin"
OLDEST = "14.0"
"""The oldest macOS that README promises."""
LINUX_ONLY = frozenset({"cuda13"})


def extras(pyproject: str) -> list[str]:
    """Those that a Mac may be asked to install."""
    known = tomllib.loads(pyproject)["project"].get("optional-dependencies", {})
    return sorted(set(known) - LINUX_ONLY)


def uv() -> str:
    if there := shutil.which("uv"):
        return there
    folder = ROOT / "build" / "uv"
    if not (folder / "bin" / "uv").exists():
        venv.create(folder, with_pip=True, clear=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-qq", "uv"]
        subprocess.run(pip, check=True)
    return str(folder / "bin" / "uv")


def command(uv: str, pyproject: Path, python: str, extra: str) -> list[str]:
    words = [uv, "pip", "compile", str(pyproject), "--quiet", "--no-config", "--no-header"]
    words += ["--python-platform", PLATFORM, "--python-version", python]
    words += ["--only-binary", ":all:"]
    return [*words, "--extra", extra] if extra else words


def faults(uv: str, pyproject: Path, pythons: Sequence[str]) -> Iterator[str]:
    environ = os.environ | {"MACOSX_DEPLOYMENT_TARGET": OLDEST}
    for python in pythons:
        for extra in ("", *extras(pyproject.read_text())):
            words = command(uv, pyproject, python, extra)
            done = subprocess.run(words, capture_output=True, text=True, env=environ)
            n = sum("==" in line for line in done.stdout.splitlines())
            what = f"Python {python}{f', [{extra}]' if extra else ''}"
            print(f"{what}: {f'{n} wheels' if not done.returncode else 'no'}", flush=True)
            if done.returncode:
                yield f"{what}\n{done.stderr.strip()}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--python", nargs="+", default=PYTHONS, metavar="VERSION")
    pythons: Sequence[str] = parser.parse_args(arguments).python
    found = list(faults(uv(), ROOT / "pyproject.toml", pythons))
    for fault in found:
        print(f"\nnot installable: {fault}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
