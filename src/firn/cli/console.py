"""Where commands print their tables: a terminal has its width; in a pipe no line is cut or folded."""

from __future__ import annotations

import os
import sys

from rich.console import Console

WIDE = 1000


def output(*, soft_wrap: bool = False) -> Console:
    """COLUMNS counts in a pipe, too."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    width = None if is_terminal or "COLUMNS" in os.environ else WIDE
    return Console(highlight=False, soft_wrap=soft_wrap, width=width)
