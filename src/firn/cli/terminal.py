"""How commands write to the terminal: plain consoles, progress bars, sizes."""

from __future__ import annotations

import os
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from firn.config import UsageError, default_cache_dir
from firn.core.private_folder import make_private
from firn.core.units import GIB, KIB, MIB

PIPE_WIDTH = 1000
MAX_HISTORY = 1000
"""Lines that were typed into chats and are kept."""
UNITS = ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))


def size(nbytes: int) -> str:
    for unit, name in UNITS:
        if nbytes >= unit:
            return f"{nbytes / unit:.1f} {name}"
    return f"{nbytes} bytes"


def confirm(question: str) -> bool:
    """Raises UsageError where nobody is there to answer."""
    try:
        return typer.confirm(question)
    except typer.Abort:
        typer.echo()
        if sys.stdin is not None and sys.stdin.isatty():
            raise  # Ctrl-C, or Ctrl-D
        raise UsageError("nobody is there to answer; --yes does without the question") from None


def plain_console(*, soft_wrap: bool = True) -> Console:
    """A console on stdout, without colours for numbers. soft_wrap: do not break lines.

    In a pipe, tables are neither cut nor folded, unless COLUMNS sets their width.
    """
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    width = None if is_terminal or "COLUMNS" in os.environ else PIPE_WIDTH
    return Console(highlight=False, soft_wrap=soft_wrap, width=width)


@contextmanager
def quiet_keyboard() -> Iterator[None]:
    """What is typed meanwhile is not mixed into what is shown: it appears where it is read."""
    try:
        fd = sys.stdin.fileno()
        before = termios.tcgetattr(fd)
    except (AttributeError, OSError, ValueError, termios.error):
        yield  # no terminal
        return
    silent = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
    termios.tcsetattr(fd, termios.TCSADRAIN, silent)
    try:
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


@contextmanager
def typed_lines() -> Iterator[None]:
    """Gives input() an editor and a history, which later chats have as well; private to the user."""
    try:
        import readline
    except ImportError:
        yield
        return
    path = default_cache_dir() / "chat_history"
    with suppress(OSError):
        readline.read_history_file(path)
    try:
        yield
    finally:
        readline.set_history_length(MAX_HISTORY)
        with suppress(OSError):
            make_private(path.parent)
            path.touch(mode=0o600)
            readline.write_history_file(path)


@contextmanager
def bytes_progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, if that is a terminal. Yields a function that adds bytes."""
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task(what, total=total)
        yield lambda nbytes: bar.advance(task, nbytes)


@contextmanager
def steps_progress(
    what: str = "", total: int | None = None
) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, if that is a terminal. Yields a function that sets how many steps are done, and
    how many there are."""
    console = Console(stderr=True)
    bar = Progress(
        TextColumn(f"{what} {{task.completed}} of {{task.total}}".strip()),
        BarColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task("", total=total)
        yield lambda done, of: bar.update(task, completed=done, total=of)
