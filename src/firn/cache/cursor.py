"""A request's place in the cache: what it asks, and three values, each written by one part of the cache.

    CacheRequest   the request itself: never changes
    Committed      how far its row is committed            written by Committer (commit.py)
    Loads          what is being loaded for it             written by Loader (loading.py)
    Reuse          what it got from the cache, and why     written by Restorer (restore.py)

Everybody may read all of them. `tests/cache/test_cursor.py` checks that nobody else writes.
Owner: the engine thread, through the prefix cache.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from firn.cache.arrays.payload import Payload
from firn.cache.copies import CopyOrder
from firn.cache.memory.rows import RowPages
from firn.cache.planning.match import Match, Walk
from firn.cache.planning.plan import GRACE_S
from firn.cache.storage.store_search import StoreQuestion
from firn.cache.tree import CheckpointKind, Node, Record, Root, Tree
from firn.core.clock import Clock
from firn.core.events import Admitted
from firn.core.keys import reply_tokens
from firn.core.reuse import Cause
from firn.core.values import CacheControl, KeyTokens, PackedTokens, Prompt

MAX_LATE = 4
"""A record may be this many average read times late: several threads read, so records arrive in
bursts."""


@dataclass(frozen=True, slots=True)
class CacheRequest:
    """What the cache is asked for: set when the cursor is opened or forked."""

    root: Root
    source: Prompt
    prompt: PackedTokens
    """Its key tokens."""
    control: CacheControl
    clock: Clock
    patient_until: float = math.inf
    """The end of all waiting, except for a load that is faster than computing."""
    reply: Sequence[int] = ()
    """A choice's tokens, which grow."""

    @property
    def n_known(self) -> int:
        """How many tokens of prompt and reply are known."""
        return len(self.prompt) + len(self.reply)

    def packed(self, start: int, end: int) -> tuple[PackedTokens, int, int]:
        """Packed tokens that contain [start, end) of prompt and reply, and where in them that is."""
        if end <= len(self.prompt):
            return self.prompt, start, end
        return PackedTokens(self._tokens(start, end)), 0, end - start

    def _tokens(self, start: int, end: int) -> KeyTokens:
        n_prompt = len(self.prompt)
        first = max(start - n_prompt, 0)
        reply = reply_tokens(self.source, self.reply[first : max(end - n_prompt, 0)], first)
        return np.concatenate([self.prompt.tokens[start:end], reply])


# --- how far it is committed ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WindowPiece:
    """The window layers' tokens [start, end) of a row, saved before the ring overwrites them."""

    start: int
    end: int
    layers: Payload


@dataclass(eq=False, slots=True)
class Committed:
    """How far the request's row is committed. Written by `Committer`.

    # [0, node.end) committed   [node.end, row.n_tokens) not yet   [n_prompt, ...) the reply
    """

    node: Node
    """The deepest committed block; leased, so that the next block always has its parent."""
    writes: bool
    """Whether more is committed for this request. Not after a fault."""
    due: dict[int, CheckpointKind] = field(default_factory=dict)
    """Positions where a state will be kept."""
    branches: list[int] = field(default_factory=list)
    """Ascending positions, not committed yet, where other prompts may branch off: their windows are
    written at once."""
    pieces: list[WindowPiece] = field(default_factory=list)
    n_saved: int = 0
    """The window layers' tokens before this are in records or pieces."""
    pages: RowPages | None = None
    """The records that are in its row."""
    copies: CopyOrder | None = None
    """The copies that its last commit has ordered."""


# --- what is being loaded ------------------------------------------------------------------


@dataclass(eq=False)
class Loading:
    """Records that are being read so that the prompt can resume at `n_tokens`. Written by `Loader`."""

    n_tokens: int
    missing: set[Record]
    began: float
    patience_until: float
    """Until this time an idle engine waits for the load instead of computing."""
    busy_patience_until: float
    """Until this time an engine with rows that decode waits for it."""
    deadline: float
    compute_s: float = 0.0
    """How long computing tokens [start, n_tokens) instead would take."""
    start: int = 0
    front: int = 0
    """How far the prompt is computed and committed by now. I/O threads read this and `over`."""
    over: bool = False
    to_order: deque[Record] = field(default_factory=deque)
    """Records whose reads are not ordered yet, in order."""
    nbytes: dict[str, int] = field(default_factory=dict)
    """Bytes that have arrived, by tier."""
    n_arrived: int = 0
    last_at: float = 0.0
    """When the last record was read."""
    taken_at: float = 0.0
    """When the engine received it."""
    engine_s: float = 0.0
    """How much engine time receiving all records took."""

    def wants(self, record: Record) -> bool:
        """Whether it is still needed: what is before the front has been computed. Any thread."""
        return not self.over and record.node.end > self.front

    def beats_computing(self, now: float) -> bool:
        """Whether the rest will arrive, at the pace so far, in half the time of computing it.

        If so, a chunk started now would only take processor time from the load, and end after it.
        False once records stop arriving at that pace.
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
class PendingQuestion:
    """Stores that have yet to answer what they have of the prompt. Written by `Loader`."""

    question: StoreQuestion
    tiers: set[int]
    until: float
    """Until when an answer is worth waiting for."""


@dataclass(frozen=True, eq=False, slots=True)
class LoadNews:
    """Less, or more, can be loaded than was known before, for this cause. Two are never equal: the same
    may happen twice."""

    cause: Cause


@dataclass(eq=False, slots=True)
class Loads:
    """What is loaded for the request, and what it waits for. Written by `Loader`."""

    leased: list[Record] = field(default_factory=list)
    """Records that it is about to resume from."""
    loading: Loading | None = None
    asking: PendingQuestion | None = None
    loaded: dict[Record, tuple[str, Payload]] = field(default_factory=dict)
    """What was loaded, and from which tier. Held here so that nothing evicts it before use."""
    in_memory_before: frozenset[Record] = frozenset()
    """The records of its target that were in memory when the loads were ordered."""
    n_plans: int = 0
    n_ready: int = 0
    """Where it can resume without waiting any longer, as planned, and as far as loads have arrived."""
    n_target: int = 0
    """Where it would resume if no load failed."""
    fault: Cause | None = None
    """Why the last load failed, if it did."""
    was_not_answered: bool = False
    """A store that was asked has failed, so that more may be stored."""
    is_slower: bool = False
    """Some of what is stored is not loaded, because computing it is faster."""
    news: LoadNews | None = None
    """What has happened last that a reason given before did not expect."""

    @property
    def are_pending(self) -> bool:
        """Whether something may still arrive, even if nothing waits for it any more."""
        return self.loading is not None or self.asking is not None


# --- what it got ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Resuming:
    """A row that the engine is making."""

    match: Match
    taken: RowPages | None
    """The parked row whose buffers it takes over."""
    otherwise: Admitted
    """The request's admission if it cannot be made."""


@dataclass(eq=False, slots=True)
class Reuse:
    """What the request got from the cache, and why not more. Written by `Restorer`."""

    admission: Admitted = Admitted(0)
    hit_kind: str = ""
    """whole, growing or branching (see Stats.hits); '' before the lookup."""
    resuming: Resuming | None = None
    """The row that the engine is making for it."""
    is_weighed_out: bool = False
    """What matches is not used, because computing it is faster than filling a row with it."""
    heard: LoadNews | None = None
    """The last news of its loads that the admission's reason takes into account."""
    is_counted: bool = False
    """Its lookup is in the statistics."""


@dataclass(eq=False)
class CacheCursor:
    request: CacheRequest
    committed: Committed
    loads: Loads
    reuse: Reuse
    _known: tuple[int, Walk] | None = field(default=None, init=False)
    """How far the tree knew the prompt, and at which of its versions."""

    def walk(self, tree: Tree) -> Walk:
        """How far the tree knows the prompt, as of now."""
        if self._known is None or self._known[0] != tree.version:
            request = self.request
            unbroken = request.source.unbroken
            walk = Walk.of(tree, request.root, request.prompt, unbroken=unbroken)
            self._known = tree.version, walk
        return self._known[1]

    def has(self, record: Record) -> bool:
        """Whether it could resume from the record immediately."""
        return record.arrays is not None or record in self.loads.loaded

    @property
    def writes(self) -> bool:
        """Whether more is committed for it. Not after copies have failed: its chain has a hole."""
        copies = self.committed.copies
        return self.committed.writes and not (copies is not None and copies.has_failed)

    @property
    def admission(self) -> Admitted:
        return self.reuse.admission

    @property
    def n_expected(self) -> int:
        return max(self.loads.n_target if self.racing else 0, self.admission.n_cached)

    @property
    def racing(self) -> bool:
        return self.loads.loading is not None or self._awaits_answer

    def should_wait(self, *, busy: bool) -> bool:
        loading = self.loads.loading
        if loading is None:
            return self._awaits_answer
        until = loading.busy_patience_until if busy else loading.patience_until
        now = self.request.clock.elapsed()
        return now < min(until, self.request.patient_until) or loading.beats_computing(now)

    @property
    def _awaits_answer(self) -> bool:
        asking, request = self.loads.asking, self.request
        if asking is None:
            return False
        return request.clock.elapsed() < min(asking.until, request.patient_until)
