"""What `firn bench` does: find the servers, play the rounds, show the results."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

from firn.bench import chats as chats_bench
from firn.bench import replay as replay_bench
from firn.bench import throughput as throughput_bench
from firn.bench.client import Target, target
from firn.bench.report import BenchError, Column, document, in_turns, numbers, table
from firn.cli.terminal import steps_progress
from firn.config import UsageError
from firn.traces.read import read
from firn.traces.trace import TraceError

STDOUT = Path("-")
Tick = Callable[[], None]


@dataclass(frozen=True, slots=True)
class BenchTargets:
    """Which servers to measure, and where the results go."""

    url: str
    compare: tuple[str, str] | None
    models: Sequence[str] | None
    api_key: str | None
    json: Path | None

    def targets(self) -> dict[str, Target]:
        """Servers by the names that the table shows. Raises BenchError if one does not answer."""
        urls = list(self.compare or (self.url,))
        given = list(self.models or [])
        if len(given) > len(urls):
            raise UsageError(f"--model {given[-1]}: there are more models than servers")
        names = (given * len(urls))[: len(urls)] if given else [None] * len(urls)
        targets = [
            target(url, model=name, api_key=self.api_key)
            for url, name in zip(urls, names, strict=True)
        ]
        if len(set(urls)) > 1:
            return {t.url: t for t in targets}
        by_model = {t.model: t for t in targets}
        return by_model if len(by_model) == len(targets) else _number(targets)


def _number(targets: Sequence[Target]) -> dict[str, Target]:
    """One server and model twice: the difference between the two is the noise."""
    return {f"{t.url} ({i})": t for i, t in enumerate(targets, 1)}


def chats(servers: BenchTargets, *, rounds: int, sessions: int, turns: int) -> None:
    def play(server: Target, tick: Tick) -> dict[str, Any]:
        salt = chats_bench.new_salt()
        work = chats_bench.Workload(sessions, turns, salt)
        return chats_bench.run(server, work, on_reply=tick)

    title = f"{sessions} chats of {turns} turns, medians of rounds: {rounds}"
    _contest(servers, "chats", title, chats_bench.COLUMNS, rounds, sessions * turns, play)


def throughput(
    servers: BenchTargets, *, rounds: int, concurrency: str, requests: int, gap: bool
) -> None:
    try:
        levels = tuple(numbers(concurrency))
    except ValueError:
        levels = ()
    if not levels or min(levels) < 1:
        raise UsageError(f"--concurrency {concurrency}: give whole numbers above 0")
    load = throughput_bench.Load(levels, requests, gap)
    warm: set[Target] = set()

    def play(server: Target, tick: Tick) -> dict[str, Any]:
        salt = chats_bench.new_salt()
        if server not in warm:
            throughput_bench.warm_up(server, salt)
            warm.add(server)
        return throughput_bench.run(server, load, turn=salt, on_part=tick)

    title = f"medians of rounds: {rounds}"
    columns = throughput_bench.columns(load)
    _contest(servers, "throughput", title, columns, rounds, len(levels) + gap, play)


def replay(
    servers: BenchTargets,
    path: Path,
    *,
    rounds: int,
    requests: int,
    pace: replay_bench.ReplayPace,
    trace_model: str | None,
) -> None:
    try:
        source = read(path, model=trace_model)
        entries = list(islice(source.entries, requests or None))
    except OSError as e:
        raise TraceError(f"{path}: {e.strerror}") from e
    if not entries:
        raise TraceError(f"There is no request in {path}.")

    def play(server: Target, tick: Tick) -> dict[str, Any]:
        salt = chats_bench.new_salt()
        return replay_bench.run(
            server, entries, block=source.block, pace=pace, salt=salt, on_reply=tick
        )

    title = f"{len(entries)} requests of {path.name}, medians of rounds: {rounds}"
    _contest(servers, "replay", title, replay_bench.COLUMNS, rounds, len(entries), play)


def _contest(
    servers: BenchTargets,
    benchmark: str,
    title: str,
    columns: Sequence[Column],
    rounds: int,
    steps: int,
    play: Callable[[Target, Tick], dict[str, Any]],
) -> None:
    """steps: the number of steps of one server in one round, for the progress bar."""
    targets = servers.targets()
    with _progress(rounds * steps * len(targets)) as tick:
        results = in_turns(targets, rounds, lambda server: play(server, tick))
    text = table(title, columns, rounds=results)
    print(text, file=sys.stderr if servers.json == STDOUT else sys.stdout)
    options = {k: str(v) for k, v in asdict(servers).items() if v is not None and k != "api_key"}
    content = document(benchmark, options=options, result={"rounds": results})
    _write(servers.json, json.dumps(content, indent=1) + "\n")


def _write(path: Path | None, text: str) -> None:
    if path is None:
        return
    if path == STDOUT:
        print(text, end="")
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as e:
        raise BenchError(f"{path}: {e.strerror}") from e


@contextmanager
def _progress(total: int) -> Iterator[Tick]:
    """Yields a function that counts one step."""
    steps = count(1)
    with steps_progress(total=total) as show:
        yield lambda: show(next(steps), total)
