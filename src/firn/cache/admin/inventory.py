"""What a cache folder contains, for people. It is read without its lock, and not changed.

An inventory is a snapshot: a folder in use may have changed since.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from firn.cache.parts import Part
from firn.cache.storage.container import Label, Name, Tag, label_of
from firn.cache.storage.faults import Damaged, Foreign, Missing, NotEncrypted, TierFault
from firn.cache.storage.seal import Seal
from firn.cache.tiers import ScannedRecord, TierOptions
from firn.cache.tiers._folder import MODELS, QUARANTINE, Disk, path_of, peek, read_heads
from firn.cache.tiers.ssd import HOUR_S, SsdTier
from firn.core.errors import FirnError
from firn.core.keys import Key


class NotStored(FirnError):
    code = "not_stored"


@dataclass(frozen=True, slots=True)
class ModelNote:
    """The name and folder by which servers know a model; empty if none has left a note."""

    name: str = ""
    path: str = ""


@dataclass(frozen=True, slots=True)
class RecordFile:
    """A file and what its header says: either a `tag` or a `fault`."""

    name: str
    nbytes: int
    used_at: float
    tag: Tag | None = None
    fault: Damaged | Foreign | TierFault | None = None
    """TierFault: the disk cannot read it at present."""

    @property
    def path(self) -> str:
        return path_of(self.name)

    @property
    def label(self) -> Label | None:
        """None: it cannot be read without the key."""
        return self.tag if isinstance(self.tag, Label) else None


@dataclass(frozen=True, slots=True)
class BlockFiles:
    """The records of one block of tokens."""

    tag: Tag
    n_tokens: int
    """0 when the tokens cannot be read without the key."""
    files: Mapping[Part, RecordFile]

    @property
    def parent(self) -> Key | None:
        """None: it begins a chain."""
        return self.tag.above

    @property
    def end(self) -> int:
        return self.tag.start + self.n_tokens

    @property
    def nbytes(self) -> int:
        return sum(f.nbytes for f in self.files.values())

    @property
    def last_use(self) -> float:
        return max(f.used_at for f in self.files.values())


@dataclass(frozen=True, slots=True)
class ModelRecords:
    """One model's records in one namespace."""

    fingerprint: bytes
    namespace: str
    model: ModelNote
    blocks: tuple[BlockFiles, ...]

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
    """A sequence of blocks without a branch, and what branches off at its end."""

    blocks: tuple[BlockFiles, ...]
    nbytes: int
    """Including everything below it."""
    last_use: float
    branches: tuple[Prefix, ...]


@dataclass(frozen=True)
class Inventory:
    """The records of a folder, of all models and namespaces."""

    files: tuple[RecordFile, ...]
    blocks: Mapping[Key, BlockFiles]
    models: Mapping[bytes, ModelNote]

    @property
    def faulty(self) -> list[RecordFile]:
        return [f for f in self.files if f.fault is not None]

    @property
    def n_locked(self) -> int:
        return sum(f.tag is not None and f.label is None for f in self.files)

    @cached_property
    def orphans(self) -> list[BlockFiles]:
        """Blocks that no prompt can use, because one before them is not stored."""
        reached: set[Key] = set()
        orphans: list[BlockFiles] = []
        for block in sorted(self.blocks.values(), key=lambda b: b.tag.start):
            if block.parent is None or block.parent in reached:
                reached.add(block.tag.key)
            else:
                orphans.append(block)
        return orphans

    def by_model(self) -> list[ModelRecords]:
        """The largest first."""
        blocks_of: dict[tuple[bytes, str], list[BlockFiles]] = {}
        for block in self.blocks.values():
            whose = (block.tag.fingerprint, block.tag.namespace)
            blocks_of.setdefault(whose, []).append(block)
        models = [
            ModelRecords(fingerprint, namespace, self._note(fingerprint), tuple(blocks))
            for (fingerprint, namespace), blocks in blocks_of.items()
        ]
        return sorted(models, key=lambda m: -m.nbytes)

    def _note(self, fingerprint: bytes) -> ModelNote:
        return self.models.get(fingerprint, ModelNote())

    def find(self, text: str) -> BlockFiles:
        """The block whose key begins with this text. Raises NotStored if none or several do."""
        text = text.lower().strip()
        matches = [b for key, b in self.blocks.items() if key.hex().startswith(text)]
        if len(matches) == 1:
            return matches[0]
        if not matches:
            raise NotStored(f"No stored key begins with {text!r}.")
        some = ", ".join(b.tag.key.hex()[: len(text) + 6] for b in matches[:4])
        raise NotStored(
            f"{len(matches)} keys begin with {text!r}, such as {some}. Give more digits."
        )

    def chain(self, block: BlockFiles) -> list[BlockFiles]:
        """The block and those before it, the first one first. Raises NotStored if one is missing."""
        chain = [block]
        while (parent := chain[-1].parent) is not None:
            if parent not in self.blocks:
                raise NotStored(f"The block {parent.hex()[:12]} before it is not stored any more.")
            chain.append(self.blocks[parent])
        return chain[::-1]


@dataclass(frozen=True, slots=True)
class FolderUsage:
    """What a folder holds other than records, and what its servers have noted."""

    n_quarantined: int
    quarantined_nbytes: int
    n_being_written: int
    limit_nbytes: int | None
    """None: no server has noted one."""
    day_nbytes: int | None
    """Written in the last 24 hours; None: not noted."""


def folder_usage(folder: Path) -> FolderUsage:
    """Raises OSError when the folder cannot be read."""
    disk = Disk(folder)
    quarantined = disk.quarantined()
    page = peek(disk)
    return FolderUsage(
        n_quarantined=len(quarantined),
        quarantined_nbytes=sum(file.nbytes for file in quarantined),
        n_being_written=len(disk.temps()),
        limit_nbytes=page.limit_nbytes if page else None,
        day_nbytes=page.day_nbytes(int(time.time()) // HOUR_S) if page else None,
    )


def quarantine_of(folder: Path) -> Path:
    """The folder to which damaged records are moved."""
    return folder / QUARANTINE


def take_inventory(folder: Path, *, seal: Seal | None = None) -> Inventory:
    """Raises OSError when the folder cannot be read."""
    tier = SsdTier(TierOptions(str(folder), 0), guest=True)
    files = tuple(
        _file(seen, tier, seal)
        if isinstance(seen, ScannedRecord)
        else RecordFile(seen.name, seen.nbytes, seen.used_at, fault=seen.fault)
        for seen in read_heads(folder)
    )
    parts: dict[Key, dict[Part, RecordFile]] = {}
    for file in files:
        if file.tag is not None:
            parts.setdefault(file.tag.key, {})[file.tag.part] = file
    return Inventory(files, {key: _block(some) for key, some in parts.items()}, _models(folder))


def _file(seen: ScannedRecord, tier: SsdTier, seal: Seal | None) -> RecordFile:
    made = partial(RecordFile, seen.name, seen.nbytes, seen.used_at)
    try:
        return made(tag=label_of(tier, seen, seal=seal))
    except NotEncrypted:  # a server with the key does not read it, but it can be listed and cleared
        return _file(seen, tier, None)
    except (Damaged, Foreign) as e:
        return made(fault=e)
    except Missing as e:  # the others can still be listed
        return made(fault=Foreign(e.reason))
    except TierFault as e:
        return made(fault=e)


def _block(files: Mapping[Part, RecordFile]) -> BlockFiles:
    first = next(iter(files.values()))
    assert first.tag is not None
    return BlockFiles(first.tag, 0 if first.label is None else len(first.label.tokens), files)


def note_model(folder: Path, fingerprint: bytes, note: ModelNote) -> None:
    """Note what people call a model. Nothing depends on it, so a failure to write it is ignored."""
    path = folder / MODELS / f"{fingerprint.hex()}.json"
    text = json.dumps({"name": note.name, "path": note.path})
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, exist_ok=True)
        path.touch(mode=0o600)
        path.write_text(text, encoding="utf-8")


def _models(folder: Path) -> dict[bytes, ModelNote]:
    models: dict[bytes, ModelNote] = {}
    for path in (folder / MODELS).glob("*.json"):
        try:
            note = json.loads(path.read_text(encoding="utf-8"))
            models[bytes.fromhex(path.stem)] = ModelNote(str(note["name"]), str(note["path"]))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # as if there were no note
    return models


def prefixes(blocks: Iterable[BlockFiles], *, top: int) -> list[Prefix]:
    """The largest prefixes, with blocks merged where there is no branch."""
    by_key = {b.tag.key: b for b in blocks}
    children: dict[Key, list[BlockFiles]] = {}
    nbytes = {key: b.nbytes for key, b in by_key.items()}
    last_use = {key: b.last_use for key, b in by_key.items()}
    # Children begin at or after their parent's end: going backwards, each sum is already complete.
    for block in sorted(by_key.values(), key=lambda b: (-b.tag.start, -b.end)):
        if block.parent in by_key and block.parent is not None:
            children.setdefault(block.parent, []).append(block)
            nbytes[block.parent] += nbytes[block.tag.key]
            last_use[block.parent] = max(last_use[block.parent], last_use[block.tag.key])

    def prefix(block: BlockFiles, depth: int) -> Prefix:
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


def records_of(chain: Sequence[BlockFiles]) -> list[Name]:
    """What a resume at the end of the chain needs: every block, and the last state."""
    names: list[Name] = []
    last_state = max((i for i, b in enumerate(chain) if Part.STATE in b.files), default=-1)
    for i, block in enumerate(chain):
        wanted = [p for p in Part if p in block.files and (p is not Part.STATE or i == last_state)]
        # A block with nothing but an older state still needs a record that names it.
        names += [Name(block.tag.key, p) for p in wanted or [next(iter(block.files))]]
    return names
