"""Other people's clients and tests against a live server: `make suites`.

They are installed from the package index into build/suites, an environment of their own, and talk to a
server on this machine alone. Each file of tests/suites is one suite. What does not apply is skipped or
expected to fail, with a reason; the table at the end counts by reason.

    python tools/suites.py [--model firn-demo] [words of suites ...]
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from firn.demo.server import ServerProcess

ROOT = Path(__file__).parents[1]
SUITES = ROOT / "tests" / "suites"
HOME = ROOT / "build" / "suites"
PYTHON = HOME / "venv" / "bin" / "python"
DATA = HOME / "data"
ARCHIVES = (("bfcl-eval==2026.3.23",), ("jsonschema==4.26.0", "--no-binary", "jsonschema"))
"""Packages whose data is read, with options for pip; they are not installed."""
MAX_REASON_CHARS = 70
TIMEOUT_S = "1800"
"""A fixture may ask hundreds of questions, on a busy machine."""


@dataclass
class Counts:
    """What became of one suite's tests."""

    n_passed: int = 0
    failed: list[str] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    """Why tests did not apply."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="only suites with one of these in their names")
    parser.add_argument("--model", default="firn-demo", help="what the server serves")
    args = parser.parse_args()
    files = [f for f in sorted(SUITES.glob("suite_*.py")) if _chosen(f.stem, args.words)]
    if not files:
        print(f"No suite has {' or '.join(args.words)} in its name.")
        return 1
    install()
    server = ServerProcess(args.model, "--no-ssd-cache", log=HOME / "server.log")
    try:
        results = {file.stem: run(file, server.url, args.model) for file in files}
    finally:
        server.stop()
    return report(results)


def _chosen(name: str, words: list[str]) -> bool:
    return not words or any(word in name for word in words)


def install() -> None:
    """The environment, made again when the requirements change."""
    wanted = (SUITES / "requirements.txt").read_text() + repr(ARCHIVES)
    stamp = HOME / hashlib.sha256(wanted.encode()).hexdigest()[:16]
    if stamp.exists():
        return
    print(f"Installing the suites into {HOME.relative_to(ROOT)}; this takes a few minutes.")
    subprocess.run([sys.executable, "-m", "venv", "--clear", PYTHON.parents[1]], check=True)
    pip = [PYTHON, "-m", "pip", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "-r", SUITES / "requirements.txt"], check=True)
    for archive in ARCHIVES:
        subprocess.run([*pip, "download", "--no-deps", "-d", DATA, *archive], check=True)
    for old in HOME.glob("[0-9a-f]" * 16):
        old.unlink()
    stamp.touch()


def run(file: Path, url: str, model: str) -> Counts:
    """One suite, in a process of its own. What it prints is shown as it comes."""
    print(f"\n{file.stem}", flush=True)
    written = HOME / f"{file.stem}.xml"
    written.unlink(missing_ok=True)
    environment = {
        **os.environ,
        "PYTHONPATH": str(SUITES),
        "FIRN_SUITES_URL": url,
        "FIRN_SUITES_MODEL": model,
        "FIRN_SUITES_DATA": str(DATA),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # it would ask the internet for prices
        "NO_PROXY": "127.0.0.1",
    }
    options = ("-q", "--tb=short", "-p", "no:cacheprovider", "-p", "builtin_model", "-W", "ignore")
    places = ("-c", os.devnull, "--rootdir", SUITES, "--confcutdir", SUITES)
    modes = ("-o", "asyncio_mode=auto", "--timeout", TIMEOUT_S, f"--junitxml={written}")
    command = [PYTHON, "-m", "pytest", *options, *places, *modes, file]
    subprocess.run(command, env=environment, cwd=HOME)
    return counts(written)


def counts(written: Path) -> Counts:
    result = Counts()
    if not written.exists():
        result.failed.append("the suite itself")
        return result
    for case in ET.parse(written).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]} {case.get('name')}"
        outcomes = list(_outcomes(case))
        if any(kind != "skipped" for kind, _ in outcomes):
            result.failed.append(name)
        elif outcomes:
            result.reasons[_short(outcomes[0][1])] += 1
        else:
            result.n_passed += 1
    return result


def _outcomes(case: ET.Element) -> Iterator[tuple[str, str]]:
    for child in case:
        if child.tag in ("failure", "error", "skipped"):
            yield child.tag, child.get("message") or ""


def _short(reason: str) -> str:
    line = " ".join(reason.split())
    return line if len(line) <= MAX_REASON_CHARS else f"{line[:MAX_REASON_CHARS]}..."


def report(results: dict[str, Counts]) -> int:
    print("\nsuite                     passed  failed  not applicable")
    for name, result in results.items():
        n_apart = result.reasons.total()
        print(f"{name:<25} {result.n_passed:>6} {len(result.failed):>7} {n_apart:>15}")
        for reason, n in result.reasons.most_common():
            print(f"    {n:>4}  {reason}")
        for failed in result.failed:
            print(f"    FAILED {failed}")
    return 1 if any(result.failed for result in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
