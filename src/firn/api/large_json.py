"""JSON of large replies, made in the pool. Pure.

Python's encoder lets no other thread run until it is done, so long arrays go through it in pieces.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

PIECE_ITEMS = 512


def dumps(value: Any, *, piece_items: int = PIECE_ITEMS, allow_nan: bool = True) -> bytes:
    """What json.dumps makes of it, as bytes. piece_items: of a longer array so many at once."""
    return "".join(_pieces(value, piece_items, partial(json.dumps, allow_nan=allow_nan))).encode()


def _pieces(value: Any, n: int, dumps_whole: Callable[[Any], str]) -> Iterator[str]:
    if isinstance(value, dict) and value:
        opener = "{"
        for key, member in value.items():
            yield f"{opener}{dumps_whole(key)}: "
            yield from _pieces(member, n, dumps_whole)
            opener = ", "
        yield "}"
    elif isinstance(value, list) and len(value) > n:
        opener = "["
        for at in range(0, len(value), n):
            yield opener + dumps_whole(value[at : at + n])[1:-1]
            opener = ", "
        yield "]"
    elif isinstance(value, list) and value:
        opener = "["
        for item in value:
            yield opener
            yield from _pieces(item, n, dumps_whole)
            opener = ", "
        yield "]"
    else:
        yield dumps_whole(value)
