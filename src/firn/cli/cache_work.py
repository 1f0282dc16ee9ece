"""What `firn cache` does to a folder: verify, gc, clear, export, import."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from firn.cache.faults import Damaged, Missing
from firn.cache.inventory import Inventory, records_of, take
from firn.cache.seal import Seal, load_seal
from firn.cache.tiers import Name
from firn.cache.tiers._disk import QUARANTINE, Disk, path_of
from firn.cache.tiers._survey import Found, load
from firn.cache.tiers.ssd import SsdSettings, SsdTier, suggested_limit
from firn.cache.transfer import export as write_export
from firn.cache.transfer import import_file
from firn.cli.doctor import size
from firn.core.errors import SetupError


@dataclass(frozen=True, slots=True)
class Where:
    folder: Path
    seal: Seal | None

    @classmethod
    def of(cls, folder: Path, key_file: Path | None) -> Where:
        return cls(folder.expanduser(), load_seal(key_file) if key_file else None)

    def disk(self) -> Disk:
        return Disk(self.folder)

    def take(self) -> Inventory:
        try:
            return take(self.folder, seal=self.seal)
        except OSError as e:
            raise SetupError(f"{self.folder}: cannot be read: {e.strerror or e}") from e

    def tier(self) -> SsdTier:
        """A guest in the folder: it keeps to the limit that the servers have."""
        limit = suggested_limit(self.folder)
        return SsdTier(SsdSettings(self.folder, limit, seal=self.seal, guest=True))


def out() -> Console:
    return Console(highlight=False, soft_wrap=True)


@contextmanager
def bar(what: str, total: int) -> Iterator[Progress]:
    """On stderr, and only on a terminal; advance task 0 by bytes."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as p:
        p.add_task(what, total=total)
        yield p


# --- verify --------------------------------------------------------------------------------


def verify(where: Where, *, quarantine: bool) -> int:
    inventory = where.take()
    bad: list[tuple[str, str]] = []
    n_good = 0
    with bar("verifying", sum(f.listed.size for f in inventory.found)) as progress:
        for found in inventory.found:
            if found.fault is None and found.label is None:
                pass  # encrypted with another key
            elif isinstance(found.fault, Damaged):
                bad.append((found.listed.path, found.fault.message))
            elif found.fault is None:
                fault = _check(where, found)
                if fault is None:
                    n_good += 1
                elif isinstance(fault, Damaged):
                    bad.append((found.listed.path, fault.message))
            progress.advance(progress.task_ids[0], found.listed.size)
    n_foreign = sum(
        f.fault is not None and not isinstance(f.fault, Damaged) for f in inventory.found
    )
    console = out()
    for path, reason in bad:
        console.print(f"damaged: {path}: {reason}", style="red", markup=False)
    if quarantine and bad:
        tier = where.tier()
        for path, _ in bad:
            tier.quarantine(path)
    moved = f", moved to {where.folder / QUARANTINE}" if quarantine and bad else ""
    console.print(f"{n_good} records are good, {len(bad)} damaged{moved}.", markup=False)
    if inventory.n_locked or n_foreign:
        console.print(
            f"Not looked into: {inventory.n_locked} encrypted with another key, "
            f"{n_foreign} of another format."
        )
    return int(bool(bad))


def _check(where: Where, found: Found) -> Damaged | Missing | None:
    assert found.tag is not None
    name = Name(found.tag.key, found.tag.part)
    try:
        load(where.disk(), found.listed.path, name, seal=where.seal)
    except (Damaged, Missing) as e:
        return e
    return None


# --- gc and clear --------------------------------------------------------------------------


def gc(where: Where, *, max_nbytes: int) -> None:
    _must_exist(where)
    freed = where.tier().evict_to(max_nbytes)
    out().print(f"{size(freed)} freed.")


@dataclass(frozen=True, slots=True)
class Chosen:
    paths: tuple[str, ...]
    text: str


def to_clear(where: Where, *, model: str | None, namespace: str | None) -> Chosen:
    _must_exist(where)
    inventory = where.take()
    chosen = [f for f in inventory.found if _is_chosen(inventory, f, model, namespace)]
    paths = [f.listed.path for f in chosen]
    nbytes = sum(f.listed.nbytes for f in chosen)
    if model is None and namespace is None:
        bad = where.disk().files(QUARANTINE)
        paths += [x.path for x in bad]
        nbytes += sum(x.nbytes for x in bad)
    return Chosen(tuple(paths), f"{len(paths)} files, {size(nbytes)},")


def _is_chosen(
    inventory: Inventory, found: Found, model: str | None, namespace: str | None
) -> bool:
    if model is None and namespace is None:
        return True
    tag = found.tag
    if tag is None:
        return False
    if namespace is not None and not tag.namespace.startswith(namespace):
        return False
    if model is None:
        return True
    known = inventory.models.get(tag.fingerprint)
    return tag.fingerprint.hex().startswith(model.lower()) or (
        known is not None and known.name == model
    )


def clear(where: Where, chosen: Chosen) -> None:
    freed = where.tier().delete_all(chosen.paths)
    out().print(f"{len(chosen.paths)} files deleted, {size(freed)} freed.")


def _must_exist(where: Where) -> None:
    if not where.folder.is_dir():
        raise SetupError(f"There is no cache folder {where.folder}.")


# --- export and import ---------------------------------------------------------------------


def export(where: Where, key: str, file: Path) -> None:
    inventory = where.take()
    chain = inventory.chain(inventory.find(key))
    names = records_of(chain)
    disk = where.disk()
    total = sum(b.nbytes for b in chain)
    with bar("exporting", total) as progress:
        try:
            nbytes = write_export(
                names,
                lambda name: load(disk, path_of(name), name, seal=where.seal),
                file,
                progress=lambda n: progress.advance(progress.task_ids[0], n),
            )
        except OSError as e:
            raise SetupError(f"{file}: cannot be written: {e.strerror or e}") from e
    out().print(
        f"{chain[-1].end} tokens in {len(names)} records, {size(nbytes)}: {file}", markup=False
    )


def import_(where: Where, file: Path, *, namespace: str | None) -> None:
    try:
        total = file.stat().st_size
        with bar("importing", total) as progress:
            done = import_file(
                file,
                where.tier(),
                namespace=namespace,
                progress=lambda n: progress.advance(progress.task_ids[0], n),
            )
    except OSError as e:
        raise SetupError(f"{file}: cannot be read: {e.strerror or e}") from e
    out().print(
        f"{done.n_new} records stored, {size(done.nbytes)}; {done.n_present} were there already."
    )
