"""Which records of a prompt a shared store has: found by asking for names, never by listing.

A record's name follows from the tokens up to its end, so for a given prompt all names are known. What
carries a chain is written from its front and lost from its end, so how far it goes is found by a search:

    blocks   0 1 . 3 . . . 7 . . . . . . . 15      first the 1st, 2nd, 4th, 8th, ... and the last,
                             ? ? ? ? ? ? ?        then up to 16 between the last hit and the first miss

A few dozen names of a prompt of 100,000 tokens are asked for, in three rounds. Blocks between two hits
are taken to be there: if one is not, its read is a miss and the request goes on from a shorter prefix.

Pure but for `find`; runs on an I/O thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from firn.cache.parts import Needs, Part
from firn.cache.storage.container import Label, Name
from firn.cache.storage.io import TierEntry
from firn.cache.storage.store_io import Find
from firn.cache.tiers import FoundRecord
from firn.cache.tree import BLOCK_S, Mark, PackedTokens
from firn.core.keys import Key, child_key
from firn.core.values import Namespace

N_ROUND = 16
"""Names in one round: as many as S3 is asked for at once."""
N_STATES = 16
"""Positions where a state may lie, the last first."""
N_RESUMES = 4
"""Of these, the last for which windows are asked for."""
N_WINDOWS = 64
"""Blocks before a place that its windows may take."""


@dataclass(frozen=True)
class StoreQuestion:
    """What a prompt could use that is not in the tree. Made on the engine thread, then only read.

    # blocks [0, n_known) are known here   those up to limit are asked for
    """

    root: Key
    fingerprint: bytes
    layout: str
    namespace: Namespace
    block: int
    needs: Needs
    text: PackedTokens
    known: Sequence[Key]
    """Of the whole blocks that are known here."""
    limit: int
    """The last position where the prompt could resume."""
    states: Sequence[int]
    """Where a state may lie, ascending; beyond what can be resumed at now."""
    now: float

    @property
    def n_known(self) -> int:
        return len(self.known)

    @cached_property
    def keys(self) -> list[Key]:
        """Of the whole blocks that are not known."""
        found, parent = [], self.known[-1] if self.known else self.root
        for i in range(self.n_known, self.limit // self.block):
            parent = child_key(parent, self.text.tokens[i * self.block : (i + 1) * self.block])
            found.append(parent)
        return found

    @property
    def carrier(self) -> Part | None:
        """The part that every block of a chain has; None: a state brings its path along."""
        return next(iter(self.needs.by_block), None)

    @property
    def is_empty(self) -> bool:
        n_blocks = self.limit // self.block
        return n_blocks <= self.n_known and not self.states if self.carrier else not self.states

    def before(self, i: int) -> Key:
        """The key at the end of i whole blocks."""
        if i == 0:
            return self.root
        return self.known[i - 1] if i <= self.n_known else self.keys[i - self.n_known - 1]


def search(question: StoreQuestion, find: Find) -> list[TierEntry]:
    """What the store has of it, parents before their children. Raises TierFault."""
    carrier = question.carrier
    if carrier is None:
        return list(_alone(question, find))
    names = [Name(key, carrier) for key in question.keys]
    seen = _chain(names, find)
    n_found = len(seen) and max(seen) + 1
    entries = [_block(question, i, carrier, _near(seen, i)) for i in range(n_found)]
    ends = [question.n_known + n_found]
    if question.needs.state:
        states = _states(question, n_found, find)
        entries += [entry for p in states for entry in states[p]]
        ends = [p // question.block for p in list(states)[-N_RESUMES:]]
    if carrier is Part.PAGES and question.needs.window:
        entries += _windows(question, ends, find)
    return entries


# --- how far the chain goes ----------------------------------------------------------------


def _chain(names: Sequence[Name], find: Find) -> dict[int, FoundRecord]:
    """Those that are known to be there, by their place, before the first that is not."""
    seen: dict[int, FoundRecord] = {}
    end, ask = len(names), _powers(len(names))
    while ask:
        found = find([names[i] for i in ask])
        seen |= {i: found[names[i]] for i in ask if names[i] in found}
        end = min((i for i in ask if i not in seen), default=end)
        ask = _between(max((i for i in seen if i < end), default=-1), end)
    return {i: one for i, one in seen.items() if i < end}


def _powers(n: int) -> list[int]:
    places = {0, n - 1} if n else set()
    step = 1
    while step < n:
        places.add(step)
        step *= 2
    return sorted(places)


def _between(low: int, high: int) -> list[int]:
    """Evenly spread places after low and before high."""
    n = high - low - 1
    if n <= N_ROUND:
        return list(range(low + 1, high))
    return sorted({low + (i + 1) * (n + 1) // (N_ROUND + 1) for i in range(N_ROUND)} - {low})


def _near(seen: Mapping[int, FoundRecord], i: int) -> FoundRecord:
    """What is known of a block, or of the next that was asked for: whole blocks are of one size."""
    return seen[min(j for j in seen if j >= i)]


# --- what else a resume needs --------------------------------------------------------------


def _windows(question: StoreQuestion, ends: Sequence[int], find: Find) -> Iterator[TierEntry]:
    """The windows before places where the prompt may resume, given in whole blocks."""
    reach = min(-(-question.needs.window // question.block) + 1, N_WINDOWS)
    places = sorted({i for end in ends for i in range(max(end - reach, 0), end)})
    names = {Name(question.before(i + 1), Part.WINDOW): i for i in places}
    found = find(list(names)) if names else {}
    for name, i in names.items():
        if name in found:
            start = i * question.block
            yield _entry(question, name, start, start + question.block, found[name])


def _states(question: StoreQuestion, n_found: int, find: Find) -> dict[int, list[TierEntry]]:
    """States on the chain by their places, each with what a resume inside a block needs beside it."""
    end = (question.n_known + n_found + 1) * question.block
    keys = {p: _key_at(question, p) for p in [p for p in question.states if p < end][-N_STATES:]}
    found = find([Name(key, Part.STATE) for key in keys.values()]) if keys else {}
    there = {p: key for p, key in keys.items() if Name(key, Part.STATE) in found}
    tails = {
        Name(key, part): p
        for p, key in there.items()
        if p % question.block
        for part in question.needs.by_block
    }
    beside = find(list(tails)) if tails else {}
    entries: dict[int, list[TierEntry]] = {}
    for p, key in there.items():
        start = (p - 1) // question.block * question.block
        own = [name for name, at in tails.items() if at == p]
        if all(name in beside for name in own):
            entries[p] = [_entry(question, name, start, p, beside[name]) for name in own]
            state = Name(key, Part.STATE)
            entries[p].append(_entry(question, state, start, p, found[state]))
    return entries


def _alone(question: StoreQuestion, find: Find) -> Iterator[TierEntry]:
    """States of a model that has nothing else: each record holds all tokens before it."""
    keys = {p: _key_at(question, p) for p in question.states[-N_STATES:]}
    found = find([Name(key, Part.STATE) for key in keys.values()]) if keys else {}
    for p, key in keys.items():
        name = Name(key, Part.STATE)
        if name in found:
            yield _entry(question, name, 0, p, found[name])


def _key_at(question: StoreQuestion, position: int) -> Key:
    """Of the node that ends here: a whole block, or a tail."""
    n_whole, rest = divmod(position, question.block)
    parent = question.before(n_whole)
    return child_key(parent, question.text.tokens[position - rest : position]) if rest else parent


def _block(question: StoreQuestion, i: int, part: Part, found: FoundRecord) -> TierEntry:
    """The i-th of the blocks that were asked for."""
    start = (question.n_known + i) * question.block
    return _entry(question, Name(question.keys[i], part), start, start + question.block, found)


def _entry(
    question: StoreQuestion, name: Name, start: int, end: int, found: FoundRecord
) -> TierEntry:
    """As a scan would tell of it. What it says of itself is compared when it is read."""
    tokens = question.text.tokens[start:end]
    depth = start // question.block
    label = Label(
        key=name.key,
        parent=question.root if start == 0 else question.before(depth),
        root=question.root,
        part=name.part,
        start=start,
        fingerprint=question.fingerprint,
        namespace=question.namespace,
        created=found.written_at,
        mark=int(Mark.TURN),
        tokens=tokens,
        layout=question.layout,
    )
    used_at = question.now - BLOCK_S * (depth + (name.part is not question.carrier))
    return TierEntry(label, found.nbytes, used_at, PackedTokens(tokens))
