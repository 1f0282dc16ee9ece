"""Folders that only this user can open."""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path


def make_private(folder: Path) -> None:
    """Make it and the folders above it that are missing, each with mode 0700.

    `mkdir` gives its mode to the last one only; the others could be read by everybody. Raises OSError.
    """
    missing = takewhile(lambda path: not path.exists(), (folder, *folder.parents))
    for path in reversed(list(missing)):
        path.mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(exist_ok=True)  # raises if it is a file
