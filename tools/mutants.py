"""Hand-made bugs that the tests must find: `make mutants`.

tools/mutants.toml lists them. Each is applied to a copy of the tree, and the tests that guard the
place are run there: one of them must fail. A mutant that survives is a behaviour that no test
checks. One whose old text no longer occurs fails too: the code has changed, and the list has to
follow.

    python tools/mutants.py [--jobs 2] [words of names ...]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent
COPIED = (
    "src",
    "tests",
    "docs",
    "benchmarks",
    "contrib",
    "tools",
    "pyproject.toml",
    "Makefile",
    "README.md",
)
TIMEOUT_S = 600
FAILED = 1
"""pytest's exit status if tests ran and some failed."""
LIBRARIES = [
    "anthropic",
    "fastapi",
    "hypothesis.stateful",
    "mlx_lm.models.llama",
    "openai",
    "pytest",
]
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(LIBRARIES)
"""Importing these takes several times as long as most of the tests."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A bug: `new` replaces `old` in this file. tests: arguments for pytest."""

    name: str
    bug: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    mutant: Mutant
    status: str
    """killed, survived, or what is wrong with the mutant itself."""
    detail: str
    seconds: float


def read(path: Path) -> list[Mutant]:
    with path.open("rb") as file:
        entries = tomllib.load(file)["mutant"]
    return [Mutant(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]


def fault(mutant: Mutant, root: Path) -> str:
    """What is wrong with the mutant itself; '' if it can be tried."""
    path = root / mutant.file
    if not path.exists():
        return f"{mutant.file} is gone"
    n = path.read_text().count(mutant.old)
    if n != 1:
        return f"its old text occurs {n} times in {mutant.file}"
    missing = [t for t in mutant.tests if not (root / t.partition("::")[0]).exists()]
    return f"{missing[0]} is gone" if missing else ""


def copy_tree(root: Path, to: Path) -> None:
    skip = shutil.ignore_patterns("__pycache__", ".*")
    for name in COPIED:
        if (root / name).is_dir():
            shutil.copytree(root / name, to / name, ignore=skip)
        elif (root / name).exists():
            shutil.copy2(root / name, to / name)


def run_tests(tree: Path, tests: Sequence[str]) -> tuple[int, str]:
    """pytest's exit status and the last line of its output."""
    with tempfile.NamedTemporaryFile("r", prefix="firn-mutants-") as output:
        process = FORKS.Process(target=_pytest, args=(str(tree), tuple(tests), output.name))
        process.start()
        process.join(TIMEOUT_S)
        if process.exitcode is None:
            process.kill()
            process.join()
            return FAILED, "it hangs"
        lines = [line for line in output.read().splitlines() if line.strip()]
    failures = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return process.exitcode, (failures or lines or ["no output"])[-1]


def _pytest(tree: str, tests: Sequence[str], output: str) -> None:
    """Runs in a process of its own, which has imported the libraries but nothing of firn."""
    out = os.open(output, os.O_WRONLY)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.chdir(tree)
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # for servers, too
    sys.path[:0] = paths = [f"{tree}/src", tree]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    status = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests])
    sys.stdout.flush()
    os._exit(int(status))


def try_out(mutant: Mutant, tree: Path) -> Verdict:
    """Applies it to this copy, runs its tests, and reverts it."""
    began = time.monotonic()
    path = tree / mutant.file
    good = path.read_text()
    path.write_text(good.replace(mutant.old, mutant.new))
    try:
        status, last = run_tests(tree, mutant.tests)
    finally:
        path.write_text(good)
    names = {0: "survived", FAILED: "killed"}
    return Verdict(mutant, names.get(status, "broken"), last, time.monotonic() - began)


def try_all(mutants: Sequence[Mutant], root: Path, *, n_jobs: int) -> list[Verdict]:
    with tempfile.TemporaryDirectory(prefix="firn-mutants-") as folder:
        trees: SimpleQueue[Path] = SimpleQueue()
        for i in range(n_jobs):
            copy_tree(root, Path(folder) / str(i))
            trees.put(Path(folder) / str(i))

        def one(mutant: Mutant) -> Verdict:
            tree = trees.get()
            try:
                verdict = try_out(mutant, tree)
            finally:
                trees.put(tree)
            show(verdict)
            return verdict

        with ThreadPoolExecutor(n_jobs) as pool:
            return list(pool.map(one, mutants))


def show(verdict: Verdict) -> None:
    mutant = verdict.mutant
    print(f"{verdict.status:8} {verdict.seconds:5.1f} s  {mutant.name}", flush=True)
    if verdict.status != "killed":
        print(f"         {mutant.bug}\n         {mutant.file}: {verdict.detail}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("words", nargs="*", help="only those with one of these in their names")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--list", type=Path, default=HERE / "mutants.toml")
    parser.add_argument("--check", action="store_true", help="only see whether they fit the code")
    args = parser.parse_args()
    mutants = read(args.list)
    if args.words:
        mutants = [m for m in mutants if any(word in m.name for word in args.words)]
        if not mutants:
            print(f"no mutant has one of these in its name: {', '.join(args.words)}")
            return 1
    faults = {m.name: why for m in mutants if (why := fault(m, ROOT))}
    for name, why in faults.items():
        print(f"unusable {name}: {why}")
    if faults or args.check:
        return bool(faults)
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    status, last = run_tests(ROOT, tests)
    if status:
        print(f"the tests fail without any mutant: {last}")
        return 1
    verdicts = try_all(mutants, ROOT, n_jobs=args.jobs)
    n_killed = sum(v.status == "killed" for v in verdicts)
    print(f"{n_killed} of {len(verdicts)} killed")
    return n_killed < len(verdicts)


if __name__ == "__main__":
    sys.exit(main())
