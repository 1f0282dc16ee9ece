"""What a service runs, the files that describe it, and what a supervisor can do with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

from firn.core.errors import SetupError

STOP_S = 90
"""Enough for running replies to end and records to be written; launchd waits 20 s by default."""
RESTART_S = 10
N_FILES = 65536
START = "firn.cli.service.start"


@dataclass(frozen=True, slots=True)
class CommandResult:
    code: int
    text: str


Run = Callable[[Sequence[str]], CommandResult]


def run(command: Sequence[str]) -> CommandResult:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.SubprocessError) as e:
        raise SetupError(f"{command[0]} cannot be run: {e}") from e
    return CommandResult(done.returncode, (done.stdout + done.stderr).strip())


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """What a service reads when it starts. In a file of its own that only its user can read: anybody
    may ask a supervisor for a service's arguments and variables, and these may be secrets.

    log: the file that its output goes to, which it keeps small; "": none.
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    log: str = ""

    @classmethod
    def read(cls, path: Path) -> ServiceSettings:
        """Raises SetupError."""
        try:
            values = json.loads(path.read_text())
            environment = {str(k): str(v) for k, v in values["environment"].items()}
            return cls(environment, str(values["log"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            raise SetupError(f"{path} cannot be read: {e}; install the service again.") from e

    def as_json(self) -> bytes:
        return json.dumps(asdict(self), indent=2).encode()


@dataclass(frozen=True, slots=True)
class Service:
    """arguments: those of `firn serve`."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    python: str = sys.executable

    def command(self, settings: Path) -> tuple[str, ...]:
        return (self.python, "-m", START, str(settings), "serve", *self.arguments)


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    installed: bool
    running: bool = False
    text: str = ""


class Supervisor(Protocol):
    """Manages services of this user."""

    @property
    def path(self) -> Path:
        """The file that describes the service."""
        ...

    def install(self, service: Service) -> None:
        """Write the files and start the service, replacing an older one. Raises SetupError."""
        ...

    def uninstall(self) -> bool:
        """Stop and remove the service; False: there was none."""
        ...

    def restart(self) -> None:
        """Stop the service as gently as uninstall does, and start it again. Raises SetupError."""
        ...

    def status(self) -> ServiceStatus: ...

    def logs(self, n_lines: int, *, follow: bool) -> tuple[str, ...]:
        """The command that shows the service's logs."""
        ...


@contextmanager
def written(path: Path, data: bytes, *, owner: int | None = None) -> Iterator[None]:
    """The file has this content; if something fails inside, afterwards what it had before.

    owner: a user id to give it to; None: it stays this process's.
    """
    before = path.read_bytes() if path.exists() else None
    write_private(path, data, owner=owner)
    try:
        yield
    except SetupError:
        if before is None:
            path.unlink()
        else:
            write_private(path, before, owner=owner)
        raise


def write_private(path: Path, data: bytes, *, owner: int | None = None) -> None:
    """Readable only by its owner: arguments and variables may be secrets."""
    make_folder(path.parent, owner=owner)
    temp = path.with_name(f".{path.name}.tmp")
    temp.unlink(missing_ok=True)
    with os.fdopen(os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        if owner is not None:
            os.fchown(file.fileno(), owner, -1)
        file.write(data)
    temp.replace(path)


def make_folder(folder: Path, *, owner: int | None = None) -> None:
    """Make it and what is missing above it, and give what was made to the owner."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    if owner is not None:
        for path in missing:
            os.chown(path, owner, -1)
