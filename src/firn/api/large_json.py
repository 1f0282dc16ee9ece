"""JSON of large replies, made in the pool. Pure.

Python's encoder lets no other thread run until it is done, so long arrays go through it in pieces.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

PIECE_ITEMS = 512


def dumps(value: Any) -> bytes:
    """What json.dumps makes of it, as bytes."""
    return "".join(_pieces(value)).encode()


def _pieces(value: Any) -> Iterator[str]:
    if isinstance(value, dict) and value:
        opener = "{"
        for key, member in value.items():
            yield f"{opener}{json.dumps(key)}: "
            yield from _pieces(member)
            opener = ", "
        yield "}"
    elif isinstance(value, list) and len(value) > PIECE_ITEMS:
        opener = "["
        for at in range(0, len(value), PIECE_ITEMS):
            yield opener + json.dumps(value[at : at + PIECE_ITEMS])[1:-1]
            opener = ", "
        yield "]"
    elif isinstance(value, list) and value:
        opener = "["
        for item in value:
            yield opener
            yield from _pieces(item)
            opener = ", "
        yield "]"
    else:
        yield json.dumps(value)
