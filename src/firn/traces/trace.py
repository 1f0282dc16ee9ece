"""A trace: requests in order of arrival, each a chain of blocks that shows what it shares.

Two requests share a prefix as far as their chains begin with the same blocks. Only whole blocks
count: a trace does not record what a shorter rest shares. Chains are stored as block numbers in one
array, so that a million requests fit in memory and other processes can map them.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from firn.core.errors import FirnError

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class TraceError(FirnError):
    """A trace cannot be read; the message names the place."""

    code = "bad_trace"


@dataclass(frozen=True, slots=True)
class TraceEntry:
    """One request. blocks: hashes of its prompt's whole blocks, each of all tokens up to its end.

    reply_blocks: hashes of the blocks that its reply has filled. first_s: seconds until the
    first token. cached: reused tokens by tier. token_nbytes: a token's size in the cache, 0 if
    unknown.
    """

    at_s: float
    n_prompt: int
    n_reply: int
    blocks: tuple[int, ...]
    reply_blocks: tuple[int, ...] = ()
    cached: tuple[tuple[str, int], ...] = ()
    first_s: float | None = None
    model: str = ""
    token_nbytes: int = 0


@dataclass(frozen=True)
class Trace:
    """Sorted by arrival. Request i has the blocks nodes[starts[i]:ends[i]]: the first n_prompt_blocks[i]
    are its prompt's, the others its reply's."""

    block: int
    at: Floats
    n_prompt: Longs
    starts: Longs
    ends: Longs
    n_prompt_blocks: Ints
    nodes: Ints
    n_nodes: int
    token_nbytes: int = 0

    def __len__(self) -> int:
        return len(self.at)

    def path(self, i: int) -> Ints:
        return self.nodes[self.starts[i] : self.ends[i]]

    @property
    def n_prompt_tokens(self) -> int:
        return int(self.n_prompt.sum())

    @property
    def working_set_tokens(self) -> int:
        """Tokens in all blocks that are ever stored."""
        return self.n_nodes * self.block

    @cached_property
    def known(self) -> Ints:
        """How many blocks of each prompt earlier requests had: what an unlimited cache reuses."""
        seen = np.zeros(self.n_nodes, dtype=bool)
        n_known = np.zeros(len(self), dtype=np.int32)
        for i in range(len(self)):
            path = self.path(i)
            asked = seen[path[: self.n_prompt_blocks[i]]]
            n_known[i] = len(asked) if asked.all() else int(asked.argmin())
            seen[path] = True
        return n_known

    def save(self, folder: Path) -> None:
        for name in _ARRAYS:
            np.save(folder / f"{name}.npy", getattr(self, name))
        numbers = {n: getattr(self, n) for n in ("block", "n_nodes", "token_nbytes")}
        (folder / "trace.json").write_text(json.dumps(numbers), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Trace:
        """Maps the arrays, without reading them: processes that load one folder share memory."""
        # As plain arrays over the mapped memory: slicing a memmap takes ten times as long.
        arrays: dict[str, Any] = {
            n: np.asarray(np.load(folder / f"{n}.npy", mmap_mode="r")) for n in _ARRAYS
        }
        numbers = json.loads((folder / "trace.json").read_text(encoding="utf-8"))
        return cls(**arrays, **numbers)

    @classmethod
    def of(cls, entries: Iterable[TraceEntry], *, block: int) -> Trace:
        """Raises TraceError if there is no request."""
        chains, ends, at = _Chains(), array("q"), array("d")
        n_prompt, n_prompt_blocks = array("q"), array("i")
        token_nbytes = 0
        for entry in entries:
            chains.add((*entry.blocks, *entry.reply_blocks) if entry.reply_blocks else entry.blocks)
            ends.append(len(chains.nodes))
            at.append(entry.at_s)
            n_prompt.append(entry.n_prompt)
            n_prompt_blocks.append(len(entry.blocks))
            token_nbytes = max(token_nbytes, entry.token_nbytes)
        if not at:
            raise TraceError("There is no request in the trace.")
        order = np.argsort(np.array(at), kind="stable")
        last = np.array(ends, dtype=np.int64)
        first = np.concatenate([[0], last[:-1]])
        return cls(
            block=block,
            at=np.array(at)[order],
            n_prompt=np.array(n_prompt, dtype=np.int64)[order],
            starts=first[order],
            ends=last[order],
            n_prompt_blocks=np.array(n_prompt_blocks, dtype=np.int32)[order],
            nodes=np.frombuffer(chains.nodes, dtype=np.int32) if chains.nodes else _NOTHING,
            n_nodes=chains.n_nodes,
            token_nbytes=token_nbytes,
        )


class _Chains:
    """Numbers blocks. Most of a chain was seen before: that part is copied, not looked up.

    A block is identified by its hash and its parent: a hash ought to cover all that precedes the block,
    but only the program that wrote the trace knows whether it does.
    """

    def __init__(self) -> None:
        self.nodes = array("i")
        """All chains, one after the other."""
        self._numbers: dict[int, int] = {}
        """By hash: the first block with this hash."""
        self._others: dict[tuple[int, int], int] = {}
        """By parent and hash: blocks whose hash another block had before."""
        self._names, self._parents = array("Q"), array("i")
        self._depths, self._born = array("i"), array("q")
        """By block. `_born`: the start in `nodes` of the chain in which it first occurred."""

    @property
    def n_nodes(self) -> int:
        return len(self._names)

    def add(self, chain: Sequence[int]) -> None:
        start = len(self.nodes)
        known = self._known(chain)
        self.nodes.extend(known)
        parent = known[-1] if known else -1
        for depth in range(len(known), len(chain)):
            parent = self._child(parent, chain[depth], depth, start)
            self.nodes.append(parent)

    def _known(self, chain: Sequence[int]) -> array[int]:
        """The numbers of the longest known prefix, found by bisection: hashes cover what precedes."""
        low, high, number = 0, len(chain), -1
        while low < high:
            middle = (low + high + 1) // 2
            candidate = self._numbers.get(chain[middle - 1], -1)
            if candidate >= 0 and self._depths[candidate] == middle - 1:
                low, number = middle, candidate
            else:
                high = middle - 1
        if number < 0:
            return array("i")
        start, names = self._born[number], self._names
        path = self.nodes[start : start + low]
        same = all(names[node] == name for node, name in zip(path, chain, strict=False))
        return path if same else array("i")

    def _child(self, parent: int, name: int, depth: int, start: int) -> int:
        number = self._numbers.get(name)
        if number is not None and self._parents[number] == parent:
            return number
        if number is not None and (other := self._others.get((parent, name))) is not None:
            return other
        made = len(self._names)
        self._names.append(name)
        self._parents.append(parent)
        self._depths.append(depth)
        self._born.append(start)
        if number is None:
            self._numbers[name] = made
        else:
            self._others[parent, name] = made
        return made


_NOTHING = np.zeros(0, dtype=np.int32)
_ARRAYS = ("at", "n_prompt", "starts", "ends", "n_prompt_blocks", "nodes")
