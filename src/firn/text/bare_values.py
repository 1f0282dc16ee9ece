"""What a JSON schema asks of a value that is written without JSON's quotes. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from firn.text.schema import resolved


def as_root(schema: Any) -> Mapping[str, Any]:
    """The schema as the document that its references point into."""
    return schema if isinstance(schema, Mapping) else {}


def listed(schema: Any) -> Sequence[Any] | None:
    """The values of one that may be one of a few; None where it may be others."""
    found = resolved(schema, as_root(schema))
    if not isinstance(found, Mapping):
        return None
    values = [found["const"]] if "const" in found else found.get("enum")
    return values if isinstance(values, list) and values else None


def limits(schema: Any) -> Iterator[str]:
    """What a schema asks of a string, as terminals."""
    found = resolved(schema, as_root(schema))
    if not isinstance(found, Mapping):
        return
    least, most = found.get("minLength"), found.get("maxLength")
    if isinstance(least, int) or isinstance(most, int):
        yield f"/(?s:.{{{least or 0},{'' if most is None else most}}})/"
    pattern = found.get("pattern")
    if isinstance(pattern, str):
        yield f"/{_search(pattern)}/"


def _search(pattern: str) -> str:
    """A pattern that may match anywhere, as one that matches the whole."""
    start, end = "(?s:.*)", "(?s:.*)"
    if not _has_open_bar(pattern):
        if pattern.startswith("^"):
            start, pattern = "", pattern[1:]
        if re.search(r"(?<!\\)(?:\\\\)*\$$", pattern):
            end, pattern = "", pattern[:-1]
    pattern = re.sub(r"(\\.)|/", lambda found: found[1] or "\\/", pattern, flags=re.DOTALL)
    return f"{start}(?:{pattern}){end}".replace("\n", "\\n")


def _has_open_bar(pattern: str) -> bool:
    """Whether alternatives stand outside of any group, so that an anchor is but one's."""
    depth, i, in_class = 0, 0, False
    while i < len(pattern):
        char = pattern[i]
        if char == "\\":
            i += 1
        elif in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
        elif char in "()":
            depth += 1 if char == "(" else -1
        elif char == "|" and depth == 0:
            return True
        i += 1
    return False
