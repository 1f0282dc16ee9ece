"""How commands write to the terminal: plain consoles, progress bars, sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def size(nbytes: int) -> str:
    for unit, name in UNITS:
        if nbytes >= unit:
            return f"{nbytes / unit:.1f} {name}"
    return f"{nbytes} bytes"


def plain_console() -> Console:
    """On stdout, without colours for numbers and without line breaks of its own."""
    return Console(highlight=False, soft_wrap=True)


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
    bar = Progress(
        TextColumn(f"{what} {{task.completed}} of {{task.total}}".strip()),
        BarColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task("", total=total)
        yield lambda done, of: bar.update(task, completed=done, total=of)
