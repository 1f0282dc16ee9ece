"""A program that reads a PDF file on stdin and prints its text as JSON.

A small PDF can demand endless work, so each is read in a process that has limited memory (where the
system supports that), only the processor time that others leave, writes no files and is killed when
its time is up. It is run by its path and imports nothing from firn.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys

MEMORY_NBYTES = 1 << 30
NICENESS = 10
CUT = "[The document is longer; its text was cut here.]"


def main(max_pages: int, max_chars: int, max_seconds: int) -> None:
    _limit(max_seconds)
    try:
        answer = {"text": _text(sys.stdin.buffer.read(), max_pages, max_chars)}
    except MemoryError:
        answer = {"fault": "needs too much memory"}
    except Exception as e:  # the file may be anything, and pypdf raises all kinds of errors
        answer = {"fault": " ".join(str(e).split())[:200] or type(e).__name__}
    json.dump(answer, sys.stdout)


def _limit(max_seconds: int) -> None:
    import resource

    os.nice(NICENESS)
    limits = {
        resource.RLIMIT_AS: MEMORY_NBYTES,
        resource.RLIMIT_CPU: max_seconds,
        resource.RLIMIT_FSIZE: 0,
    }
    for which, limit in limits.items():
        with contextlib.suppress(ValueError, OSError):  # not every system supports all of them
            resource.setrlimit(which, (limit, limit))


def _text(data: bytes, max_pages: int, max_chars: int) -> str:
    import logging

    from pypdf import PdfReader

    logging.disable()  # pypdf warns a lot about odd files
    reader = PdfReader(io.BytesIO(data))
    if reader.is_encrypted and not reader.decrypt(""):
        raise ValueError("it is encrypted")
    pages: list[str] = []
    n_chars = 0
    n_pages = len(reader.pages)
    for page in reader.pages[:max_pages]:
        if n_chars > max_chars:
            break
        text = page.extract_text().strip()
        pages.append(text[: max_chars - n_chars])
        n_chars += len(text)
    if not n_chars:
        raise ValueError("it contains no text, only pictures")
    if n_chars > max_chars:
        pages.append(CUT)
    elif len(pages) < n_pages:
        pages.append(f"[Of {n_pages} pages, {len(pages)} were read.]")
    return "\n\n".join(filter(None, pages))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
