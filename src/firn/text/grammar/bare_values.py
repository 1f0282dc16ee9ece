"""What a JSON schema requires of a value that a tool format writes without JSON's quotes. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from firn.text.calls.schema import resolved

ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "example", "format", "deprecated", "readOnly",
     "writeOnly", "nullable", "discriminator", "$schema", "$id", "$comment", "$anchor"}
)  # fmt: skip
OBJECT_KEYWORDS = frozenset(
    {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
)
LIST_KEYWORDS = ("prefixItems", "additionalItems", "contains", "uniqueItems", "unevaluatedItems")


def as_root(schema: Any) -> Mapping[str, Any]:
    """The schema as the document that its references point into."""
    return schema if isinstance(schema, Mapping) else {}


def allowed_values(schema: Any) -> Sequence[Any] | None:
    """The values that the schema lists, by const or enum; None if it lists none."""
    target = resolved(schema, as_root(schema))
    if not isinstance(target, Mapping):
        return None
    values = [target["const"]] if "const" in target else target.get("enum")
    return values if isinstance(values, list) and values else None


def string_terminals(schema: Any) -> Iterator[str]:
    """Grammar terminals for the length and pattern that the schema requires of a string."""
    target = resolved(schema, as_root(schema))
    if not isinstance(target, Mapping):
        return
    least, most = target.get("minLength"), target.get("maxLength")
    if isinstance(least, int) or isinstance(most, int):
        yield f"/(?s:.{{{least or 0},{'' if most is None else most}}})/"
    pattern = target.get("pattern")
    if isinstance(pattern, str):
        yield f"/{_as_full_match(pattern)}/"


def unenforced_members(schema: Mapping[str, Any]) -> Iterator[str]:
    """Object keywords that bare formats cannot enforce: they only handle declared members."""
    if "properties" not in schema and isinstance(schema.get("additionalProperties"), Mapping):
        yield "additionalProperties"
    known = OBJECT_KEYWORDS | ANNOTATIONS
    yield from (key for key in schema if key not in known and not key.startswith("x-"))


def unenforced_items(schema: Mapping[str, Any]) -> Iterator[str]:
    """List keywords that bare formats cannot enforce: they handle only length and one schema."""
    return (key for key in LIST_KEYWORDS if key in schema)


def unenforced_text(schema: Any) -> Iterator[str]:
    """String keywords that `string_terminals` does not turn into terminals."""
    target = resolved(schema, as_root(schema))
    if not isinstance(target, Mapping) or allowed_values(schema) is not None:
        return
    for key in ("anyOf", "oneOf"):
        options = target.get(key)
        if isinstance(options, list) and not any(map(_is_any_text, options)):
            yield key
    yield from (key for key in ("allOf", "not", "if") if key in target)


def _is_any_text(schema: Any) -> bool:
    if not isinstance(schema, Mapping):
        return False
    asks = set(schema) - ANNOTATIONS - {"type"}
    kind = schema.get("type")
    return not asks and (kind == "string" or (isinstance(kind, list) and "string" in kind))


def _as_full_match(pattern: str) -> str:
    """Turns a pattern that may match anywhere into one that matches the whole text."""
    start, end = "(?s:.*)", "(?s:.*)"
    if not _has_open_bar(pattern):
        if pattern.startswith("^"):
            start, pattern = "", pattern[1:]
        if re.search(r"(?<!\\)(?:\\\\)*\$$", pattern):
            end, pattern = "", pattern[:-1]
    pattern = re.sub(r"(\\.)|/", lambda match: match[1] or "\\/", pattern, flags=re.DOTALL)
    return f"{start}(?:{pattern}){end}".replace("\n", "\\n")


def _has_open_bar(pattern: str) -> bool:
    """Whether there are alternatives outside any group: an anchor then belongs to one of them."""
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
