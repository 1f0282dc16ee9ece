"""How much of what a perfect cache would reuse does firn's cache reuse for agents? No model needed.

    .venv/bin/python benchmarks/agent_chats.py                              # every kind, memory and disk
    .venv/bin/python benchmarks/agent_chats.py --kinds hybrid --memory 0.1 --disk ssd

Three people work with agents: chats that grow from 5,000 to 30,000 tokens by questions and tool results,
with subagents beside them, titles, and steps back to an earlier turn. The cache is driven as the engine
drives it, four rows at a time, over real layer caches with few numbers per token. What is timed
(computing a chunk, a step) is a sleep, many times shorter than a model takes; the disk is a real folder.

A perfect cache has every token of every request that was computed before, at any position. Columns:

    reused      tokens that were not computed, as a share of what a perfect cache would not have computed
    best        the largest such share that is possible with that memory (benchmarks/best_reuse.py)
    worst       the worst such share of a request that could have reused more than 1,000 tokens
    short       requests that reused at least 32 tokens less
    MB/turn     bytes written to the disk per request; `states`: the share of states in what is stored

Memory is a share of what the same requests take where there is room for everything. It is what rows
under way leave for records, and as in the engine the cache is told so when a row begins and ends.
`--kill-after` drops the cache and everything that is queued for the disk after so many requests, as
kill -9 would.

Takes two minutes; one kind at one size takes a few seconds.
"""

from __future__ import annotations

import argparse
import itertools
import random
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from best_reuse import Stay, best_reuse, n_common
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache
from report import BenchError, cli, grid, names, save
from servers import lab

from firn.cache.layout import Layout
from firn.cache.prefix import CacheSettings, PrefixCache
from firn.cache.storage.worker import TierWorker
from firn.cache.tiers import TierOptions
from firn.cache.tiers.ssd import SsdTier
from firn.core.ports import At, Cursor, EngineLoad, Restored, RowView
from firn.core.values import CacheControl, Namespace, Prompt

GIB = 1 << 30
BLOCK, CHUNK, BURST = 256, 2048, 16
N_ROWS = 4
PREFILL_S, STEP_S = 1 / 50_000, 0.002
"""Seconds to compute a token of a prompt, and to decode BURST tokens of every row."""
SETTLE_S = 30.0
WINDOW = 512
TOKEN_DIM = 16
PAGE_NBYTES = 2 * 2 * TOKEN_DIM
"""What the pages of a token take."""
STATE_TOKENS = 3000
"""A state takes as much as the pages of this many tokens, as in Qwen3-Next-80B."""
NAMESPACE = Namespace("")
LOADS = {
    (False, False): EngineLoad.NONE,
    (False, True): EngineLoad.DECODING,
    (True, False): EngineLoad.PREFILLING,
    (True, True): EngineLoad.BOTH,
}
"""By whether it is prefilling, and decoding."""
FEW_TOKENS = 32
COLUMNS = ("requests", "reused", "best", "worst", "short", "MB/turn", "states", "seconds")


# --- the traffic ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Ask:
    """One request, with the reply that it gets."""

    tokens: tuple[int, ...]
    boundaries: tuple[int, ...]
    reply: tuple[int, ...]


Script = Iterator["Ask | list[Script]"]
"""Requests one after the other; a list of scripts runs beside it, and is awaited."""


class Chat:
    """A conversation: its tokens so far, and where its messages end."""

    def __init__(self, tokens: Sequence[int], boundaries: Sequence[int]) -> None:
        self.tokens, self.boundaries = list(tokens), list(boundaries)
        self.turns: list[tuple[int, int]] = []
        """Length and number of boundaries before each question."""

    def copy(self) -> Chat:
        return Chat(self.tokens, self.boundaries)

    def say(self, message: Sequence[int]) -> None:
        self.tokens += message
        self.boundaries.append(len(self.tokens))

    def step_back(self, n_turns: int) -> None:
        n_tokens, n_boundaries = self.turns[-n_turns]
        del self.turns[-n_turns:], self.tokens[n_tokens:], self.boundaries[n_boundaries:]


class Speaker:
    """One of those who write messages: a person, or a subagent. Each has its own random numbers, so
    what they say does not depend on the cache."""

    def __init__(self, seed: str, agents: Agents) -> None:
        self._rng = random.Random(seed)
        self._seed = seed
        self._agents = agents

    def sessions(self, n: int) -> Script:
        for _ in range(n):
            yield from self._session()

    def _session(self) -> Script:
        rng, agents = self._rng, self._agents
        chat, title = agents.main.copy(), agents.titles.copy()
        chat.say(self._text(300, 900))  # the project
        question = self._text(50, 400)
        n_most = rng.randint(10_000, 30_000)
        yield self._ask(chat, question, (60, 300))
        yield [iter([self._ask(title, question, (8, 15))])]
        while len(chat.tokens) < n_most:
            is_result = rng.random() < 0.75
            yield self._ask(chat, self._text(*((150, 2500) if is_result else (20, 300))), (40, 400))
            if rng.random() < 0.10:
                seeds = [f"{self._seed} {rng.random()}" for _ in range(rng.randint(1, 3))]
                yield [Speaker(seed, agents).task() for seed in seeds]
                yield self._ask(chat, self._text(200, 800), (60, 300))
            if rng.random() < 0.08 and len(chat.turns) > 4:
                chat.step_back(rng.randint(1, 4))

    def task(self) -> Script:
        """What a subagent asks."""
        chat = self._agents.sub.copy()
        yield self._ask(chat, self._text(100, 600), (40, 300))
        for _ in range(self._rng.randint(1, 5)):
            yield self._ask(chat, self._text(200, 2500), (40, 300))

    def _text(self, least: int, most: int) -> list[int]:
        return self._rng.choices(range(100, 100_000), k=self._rng.randint(least, most))

    def _ask(self, chat: Chat, message: Sequence[int], reply: tuple[int, int]) -> Ask:
        """The prompt ends with three tokens that begin a reply; a reply, with a token of its end."""
        chat.turns.append((len(chat.tokens), len(chat.boundaries)))
        chat.say(message)
        answer = self._text(*reply)
        ask = Ask((*chat.tokens, 7, 8, 9), tuple(chat.boundaries), tuple(answer))
        chat.say([7, 8, 9, *answer, 10])
        return ask


class Agents:
    """The tools and system texts that all sessions begin with."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.main, self.sub, self.titles = (
            Chat(rng.choices(range(100, 100_000), k=n), [n]) for n in (4500, 2500, 250)
        )


# --- the engine ----------------------------------------------------------------------------


@dataclass(eq=False)
class Row:
    """A lone row over real layer caches."""

    layers: list[Any]
    n_tokens: int = 0
    is_live: bool = True

    def view(self) -> RowView:
        return RowView(self.layers, At(0, self.n_tokens))

    def consume(self, n: int) -> None:
        for layer in self.layers:
            if isinstance(layer, ArraysCache):
                layer.cache = [mx.zeros((1, STATE_TOKENS, 2 * TOKEN_DIM), mx.float16)]
            else:
                n_heads = 5 if isinstance(layer, RotatingKVCache) else 1
                some = mx.zeros((1, n_heads, n, TOKEN_DIM), mx.float16)
                layer.update_and_fetch(some, some)
        mx.eval([a for layer in self.layers for a in layer.state if isinstance(a, mx.array)])
        self.n_tokens += n


def layers_of(kind: str) -> list[Any]:
    match kind:
        case "dense":
            return [KVCache()]
        case "hybrid":
            return [KVCache(), ArraysCache(1)]
        case "window":
            return [KVCache(), RotatingKVCache(WINDOW)]
    raise ValueError(f"{kind} must be dense, hybrid or window")


@dataclass(eq=False)
class Task:
    """A request under way."""

    ask: Ask
    script: int
    prompt: Prompt
    cursor: Cursor
    n_perfect: int = 0
    began: int = 0
    row: Row | None = None
    reply: list[int] = field(default_factory=list)
    decoding: bool = False
    n_cached: int = 0
    why: str = ""

    @property
    def known(self) -> np.ndarray[Any, Any]:
        """What is computed of it so far."""
        ids = np.concatenate([self.prompt.ids, np.array(self.reply, dtype=np.int64)])
        return ids[: self.row.n_tokens] if self.row is not None else ids[:0]


@dataclass(frozen=True, slots=True)
class Outcome:
    n_prompt: int
    n_cached: int
    why: str
    stay: Stay

    @property
    def n_perfect(self) -> int:
        return self.stay.n_wanted


class Engine:
    """Runs scripts over a cache, and notes what each request reused."""

    def __init__(self, kind: str, *, limit_nbytes: int, folder: Path | None) -> None:
        self._kind, self._folder, self._limit = kind, folder, limit_nbytes
        self.outcomes: list[Outcome] = []
        self.peak_nbytes = 0
        self._computed: list[np.ndarray[Any, Any]] = []
        self._events = itertools.count()
        self.written: Counter[str] = Counter()
        self._start()

    def _start(self) -> None:
        layout = Layout.of(layers_of(self._kind))
        settings = CacheSettings(self._limit, BLOCK)
        self.cache = PrefixCache(layout, settings, fingerprint=b"bench", dtype="float16")
        self._tier: SsdTier | None = None
        self._worker: TierWorker | None = None
        if self._folder is not None:
            self._tier = SsdTier(TierOptions(str(self._folder), 50 * GIB))
            self._worker = TierWorker(self._tier)
            self.cache.add_tier("ssd", self._worker, namespaces=[NAMESPACE])

    def run(self, scripts: Sequence[Script], *, kill_after: int = 1 << 60) -> None:
        serial = itertools.count()
        running: dict[int, tuple[Script, int | None]] = {}
        children: Counter[int] = Counter()
        waiting: deque[Task] = deque()
        tasks: list[Task] = []

        def go_on(number: int) -> None:
            script, parent = running[number]
            match next(script, None):
                case Ask() as ask:
                    waiting.append(self._open(ask, number))
                case [*scripts]:
                    children[number] = len(scripts)
                    for child in scripts:
                        begin(child, number)
                case _:
                    del running[number]
                    if parent is not None:
                        children[parent] -= 1
                        if not children[parent]:
                            go_on(parent)

        def begin(script: Script, parent: int | None = None) -> None:
            number = next(serial)
            running[number] = script, parent
            go_on(number)

        for script in scripts:
            begin(script)
        while waiting or tasks:
            if len(self.outcomes) >= kill_after:
                kill_after = 1 << 60
                self._kill(waiting, tasks)
            while waiting and len(tasks) < N_ROWS:
                task = waiting.popleft()
                self._admit(task)
                tasks.append(task)
            began = time.perf_counter()
            n_read = self._prefill(tasks)
            step_s = PREFILL_S * n_read
            decoding = [t for t in tasks if t.decoding]
            if decoding:
                step_s += STEP_S
                for task in decoding:
                    if self._decode(task):
                        tasks.remove(task)
                        go_on(task.script)
            time.sleep(max(began + step_s - time.perf_counter(), 0.0 if step_s else 0.001))
            self.cache.confirm()
            is_prefilling = any(not t.decoding for t in tasks)
            self.cache.tick(LOADS[is_prefilling, bool(decoding)])
            memory = self.cache.records.memory
            self.peak_nbytes = max(self.peak_nbytes, memory.nbytes)
        until = time.perf_counter() + SETTLE_S
        while (self._worker and self._worker.n_pending) or not self.cache.settled:
            if time.perf_counter() > until:
                raise BenchError("the disk does not keep up")
            self.cache.tick(EngineLoad.NONE)
            time.sleep(0.001)
        self._count_writes()

    def _kill(self, waiting: deque[Task], tasks: list[Task]) -> None:
        """As if the process were killed; the requests are sent again."""
        self._count_writes()
        if self._worker is not None:
            with self._worker._work:  # nothing that is queued is written any more
                for queue in (self._worker._reads, self._worker._upkeep, self._worker._writes):
                    queue.clear()
            self._worker.close()
        if self._folder is None:
            self._computed.clear()
        self._start()
        again = [self._open(t.ask, t.script) for t in (*tasks, *waiting)]
        tasks.clear()
        waiting.clear()
        waiting.extend(again)

    def _count_writes(self) -> None:
        if self._tier is not None:
            usage = self._tier.usage()
            self.written["all"] += usage.counts.get("bytes_written", 0)
            self.written["state"] = usage.part_nbytes.get("state", 0)
            self.written["stored"] = sum(usage.part_nbytes.values())

    def close(self) -> None:
        self.cache.close()

    # --- a request -------------------------------------------------------------------------

    def _open(self, ask: Ask, script: int) -> Task:
        prompt = Prompt(np.array(ask.tokens, dtype=np.int64), boundaries=ask.boundaries)
        return Task(ask, script, prompt, self.cache.open(prompt, NAMESPACE, CacheControl()))

    def _admit(self, task: Task) -> None:
        task.n_perfect, task.began = self._perfect(task.prompt.ids), next(self._events)
        task.row = self._row(task.cursor, task.cursor.restore())
        self.cache.set_room(self._limit)

    def _perfect(self, ids: np.ndarray[Any, Any]) -> int:
        return max((n_common(known, ids[:-1]) for known in self._computed), default=0)

    def _row(self, cursor: Any, restored: Restored | None) -> Row:
        row = Row(layers_of(self._kind))
        if restored is not None:
            began = time.perf_counter()
            restored.fill(row.layers)
            row.n_tokens = restored.n_tokens
            cursor.filled(row)
            self.cache.observe_restore(restored, time.perf_counter() - began)
        return row

    def _prefill(self, tasks: Sequence[Task]) -> int:
        """Read a chunk of one prompt; returns the number of tokens computed."""
        busy = any(t.decoding for t in tasks)
        ready = [t for t in tasks if not t.decoding]
        ready = [t for t in ready if not t.cursor.should_wait(busy=busy)]
        if not ready:
            return 0
        task = min(ready, key=lambda t: len(t.prompt) - (t.row.n_tokens if t.row else 0))
        ahead = task.cursor.advance(task.row.n_tokens if task.row else 0)
        if ahead is not None:
            task.row = self._row(task.cursor, ahead)
        row, last = task.row, len(task.prompt) - 1
        assert row is not None
        start = row.n_tokens
        stops = [s for s in task.cursor.stops() if s > start]
        end = min(start + CHUNK - start % CHUNK, last, *stops)
        if end > start:
            row.consume(end - start)
            self.cache.prefill.observe(start, end, PREFILL_S * (end - start))
            task.cursor.commit(row)
        if row.n_tokens >= last:
            self._begin_reply(task)
        return end - start

    def _begin_reply(self, task: Task) -> None:
        cursor = task.cursor
        task.n_cached, task.why = cursor.admission.n_cached, cursor.admission.why
        task.cursor = cursor.fork(task.reply)
        cursor.close(None)
        task.decoding = True

    def _decode(self, task: Task) -> bool:
        """A step; True at the end of the reply. The last token is not computed, as in an engine."""
        row, reply = task.row, task.ask.reply
        assert row is not None
        task.reply += reply[len(task.reply) : len(task.reply) + BURST]
        row.consume(len(task.prompt) + len(task.reply) - 1 - row.n_tokens)
        if len(task.reply) < len(reply):
            if task.cursor.commit_due(row.n_tokens):
                task.cursor.commit(row)
            return False
        self._computed.append(task.known)
        stay = Stay(task.known, task.n_perfect, task.began, next(self._events))
        task.cursor.close(row)
        row.is_live = False
        self.cache.set_room(self._limit)
        self.outcomes.append(Outcome(len(task.prompt), task.n_cached, str(task.why or ""), stay))
        return True


def measure(
    kind: str, *, limit_nbytes: int, folder: Path | None, args: argparse.Namespace
) -> tuple[dict[str, Any], int]:
    agents = Agents(args.seed)
    began = time.perf_counter()
    engine = Engine(kind, limit_nbytes=limit_nbytes, folder=folder)
    try:
        people = [Speaker(f"{args.seed} {i}", agents).sessions(args.sessions) for i in range(3)]
        engine.run(people, kill_after=args.kill_after or 1 << 60)
    finally:
        engine.close()
    seconds = time.perf_counter() - began
    known = [o for o in engine.outcomes if o.n_perfect]
    shares = [o.n_cached / o.n_perfect for o in known if o.n_perfect > 1000]
    if args.verbose:
        for o in engine.outcomes:
            if o.n_cached < o.n_perfect - 1:
                print(f"  {o.n_prompt} {o.n_perfect} {o.n_cached} {o.why}")
    written = engine.written
    n_perfect = max(sum(o.n_perfect for o in known), 1)
    n_kept = limit_nbytes // PAGE_NBYTES
    best = 1.0 if folder else best_reuse([o.stay for o in engine.outcomes], n_kept) / n_perfect
    return {
        "requests": len(engine.outcomes),
        "reused": sum(min(o.n_cached, o.n_perfect) for o in known) / n_perfect,
        "best": best,
        "worst": min(shares),
        "short": sum(o.n_cached < o.n_perfect - FEW_TOKENS for o in known),
        "MB/turn": written["all"] / len(engine.outcomes) / 1e6 if folder else None,
        "states": written["state"] / max(written["stored"], 1) if folder else None,
        "seconds": seconds,
    }, engine.peak_nbytes


def _text(figure: float | None) -> str:
    if figure is None:
        return "-"
    return f"{figure:,}" if isinstance(figure, int) else f"{figure:.4g}"


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--kinds", type=names, default=["dense", "hybrid", "window"])
    options.add_argument("--memory", default="1,0.5,0.1", help="shares of what all requests take")
    options.add_argument("--disk", type=names, default=["none", "ssd"])
    options.add_argument("--sessions", type=int, default=2, help="of each person")
    options.add_argument("--kill-after", type=int, default=0, help="requests before a kill -9")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--verbose", action="store_true", help="list requests that reused less")
    options.add_argument(
        "--out", type=Path, help="JSON file (default: agent_chats.json in the lab)"
    )
    args = options.parse_args()
    results: dict[str, Any] = {}
    for kind in args.kinds:
        _, all_nbytes = measure(kind, limit_nbytes=50 * GIB, folder=None, args=args)
        for disk in args.disk:
            for share in [float(x) for x in args.memory.split(",")]:
                with tempfile.TemporaryDirectory(prefix="firn-chats-") as name:
                    folder = Path(name) / "cache" if disk == "ssd" else None
                    limit = int(all_nbytes * share) if share < 1 else 50 * GIB
                    found, _ = measure(kind, limit_nbytes=limit, folder=folder, args=args)
                results[f"{kind}, {share:g} of memory, {disk}"] = found
                print(f"{kind}, {share:g}, {disk}: {found}", flush=True)
    rows = [["", *COLUMNS]]
    for name, found in results.items():
        rows.append([name, *(_text(found[column]) for column in COLUMNS)])
    print(grid(rows))
    save(args.out or lab() / "agent_chats.json", "agent_chats", options=vars(args), result=results)


if __name__ == "__main__":
    cli(main)
