"""Estimates that survive a restart: a small file next to the records for each model and device.

Nothing depends on it: what is lost, damaged or of another version is learned again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from pathlib import Path

from firn.cache.planning.estimates import Estimates
from firn.core.clock import Clock
from firn.core.private_folder import make_private

log = logging.getLogger("firn.cache")
VERSION = 1


SAVE_EVERY_S = 300.0
"""How often an idle server saves its estimates."""


class EstimatesFile:
    def __init__(self, path: Path, estimates: Estimates, clock: Clock) -> None:
        """Take over what an earlier process learned, if it can be used."""
        self._path = path
        self._estimates = estimates
        self._clock = clock
        self._saved_at = clock.elapsed()
        load(path, estimates)

    def tick(self) -> None:
        if self._clock.elapsed() - self._saved_at >= SAVE_EVERY_S:
            self.save()

    def save(self) -> None:
        self._saved_at = self._clock.elapsed()
        save(self._path, self._estimates)


def load(path: Path, estimates: Estimates) -> None:
    """Take over what an earlier process learned, if it can be used."""
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        if saved["version"] == VERSION:
            estimates.restore(saved)
    except FileNotFoundError:
        return
    except (OSError, ValueError, TypeError, KeyError) as e:
        log.debug("%s: these estimates cannot be used and are learned again: %r", path, e)


def save(path: Path, estimates: Estimates) -> None:
    """Save what was learned. A folder that cannot be written to is no fault."""
    if not estimates.knows_prefill:
        return
    text = json.dumps({"version": VERSION, **estimates.to_save()})
    temp = path.with_name(f".{path.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        make_private(path.parent)
        try:
            temp.touch(mode=0o600)
            temp.write_text(text, encoding="utf-8")
            temp.replace(path)
        finally:
            temp.unlink(missing_ok=True)
