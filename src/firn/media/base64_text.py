"""Base64 as clients send it: often with line breaks, sometimes without padding. Pure."""

from __future__ import annotations

import base64

WHITESPACE = b" \t\r\n\v\f"


def max_chars(nbytes: int) -> int:
    """The length beyond which a text need not be decoded to know that it is too large.

    Base64 takes a third more than the bytes do, and MIME's line breaks 3% of that.
    """
    return nbytes * 3 // 2 + 16


def decode(text: str) -> bytes:
    """Raises ValueError."""
    # Not str.split or re.sub: they make an object of every line, which may be a character long.
    raw = text.encode("ascii").translate(None, WHITESPACE)
    return base64.b64decode(raw + b"=" * (-len(raw) % 4), validate=True)
