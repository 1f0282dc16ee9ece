"""A result as an SVG picture: a group of bars per column, one per name, with the rounds' range."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

from firn.bench.report import Column, Rounds, medians

BAR, GAP, GROUP_GAP, LEFT, TOP, HEIGHT, FOOT = 34, 6, 40, 24, 56, 220, 64
COLOURS = ("#2563a8", "#d9822b", "#4f9d69", "#8e5ea2", "#b0413e", "#6b7280")


def svg(title: str, columns: Sequence[Column], *, rounds: Rounds) -> str:
    """Each group has a scale of its own: seconds and tokens do not compare."""
    names = [name for name, done in rounds.items() if done]
    shown = [c for c in columns if any(_values(rounds, n, c) for n in names)]
    group = max(len(names) * (BAR + GAP), 90)
    width = max(LEFT * 2 + len(shown) * (group + GROUP_GAP), 360)
    height = TOP + HEIGHT + FOOT + 20 * ((len(names) + 2) // 3)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="26" font-size="15" fill="#111827">{escape(title)}</text>',
    ]
    for i, column in enumerate(shown):
        parts += _group(column, LEFT + i * (group + GROUP_GAP), group, names, rounds)
    for i, name in enumerate(names):
        x, y = LEFT + i % 3 * (width - 2 * LEFT) // 3, TOP + HEIGHT + FOOT + i // 3 * 20
        parts.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{_colour(i)}"/>')
        parts.append(f'<text x="{x + 18}" y="{y}" fill="#111827">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _group(column: Column, x: int, width: int, names: Sequence[str], rounds: Rounds) -> list[str]:
    values = {name: _values(rounds, name, column) for name in names}
    top = max((max(v) for v in values.values() if v), default=0.0) or 1.0
    base = TOP + HEIGHT
    parts = [f'<line x1="{x}" y1="{base}" x2="{x + width}" y2="{base}" stroke="#9ca3af"/>']
    for i, name in enumerate(names):
        middle = medians(rounds[name], [column])[column.key]
        if middle is None:
            continue
        left, high = x + i * (BAR + GAP), HEIGHT * middle / top
        parts.append(
            f'<rect x="{left}" y="{base - high:.1f}" width="{BAR}" height="{high:.1f}" '
            f'fill="{_colour(i)}"/>'
        )
        low, most = (base - HEIGHT * v / top for v in (min(values[name]), max(values[name])))
        centre = left + BAR / 2
        parts.append(
            f'<line x1="{centre}" y1="{low:.1f}" x2="{centre}" y2="{most:.1f}" stroke="#111827"/>'
        )
        parts.append(
            f'<text x="{centre}" y="{min(base - high, most) - 4:.1f}" text-anchor="middle" '
            f'fill="#111827">{middle:,.{column.digits}f}</text>'
        )
    better = {"more": "higher is better", "less": "lower is better", "": ""}[column.better]
    parts.append(f'<text x="{x}" y="{base + 18}" fill="#111827">{escape(column.title)}</text>')
    parts.append(f'<text x="{x}" y="{base + 34}" fill="#6b7280">{better}</text>')
    return parts


def _values(rounds: Rounds, name: str, column: Column) -> list[float]:
    return [v for r in rounds[name] if (v := r.get(column.key)) is not None]


def _colour(i: int) -> str:
    return COLOURS[i % len(COLOURS)]
