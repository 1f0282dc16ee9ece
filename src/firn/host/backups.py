"""Keeps the cache folder out of Time Machine's backups: its contents can be computed again.

macOS excludes ~/Library/Caches by itself; a folder that the user has chosen is marked here, once. Other
backup programs look for the folder's CACHEDIR.TAG.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from firn.core.private_folder import make_private
from firn.host.programs import output_of

log = logging.getLogger("firn")

TMUTIL = "/usr/bin/tmutil"
Run = Callable[[Sequence[str]], str]


def exclude_from_backups(
    folder: Path, *, platform: str = sys.platform, run: Run = output_of
) -> bool:
    """Exclude a folder; returns whether it is excluded now. The mark stays with the folder when it
    moves."""
    if platform != "darwin":
        return False
    try:
        make_private(folder)
        if "[Excluded]" in run((TMUTIL, "isexcluded", str(folder))):
            return True
        run((TMUTIL, "addexclusion", str(folder)))
    except (OSError, subprocess.SubprocessError) as e:
        log.warning("Time Machine may back up %s: %s", folder, e)
        return False
    return True
