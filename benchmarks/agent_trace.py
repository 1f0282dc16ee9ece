"""Synthetic traffic of coding agents, generated from a seed: for benchmarks and tests.

    .venv/bin/python benchmarks/agent_trace.py 20000 > trace.jsonl

Takes a second for 5,000 requests.

People work by day on projects of their own, with a few kinds of agents. A session grows turn by
turn from a shared prompt of tools and system text. Some turns start sub-agents, which run in
parallel for a while and end. A session that has become too long is compacted to a summary and
continues from there; now and then, somebody goes back to an earlier turn; sessions of earlier days
are resumed. Pauses between turns last from seconds to a weekend.
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count, islice

from firn.traces.read import line_of
from firn.traces.trace import TraceEntry

DAY_S = 86_400.0
WORK_BEGINS_S, WORK_S = 8 * 3600.0, 10 * 3600.0
N_WORK_DAYS = 5
"""Days of a week on which sessions begin."""


@dataclass(frozen=True, slots=True)
class TrafficShape:
    """Lengths are in tokens; probabilities are per turn unless noted otherwise."""

    n_people: int = 6
    n_projects: int = 3
    """Per person."""
    n_kinds: int = 3
    sessions_per_day: float = 6.0
    """Sessions that one person begins."""
    tools: tuple[int, int] = (9_000, 18_000)
    sub_tools: tuple[int, int] = (3_000, 7_000)
    project: tuple[int, int] = (800, 4_000)
    turns: float = 24.0
    """Mean number per session. Each is a request: agents send one after each tool call."""
    step: float = 900.0
    """Mean length that a turn adds: tool results, files, questions."""
    reply: float = 220.0
    context: int = 100_000
    summary: tuple[int, int] = (1_500, 5_000)
    sub_agents: float = 0.05
    sub_turns: float = 7.0
    branch: float = 0.03
    task: tuple[int, int] = (100, 900)
    """Length of a sub-agent's instructions."""
    once: float = 0.06
    """A short request outside the session, such as one for a title."""
    short: tuple[int, int] = (300, 2_000)
    pause: float = 0.06
    """Somebody thinks, or eats, before the next turn."""
    resumed: float = 0.35
    """A session that ended is resumed some days later. Per session."""


@dataclass(eq=False)
class Conversation:
    """One conversation: its tokens so far, and their whole blocks."""

    n_tokens: int
    blocks: list[int]
    turns: list[int] = field(default_factory=list)
    """Number of tokens at the end of each turn."""


USUAL = TrafficShape()


class AgentTraffic:
    """Endless requests, in order of arrival. Owner: the code that iterates."""

    def __init__(self, shape: TrafficShape = USUAL, *, seed: int = 0, block: int = 256) -> None:
        self._shape = shape
        self._rng = random.Random(seed)
        self._block = block
        self._serial = count(1)
        self._ties = count()
        rng, s = self._rng, shape
        self._tools = [
            self._grown(Conversation(0, []), rng.randint(*s.tools)) for _ in range(s.n_kinds)
        ]
        self._sub_tools = [
            self._grown(Conversation(0, []), rng.randint(*s.sub_tools)) for _ in range(s.n_kinds)
        ]
        self._projects = [
            [
                self._grown(self._copy(rng.choice(self._tools)), rng.randint(*s.project))
                for _ in range(s.n_projects)
            ]
            for _ in range(s.n_people)
        ]

    def __iter__(self) -> Iterator[TraceEntry]:
        """Day after day; sessions are created when their day begins."""
        waiting: list[tuple[float, int, Iterator[TraceEntry], TraceEntry]] = []

        def push(session: Iterator[TraceEntry]) -> None:
            entry = next(session, None)
            if entry is not None:
                heapq.heappush(waiting, (entry.at_s, next(self._ties), session, entry))

        later: dict[int, list[Iterator[TraceEntry]]] = {}
        for day in count():
            if day % 7 < N_WORK_DAYS:
                for session in later.pop(day, []):
                    push(session)
                for person in range(self._shape.n_people):
                    for _ in range(self._poisson(self._shape.sessions_per_day)):
                        push(self._session(person, day, later))
            else:
                later.setdefault(day + 1, []).extend(later.pop(day, []))
            while waiting and waiting[0][0] < (day + 1) * DAY_S:
                _, _, session, entry = heapq.heappop(waiting)
                yield entry
                push(session)

    def _session(
        self, person: int, day: int, later: dict[int, list[Iterator[TraceEntry]]]
    ) -> Iterator[TraceEntry]:
        rng = self._rng
        at = day * DAY_S + WORK_BEGINS_S + rng.random() * WORK_S
        project = rng.choice(self._projects[person])
        conversation = self._grown(self._copy(project), rng.randint(50, 400))
        yield from self._work(conversation, project, at)
        if rng.random() < self._shape.resumed:
            gone = 1 + int(rng.expovariate(0.7))
            later.setdefault(day + gone, []).append(self._again(conversation, project, day + gone))

    def _again(
        self, conversation: Conversation, project: Conversation, day: int
    ) -> Iterator[TraceEntry]:
        while day % 7 >= N_WORK_DAYS:
            day += 1
        at = day * DAY_S + WORK_BEGINS_S + self._rng.random() * WORK_S
        yield from self._work(conversation, project, at)

    def _work(
        self, conversation: Conversation, project: Conversation, at: float
    ) -> Iterator[TraceEntry]:
        """Turns until the person is done, interleaved with the requests that run alongside them."""
        rng, s = self._rng, self._shape
        beside: list[TraceEntry] = []
        for _ in range(1 + int(rng.expovariate(1 / s.turns))):
            if rng.random() < s.once:
                short = self._grown(Conversation(0, []), rng.randint(*s.short))
                beside.append(self._ask(short, at + rng.random()))
            if conversation.n_tokens > s.context:
                request = self._ask(self._grown(self._copy(conversation), 300), at)
                ready, beside = _split(beside, at)
                yield from ready
                yield request  # for the summary
                at += 20 + rng.expovariate(1 / 20)
                summary = rng.randint(*s.summary)
                fresh = self._grown(self._copy(project), summary)
                conversation.n_tokens, conversation.blocks, conversation.turns = (
                    fresh.n_tokens,
                    fresh.blocks,
                    [],
                )
            if conversation.turns and rng.random() < s.branch:
                self._step_back(conversation, rng.choice(conversation.turns[-8:]))
            self._grown(conversation, 20 + int(rng.expovariate(1 / s.step)))
            entry = self._ask(conversation, at)
            ready, beside = _split(beside, at)
            yield from ready
            yield entry
            conversation.turns.append(conversation.n_tokens)
            at += 2 + rng.expovariate(1 / 8)
            if rng.random() < s.sub_agents:
                requests, at = self._sub_agents(at)
                beside += requests
            if rng.random() < s.pause:
                at += rng.lognormvariate(6.5, 1.2)
        yield from sorted(beside, key=lambda e: e.at_s)

    def _sub_agents(self, at: float) -> tuple[list[TraceEntry], float]:
        """Requests of one to four in parallel, and when the last ends: the session waits for it."""
        rng, s = self._rng, self._shape
        tools, requests, end = rng.choice(self._sub_tools), list[TraceEntry](), at
        for _ in range(rng.randint(1, 4)):
            conversation, now = (
                self._grown(self._copy(tools), rng.randint(*s.task)),
                at + rng.random(),
            )
            for _ in range(1 + int(rng.expovariate(1 / s.sub_turns))):
                requests.append(self._ask(conversation, now))
                self._grown(conversation, 20 + int(rng.expovariate(1 / s.step)))
                now += 1 + rng.expovariate(1 / 5)
            end = max(end, now)
        return requests, end

    def _ask(self, conversation: Conversation, at: float) -> TraceEntry:
        """One request: the conversation so far; the reply becomes a part of it."""
        blocks, n_prompt = tuple(conversation.blocks), conversation.n_tokens
        n_reply = 10 + int(self._rng.expovariate(1 / self._shape.reply))
        self._grown(conversation, n_reply)
        return TraceEntry(at, n_prompt, n_reply, blocks, tuple(conversation.blocks[len(blocks) :]))

    def _grown(self, conversation: Conversation, n_tokens: int) -> Conversation:
        conversation.n_tokens += n_tokens
        while (len(conversation.blocks) + 1) * self._block <= conversation.n_tokens:
            conversation.blocks.append(next(self._serial))
        return conversation

    def _step_back(self, conversation: Conversation, n_tokens: int) -> None:
        conversation.n_tokens = n_tokens
        del conversation.blocks[n_tokens // self._block :]
        conversation.turns = [n for n in conversation.turns if n <= n_tokens]

    def _copy(self, conversation: Conversation) -> Conversation:
        return Conversation(conversation.n_tokens, list(conversation.blocks))

    def _poisson(self, mean: float) -> int:
        n, total = 0, self._rng.expovariate(1.0)
        while total < mean:
            n, total = n + 1, total + self._rng.expovariate(1.0)
        return n


def _split(entries: list[TraceEntry], at: float) -> tuple[list[TraceEntry], list[TraceEntry]]:
    """The entries up to that time, in order, and the later ones."""
    ready = sorted((e for e in entries if e.at_s <= at), key=lambda e: e.at_s)
    return ready, [e for e in entries if e.at_s > at]


def agent_trace(
    n_requests: int, *, seed: int = 0, block: int = 256, **shape: float
) -> list[TraceEntry]:
    """The first requests of such traffic. shape: fields of TrafficShape that differ."""
    traffic = AgentTraffic(replace(USUAL, **shape), seed=seed, block=block)  # type: ignore[arg-type]
    return list(islice(traffic, n_requests))


def main() -> None:
    parser = argparse.ArgumentParser(description="Print a made-up trace of coding agents at work.")
    parser.add_argument("requests", type=int, help="how many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--block", type=int, default=256, help="tokens in a block")
    parser.add_argument("--token-bytes", type=int, default=0, help="bytes of a token in the cache")
    parser.add_argument("--people", type=int, default=USUAL.n_people)
    parser.add_argument("--kinds", type=int, default=USUAL.n_kinds, help="kinds of agents")
    args = parser.parse_args()
    shape = replace(USUAL, n_people=args.people, n_kinds=args.kinds)
    traffic = AgentTraffic(shape, seed=args.seed, block=args.block)
    for entry in islice(traffic, args.requests):
        print(line_of(replace(entry, token_nbytes=args.token_bytes), block=args.block))


if __name__ == "__main__":
    main()
