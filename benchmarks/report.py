"""Tables, files and errors of firn.bench, for the scripts here.

Some of them run in environments of other servers without firn: they import the one in this tree.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "src"))

from firn.bench.report import (
    BenchError,
    Column,
    cli,
    grid,
    names,
    numbers,
    save,
    table,
)

__all__ = ["BenchError", "Column", "cli", "grid", "names", "numbers", "save", "table"]
