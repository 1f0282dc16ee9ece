"""Tables, files and faults of firn.bench, for the scripts here.

Some of them run in environments of other servers, where firn is not installed: this tree's is found.
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
