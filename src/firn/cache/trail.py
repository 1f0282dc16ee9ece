"""One sequence's way through the tree. Owner: the engine thread, through the prefix cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from firn.cache.codecs import Arrays
from firn.cache.index import Mark, Node, Record
from firn.core.events import Admitted
from firn.core.keys import Key, KeyTokens
from firn.core.values import CacheControl


@dataclass(frozen=True, slots=True)
class Piece:
    """Window layers' tokens [start, end) of a row, saved before the live ring overwrites them."""

    start: int
    end: int
    layers: list[Arrays]


@dataclass(eq=False)
class Loading:
    """Records on their way from below memory."""

    missing: set[Record]
    nbytes: int
    began: float
    deadline: float
    failed: bool = False


class Leases(Protocol):
    """Keeps a node, and with it all above it, from being evicted."""

    def lease(self, node: Node) -> None: ...

    def unlease(self, node: Node) -> None: ...


@dataclass(eq=False)
class CacheTrail:
    """
    # [0, node.end) committed   [node.end, row.n_tokens) not yet   [n_prompt, ...) the reply
    """

    root: Node
    prompt: KeyTokens
    keys: Sequence[Key]
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
    due: dict[int, Mark] = field(default_factory=dict)
    pieces: list[Piece] = field(default_factory=list)
    n_saved: int = 0
    """Window layers' tokens up to here are in records or pieces."""
    loading: Loading | None = None
    loaded: dict[Record, list[Arrays]] = field(default_factory=dict)
    """What was loaded for this trail: held here too, so that nothing can evict it before its use."""
    leased: list[Record] = field(default_factory=list)
    n_fetches: int = 0
    found: Admitted = Admitted(0)
    closed: bool = False

    @property
    def ready(self) -> bool:
        """Nothing is on its way any more, or it took too long."""
        return self.loading is None or self.clock() > self.loading.deadline

    def wants(self, n_tokens: int) -> bool:
        return self.writes and n_tokens - self.n_saved >= self.step

    def move(self, node: Node, leases: Leases) -> None:
        """Go on to a deeper block."""
        leases.lease(node)
        previous, self.node = self.node, node
        leases.unlease(previous)

    def unlease_records(self) -> None:
        for record in self.leased:
            record.n_leases -= 1
        self.leased.clear()

    def values(self, start: int, end: int) -> KeyTokens:
        """Key tokens [start, end) of the prompt and the reply."""
        n_prompt = len(self.prompt)
        if end <= n_prompt:
            return self.prompt[start:end]
        reply = self.reply[max(start - n_prompt, 0) : end - n_prompt]
        return np.concatenate([self.prompt[start:], np.array(reply, dtype=np.uint64)])

    @property
    def n_known(self) -> int:
        """Tokens whose values are known here."""
        return len(self.prompt) + len(self.reply)
