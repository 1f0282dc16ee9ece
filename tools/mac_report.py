"""What only a Mac can tell about firn, in half an hour, as a report to send.

    make mac                                     all of it, but the panic recipe
    make mac ARGS="--models A B"                 other models
    make mac ARGS="--panic"                      the panic recipe alone: see below
    make mac ARGS="--quick"                      a few minutes on the built-in models, on any machine

The report is build/mac-report.md; each part is on the disk before the next one begins. A part that
fails says so, and the others go on. Nothing is sent anywhere.

`--panic` repeats for ten minutes what has made macOS panic with other servers (ml-explore/mlx#3186):
long prompts, one after the other, while memory is taken and given back. It asks first. A panic
restarts the Mac, and what is not saved is lost.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

ROOT = Path(__file__).resolve().parents[1]
REPORT = ROOT / "build" / "mac-report.md"
MODELS = ("mlx-community/Llama-3.2-1B-Instruct-4bit", "mlx-community/Qwen3-8B-4bit")
BUILTIN = ("firn-demo", "firn-demo-hybrid")
LINE = "Shelf {n} of the store holds {a} boxes of screws, {b} lamps and {c} ladders."
START_S, REQUEST_S = 900.0, 1800.0
PANIC_S = 600.0

MLX_LM = """
import json, sys
from mlx_lm import load, stream_generate
from mlx_lm.sample_utils import make_sampler
model, tokenizer = load(sys.argv[1])
tokenizer._eos_token_ids = set()  # replies of one length
prompt = tokenizer.encode(sys.argv[2])
for _ in range(2):  # the first warms up
    for last in stream_generate(model, tokenizer, prompt, int(sys.argv[3]), sampler=make_sampler(0.0)):
        pass
print(json.dumps({"tokens_per_s": last.generation_tps, "n": last.generation_tokens}))
"""


@dataclass(frozen=True)
class Sizes:
    """Of the parts. Tokens, but for seconds and rounds."""

    reply: int = 256
    rounds: int = 5
    pauses_s: tuple[float, ...] = (0.0, 0.5, 1.5, 10.0)
    restored: int = 8192
    exact: int = 32768
    panic_s: float = PANIC_S


QUICK = Sizes(reply=24, rounds=1, pauses_s=(0.0, 0.5), restored=700, exact=1500, panic_s=3.0)


# --- the report ----------------------------------------------------------------------------


class Report:
    """A file that is complete up to the part that is running: a Mac may panic."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = path.open("w", encoding="utf-8")
        self.n_failed = 0

    def write(self, text: str) -> None:
        print(text, flush=True)
        self._file.write(f"{text}\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def part(self, title: str, run: Callable[[], Iterator[str]]) -> None:
        self.write(f"\n## {title}\n")
        began = time.monotonic()
        try:
            for line in run():
                self.write(line)
        except Exception:  # the other parts still tell something
            self.n_failed += 1
            self.write(f"FAILED\n```\n{traceback.format_exc()}```")
        self.write(f"\n({time.monotonic() - began:.0f} s)")


# --- a server ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reply:
    text: str
    first_s: float
    tokens_per_s: float
    n_prompt: int
    n_cached: int


@dataclass(frozen=True)
class Server:
    port: int
    process: subprocess.Popen[bytes]

    def complete(self, prompt: str, n: int) -> Reply:
        body = {
            "prompt": prompt, "max_tokens": n, "temperature": 0, "stream": True,
            "ignore_eos": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        began = time.perf_counter()
        pieces: list[str] = []
        times: list[float] = []
        usage: dict[str, Any] = {}
        with self._post("/v1/completions", body) as answer:
            for raw in answer:
                line = raw.decode().removeprefix("data:").strip()
                if not line or line.startswith(":") or line == "[DONE]":
                    continue
                event = json.loads(line)
                if "error" in event:
                    raise RuntimeError(f"the server answered {line}")
                usage = event.get("usage") or usage
                if text := "".join(choice.get("text", "") for choice in event.get("choices", ())):
                    pieces.append(text)
                    times.append(time.perf_counter() - began)
        n_new = int(usage["completion_tokens"])
        speed = (n_new - 1) / (times[-1] - times[0]) if len(times) > 1 else float("nan")
        cached = int(usage.get("prompt_tokens_details", {}).get("cached_tokens", 0))
        return Reply("".join(pieces), times[0], speed, int(usage["prompt_tokens"]), cached)

    def n_tokens(self, text: str) -> int:
        with self._post("/v1/tokenize", {"prompt": text}) as answer:
            return int(json.load(answer)["count"])

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        try:
            return urllib.request.urlopen(request, timeout=REQUEST_S)
        except HTTPError as e:
            raise RuntimeError(f"{path}: {e.code} {e.read().decode(errors='replace')}") from e

    def text_of(self, n_tokens: int, *, seed: int) -> str:
        """About so many tokens, others for each seed."""
        some = story(50, seed=seed)
        return story(max(1, round(50 * n_tokens / self.n_tokens(some))), seed=seed)


def story(n_lines: int, *, seed: int) -> str:
    numbers = ((seed * 7919 + 31 * n) % 997 for n in range(n_lines))
    lines = (LINE.format(n=n, a=x, b=x * 3 % 89, c=x * 5 % 53) for n, x in enumerate(numbers))
    return f"List {seed}.\n" + "\n".join(lines)


@contextmanager
def serving(model: str, cache: Path, *flags: str) -> Iterator[Server]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    command = [sys.executable, "-m", "firn", "serve", model, "--port", str(port)]
    command += ["--ssd-cache-dir", str(cache), "--ssd-write-budget-gb-per-day", "0", *flags]
    log = cache / "server.log"
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        _await_ready(port, process, log)
        yield Server(port, process)
    finally:
        process.terminate()
        process.wait(120)


def _await_ready(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"firn did not start:\n{log.read_text(errors='replace')[-3000:]}")


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="firn-mac-") as made:
        yield Path(made)


# --- the parts -----------------------------------------------------------------------------


def printed_by(*command: str) -> Iterator[str]:
    """A command and the end of its output."""
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    output = (done.stdout + done.stderr).strip().splitlines()
    yield f"`{' '.join(Path(word).name for word in command)}`: exit code {done.returncode}"
    yield "\n".join(("```", *output[-80:], "```"))
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed")


def machine() -> Iterator[str]:
    yield f"{platform.platform()}, Python {platform.python_version()}"
    if sys.platform == "darwin":
        yield from printed_by("/usr/bin/sw_vers")
    yield from printed_by(sys.executable, "-m", "firn", "doctor")


def decoding(model: str, sizes: Sizes) -> Iterator[str]:
    """firn and mlx_lm.generate in turns, one stream, greedy, without drafts."""
    with folder() as cache, serving(model, cache, "--speculation", "off") as server:
        prompt = server.text_of(400, seed=1)
        server.complete(prompt, sizes.reply)
        ours, theirs = [], []
        for _ in range(sizes.rounds):
            ours.append(server.complete(prompt, sizes.reply).tokens_per_s)
            theirs.append(_mlx_lm(model, prompt, sizes.reply))
    yield f"tokens/s, median of {sizes.rounds}, replies of {sizes.reply} tokens"
    for name, speeds in (("firn", ours), ("mlx_lm.generate", theirs)):
        each = ", ".join(f"{speed:.1f}" for speed in speeds)
        yield f"- {name}: {statistics.median(speeds):.1f} ({each})"
    yield f"- ratio: {statistics.median(ours) / statistics.median(theirs):.3f}"


def _mlx_lm(model: str, prompt: str, n: int) -> float:
    command = [sys.executable, "-c", MLX_LM, _path(model), prompt, str(n)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=REQUEST_S)
    if done.returncode:
        raise RuntimeError(f"mlx_lm failed:\n{done.stderr[-2000:]}")
    told = json.loads(done.stdout.splitlines()[-1])
    if told["n"] != n:
        raise RuntimeError(f"mlx_lm made {told['n']} tokens, not {n}")
    return float(told["tokens_per_s"])


def _path(model: str) -> str:
    from firn.demo.builtin import builtin_folder

    return str(builtin_folder(model) or model)


def pauses(model: str, sizes: Sizes) -> Iterator[str]:
    """Whether the first token is late after nothing was computed for a while."""
    yield "seconds to the first token of a cached prompt, median, by seconds of pause before it"
    with folder() as cache, serving(model, cache) as server:
        prompt = server.text_of(300, seed=2)
        server.complete(prompt, 8)
        for pause_s in sizes.pauses_s:
            first = []
            for _ in range(max(sizes.rounds, 2)):
                time.sleep(pause_s)
                first.append(server.complete(prompt, 8).first_s)
            each = ", ".join(f"{s:.3f}" for s in first)
            yield f"- after {pause_s:g}: {statistics.median(first):.3f} ({each})"


def restoring(model: str, sizes: Sizes) -> Iterator[str]:
    yield "seconds to the first token of the same prompt"
    with folder() as cache:
        with serving(model, cache) as server:
            prompt = server.text_of(sizes.restored, seed=3)
            cold = server.complete(prompt, 16)
            # Another prompt in between: the row of the first is gone, its records are in memory.
            server.complete(server.text_of(300, seed=4), 4)
            memory = server.complete(prompt, 16)
        with serving(model, cache) as server:
            server.complete(server.text_of(300, seed=5), 4)
            disk = server.complete(prompt, 16)
    for name, reply in (("cold", cold), ("from memory", memory), ("from the SSD", disk)):
        yield f"- {name}: {reply.first_s:.3f} ({reply.n_cached} of {reply.n_prompt} tokens reused)"
    if not min(memory.n_cached, disk.n_cached):
        raise RuntimeError("nothing was reused")


def exactly(model: str, sizes: Sizes) -> Iterator[str]:
    """--reuse exact at depth: the text after a hit is the text of a fresh computation."""
    with folder() as cache:
        with serving(model, cache, "--reuse", "exact") as server:
            prompt = server.text_of(sizes.exact, seed=6)
            fresh = server.complete(prompt, sizes.reply)
            again = server.complete(prompt, sizes.reply)
        with serving(model, cache, "--reuse", "exact") as server:
            later = server.complete(prompt, sizes.reply)
    for name, reply in (("fresh", fresh), ("again", again), ("after a restart", later)):
        yield f"- {name}: {reply.first_s:.2f} s, {reply.n_cached} of {reply.n_prompt} tokens reused"
    if len({fresh.text, again.text, later.text}) > 1:
        raise RuntimeError(f"the texts differ:\n{fresh.text}\n---\n{again.text}\n---\n{later.text}")
    if not min(again.n_cached, later.n_cached):
        raise RuntimeError("nothing was reused")
    yield "- the three texts are the same"


def panic(model: str, sizes: Sizes) -> Iterator[str]:
    yield f"if nothing follows this line, the Mac panicked; it began {time.strftime('%F %T')}"
    until = time.monotonic() + sizes.panic_s
    n = 0
    with folder() as cache, serving(model, cache, "--max-concurrency", "4") as server:
        while time.monotonic() < until:
            n += 1
            size = sizes.exact if n % 2 else sizes.exact // 16
            server.complete(server.text_of(size, seed=100 + n), 4)
            if n % 10 == 0:
                yield f"- {n} prompts, {until - time.monotonic():.0f} s left"
    yield f"- {n} prompts in {sizes.panic_s:.0f} s, and no panic"


def agreed(ask: Callable[[str], str]) -> bool:
    question = (
        "This tries for ten minutes to make macOS panic, which restarts this Mac. Save your work "
        "first. Type yes to begin: "
    )
    return ask(question).strip().lower() == "yes"


# --- all of them ---------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None, *, ask: Callable[[str], str] = input) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", nargs="+", metavar="MODEL", help="names or folders")
    parser.add_argument("--quick", action="store_true", help="small sizes, and no `make test`")
    parser.add_argument("--panic", action="store_true", help="the panic recipe alone")
    parser.add_argument("--out", type=Path, default=REPORT, help="the report")
    given = parser.parse_args(arguments)
    sizes: Sizes = QUICK if given.quick else Sizes()
    models: Sequence[str] = given.models or (BUILTIN if given.quick else MODELS)
    if given.panic and not agreed(ask):
        print("nothing was done")
        return 1
    report = Report(given.out)
    report.write(f"# firn on {platform.platform()}, {time.strftime('%F')}")
    report.part("The machine", machine)
    if given.panic:
        report.part("The panic recipe", lambda: panic(models[-1], sizes))
    else:
        _everything(report, models, sizes, is_quick=given.quick)
    print(f"\nThe report is {report.path}: please send it (CONTRIBUTING.md says where).")
    return 1 if report.n_failed else 0


def _everything(report: Report, models: Sequence[str], sizes: Sizes, *, is_quick: bool) -> None:
    for model in models:
        report.part(f"Decoding: {model}", lambda model=model: decoding(model, sizes))
    report.part(f"After a pause: {models[-1]}", lambda: pauses(models[-1], sizes))
    report.part(f"Restoring: {models[-1]}", lambda: restoring(models[-1], sizes))
    report.part(f"Exact reuse: {models[0]}", lambda: exactly(models[0], sizes))
    if sys.platform == "darwin":
        script = str(ROOT / "tools" / "service_round.py")
        report.part("firn service", lambda: printed_by(sys.executable, script))
    if not is_quick:
        report.part("make test", lambda: printed_by("make", "test"))


if __name__ == "__main__":
    raise SystemExit(main())
