"""Libraries' exceptions: which are caught when a model is loaded, and their message in one line."""

from __future__ import annotations

LOAD_FAULTS = (Exception, SystemExit)
"""A bad model folder raises anything: it may bring code of its own, tokenizers raises bare Exceptions,
and one module of mlx-lm ends the process (SystemExit)."""
MAX_CHARS = 300


def first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:MAX_CHARS] if text else type(error).__name__
