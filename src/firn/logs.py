"""How firn logs: one line per record on stderr, with time, level and the logger's short name.

Set up once by the composition root, before anything is logged. Other libraries log at WARNING and
above; uvicorn's access log is off, because firn itself writes one line per request.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO

from firn.config import LogLevel

_NO_NEW_LINES = str.maketrans({"\n": "\\n", "\r": "\\r"})


class LineFormatter(logging.Formatter):
    """`2025-03-01 12:00:00 INFO    engine.loop: text`; a text never spans two lines.

    Texts may contain what a client sent, and a client must not be able to forge a line. With a tag,
    for one of several processes: `engine.loop[tag]: text`.
    """

    def __init__(self, tag: str | None = None) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s", "%Y-%m-%d %H:%M:%S")
        self._tag = f"[{tag}]" if tag else ""

    def formatMessage(self, record: logging.LogRecord) -> str:
        shown = logging.makeLogRecord(record.__dict__)
        shown.name = record.name.removeprefix("firn.") + self._tag
        shown.message = record.message.translate(_NO_NEW_LINES)
        return super().formatMessage(shown)


def configure(level: LogLevel, *, stream: TextIO | None = None, tag: str | None = None) -> None:
    """Send the process's logs to `stream` (stderr). uvicorn needs `log_config=None`."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(LineFormatter(tag))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("firn").setLevel(level.upper())
    for name in ("uvicorn", "uvicorn.error"):  # whatever was set before: only warnings and above
        logging.getLogger(name).setLevel(logging.NOTSET)
    logging.getLogger("uvicorn.access").disabled = True
