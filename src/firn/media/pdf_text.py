"""A program of its own: a PDF file on its input, its text as JSON on its output.

PDF is a language in which small files ask for endless work. So it is read in a process that has little
memory, writes no files, and is ended when its time is over. Run by path; it imports nothing of ours.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys

MEMORY_NBYTES = 1 << 30


def main(max_pages: int, max_chars: int, max_seconds: int) -> None:
    _limit(max_seconds)
    try:
        found = {"text": _text(sys.stdin.buffer.read(), max_pages, max_chars)}
    except MemoryError:
        found = {"fault": "needs too much memory"}
    except Exception as e:  # any file may come, and the library raises whatever it finds
        found = {"fault": " ".join(str(e).split())[:200] or type(e).__name__}
    json.dump(found, sys.stdout)


def _limit(max_seconds: int) -> None:
    import resource

    limits = {
        resource.RLIMIT_AS: MEMORY_NBYTES,
        resource.RLIMIT_CPU: max_seconds,
        resource.RLIMIT_FSIZE: 0,
    }
    for which, limit in limits.items():
        with contextlib.suppress(ValueError, OSError):  # not every system knows each of them
            resource.setrlimit(which, (limit, limit))


def _text(data: bytes, max_pages: int, max_chars: int) -> str:
    import logging

    from pypdf import PdfReader

    logging.disable()  # the library has much to say about odd files
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
        raise ValueError("it holds no text; its pages are pictures")
    if len(pages) < n_pages or n_chars > max_chars:
        pages.append(f"[Of {n_pages} pages, {len(pages)} were read.]")
    return "\n\n".join(filter(None, pages))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
