"""Digests of weights, remembered by the identity of their files: one small file in firn's cache folder.

In case of doubt the weights are hashed again: if this file cannot be read or understood, if another
user could have written it, or if the weights were touched so recently that another change might
leave the same timestamps. No failure here prevents a start.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import stat
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from firn.core.private_folder import make_private
from firn.models.load.weight_hash import FileIdentity

log = logging.getLogger("firn.models")

NAME = "weights.json"
FORMAT = 1
MAX_ENTRIES = 64
MAX_NBYTES = 4 << 20
MIN_WEIGHTS_NBYTES = 256 << 20
"""Smaller weights are hashed quickly and not worth remembering."""
SETTLED_S = 3.0
"""Some file systems have timestamps with a resolution of two seconds."""


class WeightMemory:
    """One file in `folder`. Processes may share it: writes are atomic, and the last one wins."""

    def __init__(
        self,
        folder: Path,
        *,
        min_nbytes: int = MIN_WEIGHTS_NBYTES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._path = folder / NAME
        self._min_nbytes = min_nbytes
        self._clock = clock

    def recall(self, files: Sequence[FileIdentity]) -> bytes | None:
        """The digest of exactly these files in this order, as they are now; None if it is not known."""
        if not self._worth_it(files):
            return None
        for entry in self._entries():
            if entry["files"] == _listed(files):
                return bytes.fromhex(entry["digest"])
        return None

    def remember(self, files: Sequence[FileIdentity], digest: bytes) -> None:
        newest = max((max(f.mtime_ns, f.ctime_ns) for f in files), default=0) / 1e9
        if not self._worth_it(files) or not 0 <= newest < self._clock() - SETTLED_S:
            return
        paths = {f.path for f in files}
        others = [e for e in self._entries() if paths.isdisjoint(row[0] for row in e["files"])]
        entries = [{"files": _listed(files), "digest": digest.hex()}, *others][:MAX_ENTRIES]
        try:
            self._write(entries)
        except OSError as e:
            log.warning("the weights' digest could not be saved: %s: %s", self._path, e.strerror)

    def _worth_it(self, files: Sequence[FileIdentity]) -> bool:
        return sum(f.size for f in files) >= self._min_nbytes

    def _entries(self) -> list[dict[str, Any]]:
        """The file's entries, newest first; none at all if anything about the file is wrong."""
        try:
            with self._path.open("rb") as f:
                s = os.fstat(f.fileno())
                ours = s.st_uid == os.geteuid() and not s.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
                if not ours or s.st_size > MAX_NBYTES:
                    return []
                content = json.loads(f.read())
            entries: list[dict[str, Any]] = content["entries"]
            if content["format"] != FORMAT or content["check"] != _check(entries):
                return []
            well_formed = all(len(bytes.fromhex(e["digest"])) == 32 and e["files"] for e in entries)
            return entries if well_formed else []
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return []

    def _write(self, entries: list[dict[str, Any]]) -> None:
        """Temp file, then rename. mkstemp gives it the mode 0600."""
        text = json.dumps({"format": FORMAT, "check": _check(entries), "entries": entries})
        make_private(self._path.parent)
        fd, temp = tempfile.mkstemp(dir=self._path.parent, prefix=f".{NAME}.")
        try:
            with os.fdopen(fd, "w", encoding="utf-8") as f:
                f.write(text)
            os.replace(temp, self._path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temp)
            raise


def _listed(files: Sequence[FileIdentity]) -> list[list[Any]]:
    return [list(astuple(f)) for f in files]


def _check(entries: list[dict[str, Any]]) -> str:
    """Guards against damage: a digest with a flipped bit must not be used."""
    text = json.dumps(entries, sort_keys=True).encode()
    return hashlib.blake2b(text, digest_size=16, person=b"firn-memory").hexdigest()
