"""Where prefill chunks end on a device that must prepare attention for every new shape. Pure."""

from __future__ import annotations


def common_end(start: int, end: int, *, multiple: int) -> int:
    """Where to end a chunk [start, end) so that its shape is common. The rest is another chunk.

    multiple: chunks up to this length are padded to one of a few widths wherever they begin, so
    they are not cut. Longer ones begin and end at multiples of it:

        0          multiple    2*multiple   3*multiple
        |-------------|-------------|-------------|---
        |===========================|--x  the rest is padded
               |======|---------------------------x
    """
    if not multiple or end - start <= multiple:
        return end
    if start % multiple:
        return start - start % multiple + multiple
    return end - end % multiple
