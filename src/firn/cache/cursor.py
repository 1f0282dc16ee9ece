"""One sequence's way through the tree. Owner: the engine thread, through the prefix cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from firn.cache.arrays.payload import Payload
from firn.cache.children import Text
from firn.cache.lookup import Question
from firn.cache.nodes import InRow, Mark, Node, Record, Root
from firn.cache.plan import GRACE_S
from firn.core.events import Admitted
from firn.core.keys import KeyTokens
from firn.core.values import CacheControl

MAX_LATE = 4
"""How many records' time the next one may take: they come by several threads, in bursts."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Window layers' tokens [start, end) of a row, saved before the live ring overwrites them."""

    start: int
    end: int
    layers: Payload


@dataclass(eq=False)
class Loading:
    """Records on their way from below memory, for a resume at `n_tokens`."""

    n_tokens: int
    missing: set[Record]
    began: float
    patience_until: float
    busy_patience_until: float
    deadline: float
    compute_s: float = 0.0
    """What computing tokens [start, n_tokens) in its place would take."""
    start: int = 0
    front: int = 0
    """What is computed meanwhile: records before it are of no more use. Read by I/O threads."""
    over: bool = False
    """Likewise."""
    nbytes: dict[str, int] = field(default_factory=dict)
    """What has arrived, by tier."""
    n_arrived: int = 0
    last_at: float = 0.0
    """When the last record was read."""
    taken_at: float = 0.0
    """When the engine took it in..."""
    engine_s: float = 0.0
    """... and what all of them cost it."""

    def wants(self, record: Record) -> bool:
        return not self.over and record.node.end > self.front

    def wins(self, now: float) -> bool:
        """Whether the rest comes, at the pace of what has come, in half the time of computing it.

        Then a chunk that is begun now would only take the processor from the load, and not be over
        when that is. Says no as soon as records fail to come at that pace.
        """
        if not self.n_arrived:
            return False
        pace_s = max(self.last_at - self.began, self.engine_s) / self.n_arrived
        n_tokens = max(self.n_tokens - self.start, 1)
        share = (self.n_tokens - max(self.front, self.start)) / n_tokens
        if len(self.missing) * pace_s > share * self.compute_s / 2:
            return False
        return now - self.taken_at < MAX_LATE * pace_s + GRACE_S


@dataclass(eq=False)
class Asking:
    """Stores that were asked what they have of the prompt, and until when that is worth waiting for."""

    question: Question
    tiers: set[int]
    until: float


@dataclass(eq=False)
class CacheCursor:
    """
    # [0, node.end) committed   [node.end, row.n_tokens) not yet   [n_prompt, ...) the reply
    """

    root: Root
    prompt: Text
    boundaries: Sequence[int]
    hints: Sequence[int]
    control: CacheControl
    node: Node
    """The deepest committed block; leased, so that what follows always has its parent."""
    writes: bool
    step: int
    """A commit is due when this many tokens have come since the last."""
    clock: Callable[[], float]
    unbroken: Sequence[tuple[int, int]] = ()
    """Ranges of the prompt inside which nothing can resume."""
    reply: Sequence[int] = ()
    reply_at: int | None = None
    """Where the reply to a thinned prompt begins: its tokens have places, like the prompt's."""
    due: dict[int, Mark] = field(default_factory=dict)
    pieces: list[Piece] = field(default_factory=list)
    n_saved: int = 0
    """Window layers' tokens up to here are in records or pieces."""
    leased: list[Record] = field(default_factory=list)
    """What it is about to resume from."""
    loading: Loading | None = None
    asking: Asking | None = None
    loaded: dict[Record, tuple[str, Payload]] = field(default_factory=dict)
    """What was loaded for it, and from where: kept here too, so that nothing can evict it before use."""
    at_hand: frozenset[Record] = frozenset()
    """Of what it is to resume from, what was in memory when the loads were ordered."""
    n_plans: int = 0
    n_hoped: int = 0
    """Where it would resume if no load failed."""
    failed: str = ""
    """Why the last load failed, where it did."""
    pages: InRow | None = None
    """What lies in its row."""
    is_slower: bool = False
    """Something stored was left alone: computing it is faster."""
    n_restored: int = 0
    kind: str = ""
    """What sort of hit it was; '' before it was looked up."""
    admission: Admitted = Admitted(0)
    counted: bool = False
    closed: bool = False

    @property
    def n_expected(self) -> int:
        return max(self.n_hoped if self.racing else 0, self.admission.n_cached)

    @property
    def racing(self) -> bool:
        """Something is on its way that would let it skip a part of its prompt."""
        return self.loading is not None or self._hopes

    @property
    def pending(self) -> bool:
        """Something may come for it yet, even if it is not waited for any more."""
        return self.loading is not None or self.asking is not None

    @property
    def _hopes(self) -> bool:
        return self.asking is not None and self.clock() < self.asking.until

    def should_wait(self, *, busy: bool) -> bool:
        """Whether what is on its way should come sooner than another chunk is computed."""
        loading = self.loading
        if loading is None:
            return self._hopes
        until = loading.busy_patience_until if busy else loading.patience_until
        now = self.clock()
        return now < until or loading.wins(now)

    def commit_due(self, n_tokens: int) -> bool:
        return self.writes and n_tokens - self.n_saved >= self.step

    def cut(self, start: int, end: int) -> tuple[Text, int, int]:
        """Tokens [start, end) of the prompt and the reply: a text, and where in it they are."""
        n_prompt = len(self.prompt)
        if end <= n_prompt:
            return self.prompt, start, end
        return Text(self.tokens(start, end)), 0, end - start

    def tokens(self, start: int, end: int) -> KeyTokens:
        n_prompt = len(self.prompt)
        first = max(start - n_prompt, 0)
        reply = np.array(self.reply[first : max(end - n_prompt, 0)], dtype=np.uint64)
        if self.reply_at is not None:
            at = self.reply_at + first
            reply |= np.arange(at, at + len(reply), dtype=np.uint64) << np.uint64(32)
        return np.concatenate([self.prompt.tokens[start:end], reply])

    @property
    def n_known(self) -> int:
        """Tokens whose values are known here."""
        return len(self.prompt) + len(self.reply)
