"""What every benchmark does at its end: a table with ratios, a JSON file, one line when it fails.

A result is a list of rounds for each name; a round is a plain dict of numbers. Tables show medians.
The first name is the subject; the last lines compare it with the best of the others: the median of
the ratios within each round, because measurements close in time had the same conditions, and below
it the lowest and the highest ratio.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeVar

from firn.core.errors import FirnError

T = TypeVar("T")


Round = Mapping[str, float | None]
Rounds = Mapping[str, Sequence[Round]]


def in_turns(
    servers: Mapping[str, T], rounds: int, play: Callable[[T], dict[str, Any]]
) -> dict[str, list[dict[str, Any]]]:
    """Calls `play` with each server: A B, then B A, and so on."""
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in servers}
    for i in range(rounds):
        for name, server in rotated(list(servers.items()), i):
            results[name].append(play(server))
    return results


def rotated(items: Sequence[T], turn: int) -> list[T]:
    """The items, beginning with another one each turn, so that none is always first."""
    k = turn % len(items)
    return [*items[k:], *items[:k]]


class BenchError(FirnError):
    """A benchmark cannot go on; the message is the one line that the user sees."""

    code = "bench_error"


def cli(main: Callable[[], None]) -> None:
    """Runs a script's main; a BenchError ends it with one line and a non-zero exit code. SIGTERM
    raises SystemExit, so that the script still stops the servers that it has started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        main()
    except BenchError as e:
        print(f"{Path(sys.argv[0]).name}: {e}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


@dataclass(frozen=True, slots=True)
class Column:
    """`better`: which of two values wins; "" for numbers that are not compared."""

    key: str
    title: str
    digits: int = 2
    better: Literal["more", "less", ""] = "less"


def medians(rounds: Sequence[Round], columns: Iterable[Column]) -> dict[str, float | None]:
    """The median of each column, over the rounds that have a value; None if none has."""
    out: dict[str, float | None] = {}
    for column in columns:
        values = [v for r in rounds if (v := r.get(column.key)) is not None]
        out[column.key] = statistics.median(values) if values else None
    return out


def table(
    title: str,
    columns: Sequence[Column],
    *,
    rounds: Rounds,
    references: Sequence[str] = (),
) -> str:
    """Medians by name, then the subject against the best rival and against each reference."""
    by_name = {name: medians(rs, columns) for name, rs in rounds.items() if rs}
    lines = [
        [name, *(_number(row[c.key], c.digits) for c in columns)] for name, row in by_name.items()
    ]
    names = [n for n in by_name if n not in references]
    if names:
        against = {n: {c.key: n for c in columns} for n in references if n in by_name}
        if len(names) > 1:
            best = {c.key: _best({n: by_name[n][c.key] for n in names[1:]}, c) for c in columns}
            against = {"best rival": best, **against}
        for title_of_rival, rival in against.items():
            by_column = [
                ratios(rounds[names[0]], rounds[rival[c.key]], c.key) if c.better else []
                for c in columns
            ]
            cells = [
                _median_text(each, shown=bool(c.better))
                for each, c in zip(by_column, columns, strict=True)
            ]
            lines.append([f"{names[0]} / {title_of_rival}", *cells])
            if any(len(each) > 1 for each in by_column):
                lines.append(["  from - to", *map(_range, by_column)])
    spreads = [_spread([rs for rs in rounds.values() if len(rs) > 1], c.key) for c in columns]
    if any(spreads):
        lines.append(["spread of rounds", *spreads])
    return f"{title}\n" + grid([["", *(c.title for c in columns)], *lines])


def grid(rows: Sequence[Sequence[str]]) -> str:
    """Aligns columns: the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)


def save(path: Path, benchmark: str, *, options: Mapping[str, Any], result: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = document(benchmark, options=options, result=result)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"all rounds: {path}")


def document(benchmark: str, *, options: Mapping[str, Any], result: Any) -> dict[str, Any]:
    """A result with what is needed to compare it: time, machine, options."""
    return {
        "benchmark": benchmark,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "system": platform.platform(),
            "processor": platform.processor() or platform.machine(),
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
        },
        "options": {k: str(v) if isinstance(v, Path) else v for k, v in options.items()},
        "result": result,
    }


def names(text: str) -> list[str]:
    """A comma-separated option."""
    return [word.strip() for word in text.split(",") if word.strip()]


def numbers(text: str) -> list[int]:
    return [int(word) for word in names(text)]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _best(values: Mapping[str, float | None], column: Column) -> str:
    """The name with the best value; any name if there are no values."""
    known = {name: v for name, v in values.items() if v is not None}
    if not known:
        return next(iter(values))
    return (max if column.better == "more" else min)(known, key=lambda name: known[name])


def ratios(ours: Sequence[Round], theirs: Sequence[Round], key: str) -> list[float]:
    """The ratios of the rounds in which both have a value."""
    pairs = [(a.get(key), b.get(key)) for a, b in zip(ours, theirs, strict=True)]
    return [a / b for a, b in pairs if a is not None and b]


def _median_text(values: Sequence[float], *, shown: bool) -> str:
    if not shown:
        return ""
    return f"{statistics.median(values):.2f}" if values else "-"


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.2f} - {max(values):.2f}" if values else ""


def _spread(runs: Sequence[Sequence[Round]], key: str) -> str:
    """The largest (max - min) / median over all names."""
    spreads = []
    for run in runs:
        values = [v for r in run if (v := r.get(key)) is not None]
        if len(values) > 1 and statistics.median(values):
            spreads.append((max(values) - min(values)) / statistics.median(values))
    return f"{max(spreads):.0%}" if spreads else ""
