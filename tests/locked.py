"""A folder without access permissions, even if root runs the tests."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

NO_RIGHTS = "-dac_override,-dac_read_search"


def as_a_user() -> list[str]:
    """The prefix of a command that takes root's file permissions away from it."""
    if os.geteuid() != 0:
        return []
    if shutil.which("setpriv") is None:
        pytest.skip("root may look everywhere")
    return ["setpriv", "--bounding-set", NO_RIGHTS]


@contextmanager
def locked(folder: Path) -> Iterator[Path]:
    folder.mkdir()
    folder.chmod(0)
    try:
        yield folder
    finally:
        folder.chmod(0o700)
