"""First-token times of chats that share a long system prompt: what a prefix cache is for.

Sessions have one system prompt in common (about 1,400 tokens) and a document of their own (about 1,200).
They take their turns in rotation; each turn appends the reply and a question.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from firn.bench.client import Message, Target, TimedReply, words
from firn.bench.report import Column

N_SYSTEM_WORDS, N_DOCUMENT_WORDS, N_QUESTION_WORDS = 300, 250, 20
N_REPLY = 16
COLUMNS = (
    Column("cold_s", "cold s", 3),
    Column("shared_s", "shared s", 3),
    Column("later_s", "later s", 3),
    Column("later_new", "new/turn", 0, ""),
)
"""cold: first token of the very first prompt. shared: p50 of the other sessions' first turns, where the
system prompt is known. later: p50 of all later turns. new/turn: tokens of a later turn that the server
did not report as cached."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The prompts of a round. turns: before a restart, if there is one. salt: makes texts new."""

    n_sessions: int
    turns: int
    salt: object = ""

    @property
    def system(self) -> Message:
        return {"role": "system", "content": words(N_SYSTEM_WORDS, seed=self._seed("system"))}

    def user(self, session: int, turn: int) -> Message:
        if turn == 0:
            seed = self._seed("document", session)
            text = words(N_DOCUMENT_WORDS, seed=seed) + " Summarise."
        else:
            seed = self._seed("question", session, turn)
            text = words(N_QUESTION_WORDS, seed=seed) + " Go on."
        return {"role": "user", "content": text}

    def _seed(self, what: str, *more: object) -> object:
        seed = (what, *more) if more else what
        return seed if self.salt == "" else (self.salt, seed)


@dataclass(eq=False)
class Chats:
    """Running sessions. Owner: the benchmark, which may restart the server between two turns."""

    work: Workload
    on_reply: Callable[[], object] = lambda: None
    asked: list[list[TimedReply]] = field(default_factory=list)
    sessions: list[list[Message]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sessions = [[self.work.system] for _ in range(self.work.n_sessions)]

    def turn(self, target: Target) -> list[TimedReply]:
        """One turn of every session, which grows by the question and the reply."""
        turn, replies = len(self.asked), []
        for i, messages in enumerate(self.sessions):
            messages.append(self.work.user(i, turn))
            reply = target.chat(messages, N_REPLY)
            messages.append({"role": "assistant", "content": reply.text})
            replies.append(reply)
            self.on_reply()
        self.asked.append(replies)
        return replies

    def result(self) -> dict[str, Any]:
        """A summary of the turns before a restart, if there was one, and figures of all turns."""
        first, later = self.asked[0], [r for t in self.asked[1 : self.work.turns] for r in t]
        return {
            "cold_s": first[0].first_s,
            "shared_s": p50([r.first_s for r in first[1:]]),
            "later_s": p50([r.first_s for r in later]),
            "later_new": p50([float(r.n_prompt - r.n_cached) for r in later]),
            "first_s": [[r.first_s for r in replies] for replies in self.asked],
            "prompt_tokens": [[r.n_prompt for r in replies] for replies in self.asked],
            "cached_tokens": [[r.n_cached for r in replies] for replies in self.asked],
        }


def warm_up(target: Target) -> None:
    target.chat([{"role": "user", "content": "Hello."}], 2)


def run(
    target: Target, work: Workload, *, on_reply: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    """One round. The salt should be new: a running server remembers earlier rounds."""
    warm_up(target)
    chats = Chats(work, on_reply)
    for _ in range(work.turns):
        chats.turn(target)
    return chats.result()


def new_salt() -> str:
    return f"{time.time_ns():x}"


def p50(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
