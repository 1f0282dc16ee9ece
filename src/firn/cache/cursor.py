"""A request's place in the tree: how far it is committed, what is being loaded, what it reused.

Owner: the engine thread, through the prefix cache. A cursor decides nothing; each group of its fields is
written by one part of the cache, which its heading names.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from firn.cache.arrays.payload import Payload
from firn.cache.memory.rows import RowPages
from firn.cache.planning.match import Match, Walk
from firn.cache.planning.plan import GRACE_S
from firn.cache.storage.store_search import StoreQuestion
from firn.cache.tree import InRow, Mark, Node, Record, Root, Tree
from firn.core.events import Admitted
from firn.core.keys import reply_tokens
from firn.core.reuse import Cause
from firn.core.values import CacheControl, KeyTokens, PackedTokens, Prompt

MAX_LATE = 4
"""A record may be this many average read times late: several threads read, so records arrive in
bursts."""


@dataclass(frozen=True, slots=True)
class WindowPiece:
    """The window layers' tokens [start, end) of a row, saved before the ring overwrites them."""

    start: int
    end: int
    layers: Payload


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


@dataclass(frozen=True, slots=True)
class Resuming:
    """A row that the engine is making."""

    match: Match
    taken: RowPages | None
    """The parked row whose buffers it takes over."""
    otherwise: Admitted
    """The request's admission if it cannot be made."""


@dataclass(eq=False)
class CacheCursor:
    """
    # [0, node.end) committed   [node.end, row.n_tokens) not yet   [n_prompt, ...) the reply
    """

    # --- the request: set when the cursor is opened or forked
    root: Root
    source: Prompt
    prompt: PackedTokens
    """Its key tokens."""
    control: CacheControl
    # --- position: written by Committer, and by Restorer when the row jumps
    node: Node
    """The deepest committed block; leased, so that the next block always has its parent."""
    writes: bool
    """Whether more is committed for this request. The prefix cache clears it after a fault."""
    commit_every: int
    """Tokens between two commits."""
    clock: Callable[[], float]
    patient_until: float = math.inf
    """The end of all waiting, except for a load that is faster than computing."""
    reply: Sequence[int] = ()
    due: dict[int, Mark] = field(default_factory=dict)
    """Positions where a state will be kept."""
    branches: list[int] = field(default_factory=list)
    """Ascending positions, not committed yet, where other prompts may branch off: their windows are
    written at once. Written by the prefix cache."""
    pieces: list[WindowPiece] = field(default_factory=list)
    n_saved: int = 0
    """The window layers' tokens before this are in records or pieces."""
    pages: InRow | None = None
    """The records that are in its row. Also written by Parking."""
    known: tuple[int, Walk] | None = None
    """How far the tree knew the prompt, and at which of its versions. Written by `walk`."""
    # --- loading: written by Loader
    leased: list[Record] = field(default_factory=list)
    """Records that it is about to resume from."""
    loading: Loading | None = None
    asking: PendingQuestion | None = None
    loaded: dict[Record, tuple[str, Payload]] = field(default_factory=dict)
    """What was loaded for it, and from which tier. Held here so that nothing evicts it before use;
    Parking removes what has moved into its row."""
    in_memory_before: frozenset[Record] = frozenset()
    """The records of its target that were in memory when the loads were ordered."""
    n_plans: int = 0
    n_ready: int = 0
    """Where it can resume without waiting any longer, as planned, and as far as loads have arrived."""
    n_target: int = 0
    """Where it would resume if no load failed."""
    load_fault: Cause | None = None
    """Why the last load failed, if it did."""
    was_not_answered: bool = False
    """A store that was asked has failed, so that more may be stored."""
    is_slower: bool = False
    """Some of what is stored is not loaded, because computing it is faster."""
    # --- outcome: written by the prefix cache; Loader corrects the reason in `admission`
    resuming: Resuming | None = None
    """The row that the engine is making for it. Written by Restorer."""
    hit_kind: str = ""
    """whole, growing or branching (see Stats.hits); '' before the lookup."""
    admission: Admitted = Admitted(0)
    counted: bool = False
    closed: bool = False

    # --- for the engine: core.ports.Cursor -------------------------------------------------

    @property
    def n_expected(self) -> int:
        return max(self.n_target if self.racing else 0, self.admission.n_cached)

    @property
    def racing(self) -> bool:
        return self.loading is not None or self._awaits_answer

    def should_wait(self, *, busy: bool) -> bool:
        loading = self.loading
        if loading is None:
            return self._awaits_answer
        until = loading.busy_patience_until if busy else loading.patience_until
        now = self.clock()
        return now < min(until, self.patient_until) or loading.beats_computing(now)

    def commit_due(self, n_tokens: int) -> bool:
        return self.writes and n_tokens - self.n_saved >= self.commit_every

    @property
    def _awaits_answer(self) -> bool:
        return self.asking is not None and self.clock() < min(self.asking.until, self.patient_until)

    # --- for the cache ---------------------------------------------------------------------

    @property
    def pending(self) -> bool:
        """Whether something may still arrive for it, even if nothing waits for it any more."""
        return self.loading is not None or self.asking is not None

    def has(self, record: Record) -> bool:
        """Whether it could resume from the record immediately."""
        return record.arrays is not None or record in self.loaded

    def walk(self, tree: Tree) -> Walk:
        """How far the tree knows the prompt, as of now."""
        if self.known is None or self.known[0] != tree.version:
            walk = Walk.of(tree, self.root, self.prompt, unbroken=self.source.unbroken)
            self.known = tree.version, walk
        return self.known[1]

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
