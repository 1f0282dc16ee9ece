"""What a library's exception says, in one line for people."""

from __future__ import annotations

MAX_CHARS = 300


def first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:MAX_CHARS] if text else type(error).__name__
