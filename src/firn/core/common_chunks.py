"""Where prefill chunks end on a device that prepares attention anew for each shape. Pure."""

from __future__ import annotations


def common_end(start: int, end: int, *, multiple: int) -> int:
    """Where a chunk [start, end) ends so that its shape is a common one; the rest is another chunk.

    multiple: chunks up to this length are padded to few widths wherever they begin, and stay as they
    are. Longer ones begin and end at multiples of it:

        0          multiple    2*multiple   3*multiple
        |-------------|-------------|-------------|---
        |===========================|--x  what is left is padded
               |======|---------------------------x
    """
    if not multiple or end - start <= multiple:
        return end
    if start % multiple:
        return start - start % multiple + multiple
    return end - end % multiple
