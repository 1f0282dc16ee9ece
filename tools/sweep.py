"""Write docs/architectures.md: what the prefix cache does for every model module of mlx-lm.

python -m tools.sweep [NAME ...]      with names: only print their rows
"""

from __future__ import annotations

import sys
import time

from tests.sweep import table
from tests.zoo import ZOO


def main() -> int:
    names = sys.argv[1:]
    unknown = [n for n in names if n not in ZOO]
    if unknown:
        print(f"There is no {', '.join(unknown)} in the zoo.", file=sys.stderr)
        return 2
    rows = []
    for i, name in enumerate(names or ZOO):
        began = time.perf_counter()
        rows.append(table.row_of(name))
        took = time.perf_counter() - began
        print(f"{i + 1:4d} of {len(names or ZOO)}  {took:5.1f} s  {rows[-1]}", flush=True)
    if not names:
        table.PATH.parent.mkdir(exist_ok=True)
        table.PATH.write_text(table.render([*rows, *table.unbuilt()]), encoding="utf-8")
        print(f"wrote {table.PATH}")
    return 1 if any(r.verdict.status == "wrong" for r in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
