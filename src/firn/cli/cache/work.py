"""What `firn cache` does to a folder: verify, gc, clear, export, import."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from firn.cache.admin.inventory import (
    FolderUsage,
    Inventory,
    RecordFile,
    folder_usage,
    quarantine_of,
    records_of,
    take_inventory,
)
from firn.cache.admin.transfer import export as write_export
from firn.cache.admin.transfer import import_file
from firn.cache.storage.container import load
from firn.cache.storage.faults import (
    Damaged,
    Foreign,
    Locked,
    Missing,
    Refused,
    TierError,
    TierFault,
)
from firn.cache.storage.seal import Seal, load_seal
from firn.cache.tiers import TierOptions
from firn.cache.tiers.ssd import SsdTier
from firn.cli.terminal import bytes_progress, plain_console, size
from firn.config import UsageError
from firn.core.errors import SetupError

_is_namespace = re.compile(r"shared|[0-9a-f]{32}").fullmatch


@dataclass(frozen=True, slots=True)
class CacheFolder:
    """A cache folder and the key of its records, if they are encrypted."""

    folder: Path
    seal: Seal | None

    @classmethod
    def of(cls, folder: Path, key_file: Path | None) -> CacheFolder:
        return cls(Path(os.path.expanduser(folder)), load_seal(key_file) if key_file else None)

    def usage(self) -> FolderUsage:
        return folder_usage(self.folder)

    def inventory(self) -> Inventory:
        """Raises SetupError."""
        if self.folder.exists() and not self.folder.is_dir():
            raise SetupError(f"{self.folder} is not a folder.")
        try:
            return take_inventory(self.folder, seal=self.seal)
        except OSError as e:
            raise SetupError(f"{self.folder}: cannot be read: {e.strerror or e}") from e

    def tier(self) -> SsdTier:
        """The folder's tier, opened as a guest: it keeps to the limit that servers have set."""
        return SsdTier(TierOptions(str(self.folder)), guest=True)

    @contextlib.contextmanager
    def naming_faults(self) -> Iterator[None]:
        """Turns a tier's faults into SetupErrors that name the folder, which the faults do not."""
        try:
            yield
        except (Refused, TierFault) as e:
            raise SetupError(f"{self.folder}: {e.message}") from e


# --- verify --------------------------------------------------------------------------------


def verify(location: CacheFolder, *, quarantine: bool) -> int:
    _must_exist(location)
    inventory, tier = location.inventory(), location.tier()
    bad: dict[RecordFile, str] = {}
    unread: dict[RecordFile, str] = {}
    n_good = n_foreign = 0
    with bytes_progress("verifying", sum(f.nbytes for f in inventory.files)) as advance:
        for file in inventory.files:
            fault = file.fault or _check(location, tier, file)
            if isinstance(fault, Damaged):
                bad[file] = fault.message
            elif isinstance(fault, TierFault):
                unread[file] = fault.message
            elif isinstance(fault, Foreign):
                n_foreign += not isinstance(fault, Locked)
            else:
                n_good += fault is None
            advance(file.nbytes)
    console = plain_console()
    for file, reason in bad.items():
        console.print(f"damaged: {file.path}: {reason}", style="red", markup=False)
    for file, reason in unread.items():
        console.print(f"cannot be read: {file.path}: {reason}", style="red", markup=False)
    if quarantine:
        with location.naming_faults():
            for file in bad:
                tier.delete(file.name, keep=True)
    moved = f", moved to {quarantine_of(location.folder)}" if quarantine and bad else ""
    good = "1 record is good" if n_good == 1 else f"{n_good} records are good"
    console.print(f"{good}, {len(bad)} damaged{moved}.", markup=False)
    # What seems to lack a parent may have one that cannot be read at present.
    _report_orphans(location, tier, inventory, drop=quarantine and not unread)
    if inventory.n_locked or n_foreign:
        console.print(
            f"Not checked: {inventory.n_locked} encrypted with another key, "
            f"{n_foreign} of another format{' or not encrypted' if location.seal else ''}."
        )
    return int(bool(bad or unread))


def _check(location: CacheFolder, tier: SsdTier, file: RecordFile) -> TierError | None:
    assert file.tag is not None
    try:
        load(tier, file.tag.name, seal=location.seal)
    except (Damaged, Foreign, Missing, TierFault) as e:
        return e
    return None


def _report_orphans(
    location: CacheFolder, tier: SsdTier, inventory: Inventory, *, drop: bool
) -> None:
    """Reports unreachable records. Checks twice, because a server may be writing their parents."""
    before = {b.tag.key for b in inventory.orphans}
    blocks = [b for b in location.inventory().orphans if b.tag.key in before] if before else []
    files = [f for block in blocks for f in block.files.values()]
    if files:
        done = ", deleted" if drop else ""
        plain_console().print(f"{len(files)} records that no prompt can reach{done}.")
    with location.naming_faults():
        for file in files if drop else ():
            tier.delete(file.name)


# --- gc and clear --------------------------------------------------------------------------


def gc(location: CacheFolder, *, max_nbytes: int) -> None:
    _must_exist(location)
    with location.naming_faults():
        freed = location.tier().evict_to(max_nbytes)
    plain_console().print(f"{size(freed)} freed.")


@dataclass(frozen=True, slots=True)
class ToClear:
    names: tuple[str, ...] | None
    """None: everything."""
    n_files: int
    nbytes: int

    @property
    def text(self) -> str:
        return f"{self.n_files} files, {size(self.nbytes)},"


def to_clear(location: CacheFolder, *, model: str | None, namespace: str | None) -> ToClear:
    """Raises UsageError for an empty text, as of an unset variable: it would choose everything."""
    for flag, text in (("--model", model), ("--namespace", namespace)):
        if text is not None and not text.strip():
            raise UsageError(f"{flag}: is empty; leave it out to choose all")
    _must_exist(location)
    inventory = location.inventory()
    is_all = model is None and namespace is None
    chosen = [f for f in inventory.files if is_all or _is_chosen(inventory, f, model, namespace)]
    n_files, nbytes = len(chosen), sum(f.nbytes for f in chosen)
    if not is_all:
        return ToClear(tuple(f.name for f in chosen), n_files, nbytes)
    usage = location.usage()
    return ToClear(None, n_files + usage.n_quarantined, nbytes + usage.quarantined_nbytes)


def _is_chosen(
    inventory: Inventory, file: RecordFile, model: str | None, namespace: str | None
) -> bool:
    tag = file.tag
    if tag is None or not tag.namespace.startswith(namespace or ""):
        return False
    known = inventory.models.get(tag.fingerprint)
    is_named = known is not None and known.name == model
    return model is None or is_named or tag.fingerprint.hex().startswith(model.lower())


def clear(location: CacheFolder, chosen: ToClear) -> None:
    tier = location.tier()
    with location.naming_faults():
        if chosen.names is None:
            tier.evict_to(0)
        for name in chosen.names or ():
            tier.delete(name)
    plain_console().print(f"{chosen.n_files} files deleted, {size(chosen.nbytes)} freed.")


def _must_exist(location: CacheFolder) -> None:
    if not location.folder.is_dir():
        raise SetupError(f"There is no cache folder {location.folder}.")


# --- export and import ---------------------------------------------------------------------


def export(location: CacheFolder, key: str, file: Path) -> None:
    if os.path.lexists(file) and (file.is_symlink() or not file.is_file()):
        # The export would replace the link, or /dev/stdout itself.
        raise SetupError(f"{file} is not a regular file; give a new file name.")
    inventory = location.inventory()
    chain = inventory.chain(inventory.find(key))
    names = records_of(chain)
    tier = location.tier()
    total = sum(b.nbytes for b in chain)
    with bytes_progress("exporting", total) as advance:
        try:
            nbytes = write_export(
                names,
                lambda name: load(tier, name, seal=location.seal),
                file,
                progress=advance,
            )
        except OSError as e:
            raise SetupError(f"{file}: cannot be written: {e.strerror or e}") from e
    plain_console().print(
        f"{chain[-1].end} tokens in {len(names)} records, {size(nbytes)}: {file}", markup=False
    )


def import_(location: CacheFolder, file: Path, *, namespace: str | None) -> None:
    if namespace is not None and not _is_namespace(namespace):
        raise UsageError(
            f"--namespace {namespace}: must be shared or all 32 digits, as in `firn cache show`"
        )
    # Faults of the folder are reported below; without a handler, Python would print warnings too.
    logging.getLogger("firn.cache").addHandler(logging.NullHandler())
    try:
        total = file.stat().st_size
        with bytes_progress("importing", total) as advance, location.naming_faults():
            done = import_file(
                file,
                location.tier(),
                seal=location.seal,
                namespace=namespace,
                progress=advance,
            )
    except OSError as e:
        raise SetupError(f"{file}: cannot be read: {e.strerror or e}") from e
    except (Damaged, Foreign) as e:
        raise SetupError(f"{file}: {e.message}") from e
    plain_console().print(
        f"{done.n_new} records stored, {size(done.nbytes)}; {done.n_present} were there already."
    )
