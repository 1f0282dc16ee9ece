"""What is wrong with a picture, worded for its sender."""

from __future__ import annotations

SEVERAL_PICTURES = "is animated or has several pages; send one of them"
MAX_CHARS = 200


class Undecodable(Exception):
    """What is wrong with the picture, as the end of a sentence that begins with "the image"."""


def one_line(error: BaseException) -> str:
    """The error's message on one line; the name of its class if it has no message."""
    return " ".join(str(error).split())[:MAX_CHARS] or type(error).__name__
