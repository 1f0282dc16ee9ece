"""Finds which records of a prompt a shared store has, by looking up names: a store is never listed.

A record's name follows from the tokens up to its end, so all names of a prompt are known. Its blocks
are written from the front and lost from the end, so a search finds how far they reach:

    blocks   0 1 2 . 4 . . . 8 . . . . . . . 16    first 0, 1, 2, 4, 8, ... and the last,
                               ? ? ? ? ? ? ?      then up to 16 between the last hit and the first miss

For a prompt of 100,000 tokens that takes a few dozen names, in three rounds. Blocks between two
hits are assumed to be there: if one is not, its read is a miss, and the request resumes from a
shorter prefix.

Pure: it yields the names to look up next, and is sent what was found of them. A worker does the
looking up, and runs the search on an I/O thread.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from firn.cache.parts import Needs, Part
from firn.cache.storage.container import Label, Name, TierEntry
from firn.cache.tiers import FoundRecord
from firn.cache.tree import BLOCK_S, CheckpointKind
from firn.core.keys import Key, block_keys, child_key
from firn.core.values import Namespace, PackedTokens

R = TypeVar("R")
Found = Mapping[Name, FoundRecord]
"""Which of the names that were looked up the store has."""
Search = Generator[Sequence[Name], Found, R]
N_ROUND = 16
"""Names looked up in one round: as many as an S3 client looks up concurrently."""
N_STATES = 16
"""States looked up: those at the last positions where one may be stored."""
N_RESUMES = 4
"""States for which windows are looked up: the last ones found."""
N_WINDOWS = 64
"""Cap on the blocks looked up for one window."""


@dataclass(frozen=True)
class StoreQuestion:
    """What a prompt could use that is not in the tree. Made on the engine thread, then only read.

    # blocks [0, n_known) are in the tree   [n_known, limit // block) are looked up
    """

    root: Key
    fingerprint: bytes
    layout: str
    namespace: Namespace
    block: int
    needs: Needs
    prompt: PackedTokens
    known: Sequence[Key]
    """The keys of the whole blocks in the tree."""
    limit: int
    """The last position where the prompt could resume."""
    states: Sequence[int]
    """Positions where a state may be stored, ascending, beyond the current resume point."""
    now: float

    @property
    def n_known(self) -> int:
        return len(self.known)

    @cached_property
    def keys(self) -> list[Key]:
        """The keys of the whole blocks to look up."""
        parent = self.known[-1] if self.known else self.root
        unknown = self.prompt.tokens[self.n_known * self.block : self.limit]
        return block_keys(parent, unknown, self.block)

    @property
    def carrier(self) -> Part | None:
        """The part that every block of a chain has; None: a state's record names its whole path."""
        return next(iter(self.needs.by_block), None)

    @property
    def is_empty(self) -> bool:
        n_blocks = self.limit // self.block
        return n_blocks <= self.n_known and not self.states if self.carrier else not self.states

    def key_after(self, n_blocks: int) -> Key:
        """The key at the end of this many whole blocks."""
        if n_blocks == 0:
            return self.root
        if n_blocks <= self.n_known:
            return self.known[n_blocks - 1]
        return self.keys[n_blocks - self.n_known - 1]

    def key_at(self, position: int) -> Key:
        """The key of the node that ends here: a whole block, or a tail."""
        n_blocks, n_tail = divmod(position, self.block)
        parent = self.key_after(n_blocks)
        tail = self.prompt.tokens[position - n_tail : position]
        return child_key(parent, tail) if n_tail else parent


def search(question: StoreQuestion) -> Search[list[TierEntry]]:
    """Returns the records that the store has, parents before their children."""
    carrier = question.carrier
    if carrier is None:
        return (yield from _lone_states(question))
    names = [Name(key, carrier) for key in question.keys]
    hits = yield from _chain(names)
    n_found = max(hits, default=-1) + 1
    entries = [_block(question, i, carrier, _near(hits, i)) for i in range(n_found)]
    ends = [question.n_known + n_found]
    if question.needs.state:
        states = yield from _states(question, n_found)
        entries += [entry for p in states for entry in states[p]]
        ends = [p // question.block for p in list(states)[-N_RESUMES:]]
    if carrier is Part.PAGES and question.needs.window:
        entries += yield from _windows(question, ends)
    return entries


# --- how far the chain goes ----------------------------------------------------------------


def _chain(names: Sequence[Name]) -> Search[dict[int, FoundRecord]]:
    """The hits before the first miss, by index. Other names before it were not looked up."""
    hits: dict[int, FoundRecord] = {}
    first_miss, asked = len(names), _powers(len(names))
    while asked:
        answer = yield [names[i] for i in asked]
        hits |= {i: answer[names[i]] for i in asked if names[i] in answer}
        first_miss = min((i for i in asked if i not in hits), default=first_miss)
        last_hit = max((i for i in hits if i < first_miss), default=-1)
        asked = _between(last_hit, first_miss)
    return {i: hit for i, hit in hits.items() if i < first_miss}


def _powers(n: int) -> list[int]:
    """0, the powers of two below n, and n - 1."""
    indices = {0, n - 1} if n else set()
    power = 1
    while power < n:
        indices.add(power)
        power *= 2
    return sorted(indices)


def _between(low: int, high: int) -> list[int]:
    """At most N_ROUND indices between low and high, exclusive and evenly spread."""
    n = high - low - 1
    if n <= N_ROUND:
        return list(range(low + 1, high))
    return sorted({low + (i + 1) * (n + 1) // (N_ROUND + 1) for i in range(N_ROUND)} - {low})


def _near(hits: Mapping[int, FoundRecord], i: int) -> FoundRecord:
    """The hit at index i, or else the next one: all whole blocks have the same size."""
    return hits[min(j for j in hits if j >= i)]


# --- what else a resume needs --------------------------------------------------------------


def _windows(question: StoreQuestion, ends: Sequence[int]) -> Search[list[TierEntry]]:
    """The windows needed to resume after each of `ends`, which are numbers of whole blocks."""
    n_blocks = min(-(-question.needs.window // question.block) + 1, N_WINDOWS)
    blocks = sorted({i for end in ends for i in range(max(end - n_blocks, 0), end)})
    names = {Name(question.key_after(i + 1), Part.WINDOW): i for i in blocks}
    windows = yield from _look_up(list(names))
    starts = {name: i * question.block for name, i in names.items() if name in windows}
    return [
        _entry(question, name, start, start + question.block, windows[name])
        for name, start in starts.items()
    ]


def _states(question: StoreQuestion, n_found: int) -> Search[dict[int, list[TierEntry]]]:
    """States on the chain by position, with the other parts of the tail if inside a block."""
    end = (question.n_known + n_found + 1) * question.block
    states = yield from _find_states(question, [p for p in question.states if p < end])
    tails = {
        Name(question.key_at(p), part): p
        for p in states
        if p % question.block
        for part in question.needs.by_block
    }
    parts = yield from _look_up(list(tails))
    entries: dict[int, list[TierEntry]] = {}
    for p, state in states.items():
        start = (p - 1) // question.block * question.block
        own = [name for name, position in tails.items() if position == p]
        if all(name in parts for name in own):
            entries[p] = [_entry(question, name, start, p, parts[name]) for name in own]
            name = Name(question.key_at(p), Part.STATE)
            entries[p].append(_entry(question, name, start, p, state))
    return entries


def _lone_states(question: StoreQuestion) -> Search[list[TierEntry]]:
    """States of a model that stores nothing else: each record names all tokens before it."""
    states = yield from _find_states(question, question.states)
    return [
        _entry(question, Name(question.key_at(p), Part.STATE), 0, p, state)
        for p, state in states.items()
    ]


def _find_states(
    question: StoreQuestion, positions: Sequence[int]
) -> Search[dict[int, FoundRecord]]:
    """The states that the store has at the last of these positions."""
    names = {p: Name(question.key_at(p), Part.STATE) for p in positions[-N_STATES:]}
    states = yield from _look_up(list(names.values()))
    return {p: states[name] for p, name in names.items() if name in states}


def _look_up(names: Sequence[Name]) -> Search[Found]:
    return (yield names) if names else {}


def _block(question: StoreQuestion, i: int, part: Part, stored: FoundRecord) -> TierEntry:
    """The i-th of the blocks that were looked up."""
    start = (question.n_known + i) * question.block
    return _entry(question, Name(question.keys[i], part), start, start + question.block, stored)


def _entry(
    question: StoreQuestion, name: Name, start: int, end: int, stored: FoundRecord
) -> TierEntry:
    """The entry that a scan would report. Reading the record checks it against the header."""
    tokens = question.prompt.tokens[start:end]
    depth = start // question.block
    label = Label(
        key=name.key,
        parent=question.key_after(depth),
        root=question.root,
        part=name.part,
        start=start,
        fingerprint=question.fingerprint,
        namespace=question.namespace,
        created=stored.written_at,
        mark=int(CheckpointKind.TURN),
        tokens=tokens,
        layout=question.layout,
    )
    used_at = question.now - BLOCK_S * (depth + (name.part is not question.carrier))
    return TierEntry(label, stored.nbytes, used_at, PackedTokens(tokens))
