"""Text that can be encoded. Pure."""

from __future__ import annotations


def well_formed(text: str) -> str:
    """The text with U+FFFD for lone surrogates, which escapes can spell but UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
