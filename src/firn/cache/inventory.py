"""What a cache folder holds, for people: taken without the lock, and without changing anything.

A value made by one look; a folder in use may have moved on since.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from firn.cache.container import Tag
from firn.cache.parts import Part
from firn.cache.seal import Seal
from firn.cache.tiers import Name
from firn.cache.tiers._catalog import parent_of
from firn.cache.tiers._disk import MODELS, Disk
from firn.cache.tiers._survey import Found, look_at_all, record_paths
from firn.core.errors import FirnError
from firn.core.keys import Key


class NotStored(FirnError):
    code = "not_stored"


@dataclass(frozen=True, slots=True)
class Model:
    """What the folder's servers call a model; empty where none has said."""

    name: str = ""
    path: str = ""


@dataclass(frozen=True, slots=True)
class Block:
    """The records of one block of tokens."""

    tag: Tag
    parent: Key | None
    """None: it begins a chain."""
    n_tokens: int
    """0 when they cannot be read without the key."""
    files: Mapping[Part, Found]

    @property
    def end(self) -> int:
        return self.tag.start + self.n_tokens

    @property
    def nbytes(self) -> int:
        return sum(f.listed.nbytes for f in self.files.values())

    @property
    def last_use(self) -> float:
        return max(f.listed.mtime for f in self.files.values())


@dataclass(frozen=True, slots=True)
class Group:
    """One model's records in one namespace."""

    fingerprint: bytes
    namespace: str
    model: Model
    blocks: tuple[Block, ...]

    @property
    def nbytes(self) -> int:
        return sum(b.nbytes for b in self.blocks)

    @property
    def n_records(self) -> int:
        return sum(len(b.files) for b in self.blocks)

    @property
    def n_tokens(self) -> int:
        return sum(b.n_tokens for b in self.blocks)

    @property
    def last_use(self) -> float:
        return max(b.last_use for b in self.blocks)


@dataclass(frozen=True, slots=True)
class Prefix:
    """A run of blocks without a branch, and what branches off at its end."""

    blocks: tuple[Block, ...]
    nbytes: int
    """With everything below."""
    last_use: float
    branches: tuple[Prefix, ...]


@dataclass(frozen=True, slots=True)
class Inventory:
    found: tuple[Found, ...]
    blocks: Mapping[Key, Block]
    models: Mapping[bytes, Model]

    @property
    def faulty(self) -> list[Found]:
        return [f for f in self.found if f.fault is not None]

    @property
    def n_locked(self) -> int:
        return sum(f.tag is not None and f.label is None for f in self.found)

    @property
    def orphans(self) -> list[Block]:
        return [b for b in self.blocks.values() if b.parent and b.parent not in self.blocks]

    def groups(self) -> list[Group]:
        """The largest first."""
        sorted_in: dict[tuple[bytes, str], list[Block]] = {}
        for block in self.blocks.values():
            which = (block.tag.fingerprint, block.tag.namespace)
            sorted_in.setdefault(which, []).append(block)
        groups = [
            Group(fingerprint, namespace, self.models.get(fingerprint, Model()), tuple(blocks))
            for (fingerprint, namespace), blocks in sorted_in.items()
        ]
        return sorted(groups, key=lambda g: -g.nbytes)

    def find(self, text: str) -> Block:
        """The block whose key begins so. Raises NotStored, also when there are several."""
        text = text.lower().strip()
        matches = [b for key, b in self.blocks.items() if key.hex().startswith(text)]
        if len(matches) == 1:
            return matches[0]
        if not matches:
            raise NotStored(f"No record's key begins with {text!r}.")
        some = ", ".join(b.tag.key.hex()[: len(text) + 6] for b in matches[:4])
        raise NotStored(f"{len(matches)} keys begin with {text!r}, such as {some}.")

    def chain(self, block: Block) -> list[Block]:
        """The block and those above it, first block first. Raises NotStored if one is missing."""
        found = [block]
        while (parent := found[-1].parent) is not None:
            if parent not in self.blocks:
                raise NotStored(f"The block {parent.hex()[:12]} before it is not stored any more.")
            found.append(self.blocks[parent])
        return found[::-1]


def take(folder: Path, *, seal: Seal | None = None) -> Inventory:
    disk = Disk(folder)
    found = tuple(look_at_all(disk, record_paths(disk), seal=seal))
    files: dict[Key, dict[Part, Found]] = {}
    for one in found:
        if one.tag is not None:
            files.setdefault(one.tag.key, {})[one.tag.part] = one
    blocks = {key: _block(parts) for key, parts in files.items()}
    return Inventory(found, blocks, _models(folder))


def _block(files: dict[Part, Found]) -> Block:
    first = next(iter(files.values()))
    tag = first.tag
    assert tag is not None
    label = first.label
    return Block(tag, parent_of(tag), 0 if label is None else len(label.tokens), files)


def _models(folder: Path) -> dict[bytes, Model]:
    models: dict[bytes, Model] = {}
    for path in (folder / MODELS).glob("*.json"):
        try:
            note = json.loads(path.read_text(encoding="utf-8"))
            models[bytes.fromhex(path.stem)] = Model(str(note["name"]), str(note["path"]))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # a note that cannot be read is no note
    return models


def prefixes(blocks: Iterable[Block], *, top: int) -> list[Prefix]:
    """The largest trees of prefixes, runs of single blocks drawn together."""
    by_key = {b.tag.key: b for b in blocks}
    children: dict[Key, list[Block]] = {}
    nbytes = {key: b.nbytes for key, b in by_key.items()}
    last_use = {key: b.last_use for key, b in by_key.items()}
    # Children begin where their parent ends, or later: from the back, sums are complete.
    for block in sorted(by_key.values(), key=lambda b: (-b.tag.start, -b.end)):
        if block.parent in by_key and block.parent is not None:
            children.setdefault(block.parent, []).append(block)
            nbytes[block.parent] += nbytes[block.tag.key]
            last_use[block.parent] = max(last_use[block.parent], last_use[block.tag.key])

    def prefix(block: Block, depth: int) -> Prefix:
        run = [block]
        below = children.get(block.tag.key, [])
        while len(below) == 1:
            run.append(below[0])
            below = children.get(below[0].tag.key, [])
        largest = sorted(below, key=lambda b: -nbytes[b.tag.key])[:top] if depth else []
        branches = tuple(prefix(b, depth - 1) for b in largest)
        return Prefix(tuple(run), nbytes[block.tag.key], last_use[block.tag.key], branches)

    first = [b for b in by_key.values() if b.parent not in by_key]
    return [prefix(b, 3) for b in sorted(first, key=lambda b: -nbytes[b.tag.key])[:top]]


def records_of(chain: Sequence[Block]) -> list[Name]:
    """What a resume at the end of the chain needs: every block, and the last state there is."""
    names: list[Name] = []
    last_state = max((i for i, b in enumerate(chain) if Part.STATE in b.files), default=-1)
    for i, block in enumerate(chain):
        wanted = [p for p in Part if p in block.files and (p is not Part.STATE or i == last_state)]
        # A block of which only an older state is stored must still be named by something.
        names += [Name(block.tag.key, p) for p in wanted or [next(iter(block.files))]]
    return names
