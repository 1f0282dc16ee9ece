"""Exceptions from libraries: those caught when a model is loaded, and their message as one line."""

from __future__ import annotations

LOAD_FAULTS = (Exception, SystemExit)
"""A bad model folder can raise anything: it may have its own code, tokenizers raises bare
Exceptions, and one module of mlx-lm exits the process (SystemExit)."""
MAX_CHARS = 300


def first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:MAX_CHARS] if text else type(error).__name__
