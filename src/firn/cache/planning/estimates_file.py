"""Estimates over a restart: a small file beside the records, one for each model and device.

Nothing depends on it: one that is lost, damaged or of another version is learned anew.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from pathlib import Path

from firn.cache.planning.estimates import Estimates

log = logging.getLogger("firn.cache")
VERSION = 1


def recall(path: Path, estimates: Estimates) -> bool:
    """Take what an earlier process learned; False when there is nothing of use."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["version"] != VERSION:
            return False
        estimates.take_kept(kept)
    except FileNotFoundError:
        return False
    except (OSError, ValueError, TypeError, KeyError) as e:
        log.debug("%s: no estimates: %r", path, e)
        return False
    return True


def remember(path: Path, estimates: Estimates) -> None:
    """Keep what was learned; a folder that takes no files is no fault."""
    if not estimates.knows_prefill:
        return
    text = json.dumps({"version": VERSION, **estimates.to_keep()})
    temp = path.with_name(f".{path.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temp.touch(mode=0o600)
        temp.write_text(text, encoding="utf-8")
        temp.replace(path)
