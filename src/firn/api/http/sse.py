"""Server-sent events: frames, comment lines and headers. Pure.

Frames are ASCII: text is JSON with escapes, because some clients split lines at U+2028.
"""

from __future__ import annotations

from firn.core.events import Progress

HEADERS: tuple[tuple[bytes, bytes], ...] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    # Compressing or buffering proxies would hold tokens back.
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
)

KEEP_ALIVE = ": keep-alive\n\n"
DONE = "data: [DONE]\n\n"


def data(text: str) -> str:
    """A frame of one line of text."""
    return f"data: {text}\n\n"


def named(event: str, text: str) -> str:
    """A frame with an event name."""
    return f"event: {event}\ndata: {text}\n\n"


def progress(event: Progress) -> str:
    """A comment line that reports how much of the prompt has been read; clients skip it."""
    return f": prefill {event.n_done}/{event.n_total}\n\n"
