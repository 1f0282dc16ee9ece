"""Encodes large replies as JSON, in the pool. Pure.

Python's encoder holds the GIL until it is done, so it is given long arrays in pieces.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

PIECE_ITEMS = 512
DEFAULT = json.JSONEncoder()
COMPACT = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
"""As Starlette writes JSON."""


def dumps(
    value: object, encoder: json.JSONEncoder = DEFAULT, *, piece_items: int = PIECE_ITEMS
) -> bytes:
    """The encoder's output, as bytes. Arrays longer than `piece_items` are encoded in pieces."""
    return "".join(_pieces(value, encoder, piece_items)).encode()


def _pieces(value: object, encoder: json.JSONEncoder, n: int) -> Iterator[str]:
    if isinstance(value, dict) and value:
        opener = "{"
        for key, member in value.items():
            yield f"{opener}{encoder.encode(key)}{encoder.key_separator}"
            yield from _pieces(member, encoder, n)
            opener = encoder.item_separator
        yield "}"
    elif isinstance(value, list) and len(value) > n:
        opener = "["
        for at in range(0, len(value), n):
            yield opener + encoder.encode(value[at : at + n])[1:-1]
            opener = encoder.item_separator
        yield "]"
    elif isinstance(value, list) and value:
        opener = "["
        for item in value:
            yield opener
            yield from _pieces(item, encoder, n)
            opener = encoder.item_separator
        yield "]"
    else:
        yield encoder.encode(value)
