"""`chat_template_kwargs`: variables for the chat template, bounded in names, types and size. Pure.

The template itself is the server's: a client that could send one would run its own code here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from firn.api.http import fields
from firn.api.http.fields import Fields
from firn.core.errors import InvalidValue

PARAM = "chat_template_kwargs"
TEMPLATES = ("chat_template", "template", "chat_template_type")
RESERVED = frozenset({
    # what the server itself passes to the renderer
    "messages", "conversation", "tools", "continue_final_message", "tokenize", "tokenizer_kwargs",
    "sanitize_control_tokens", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "additional_special_tokens",
    # what templates call
    "raise_exception", "strftime_now", "range", "dict", "namespace", "lipsum", "cycler", "joiner",
    "loop", "caller", "self",
})  # fmt: skip
MAX_NAMES = 32
MAX_DEPTH = 8
MAX_SIZE = 64 * 1024
"""In characters, plus VALUE_SIZE for every value."""
MAX_DOCUMENTS_SIZE = 4 * 1024 * 1024
"""Documents are part of the prompt's text, and may be just as long."""
MAX_INTEGER = 2**53
VALUE_SIZE = 8
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")


def template_kwargs(body: Fields) -> Mapping[str, Any]:
    """The variables that a body sets. Raises InvalidValue."""
    for name in TEMPLATES:
        if body.get(name) is not None:
            raise InvalidValue(name, "a request cannot replace the server's chat template")
    given, documents = body.get(PARAM), body.get("documents")
    variables = {} if given is None else fields.mapping(given, PARAM)
    if documents is not None:  # vLLM's place for them
        variables = {**variables, "documents": documents}
    if len(variables) > MAX_NAMES:
        raise InvalidValue(PARAM, f"must have at most {MAX_NAMES} members")
    size = sum(
        _checked_size(name, value) for name, value in variables.items() if name != "documents"
    )
    if size > MAX_SIZE:
        raise InvalidValue(PARAM, f"must have at most {MAX_SIZE} characters in all")
    if variables.get("documents") is not None:
        _check_documents(variables["documents"])
    return variables


def _checked_size(name: str, value: object) -> int:
    """The size of one variable. Raises InvalidValue."""
    param = f"{PARAM}.{name[:64]}"
    if name in TEMPLATES:
        raise InvalidValue(param, "a request cannot replace the server's chat template")
    # Templates refer to the tokenizer's control tokens by such names.
    if name in RESERVED or name.endswith("_token") or not _NAME.fullmatch(name):
        raise InvalidValue(param, "cannot be set by a request")
    return len(name) + _size(value, param, depth=MAX_DEPTH)


def _check_documents(value: object) -> None:
    param = f"{PARAM}.documents"
    documents = fields.array(value, param)
    for i, document in enumerate(documents):
        fields.mapping(document, f"{param}[{i}]")
    if _size(documents, param, depth=MAX_DEPTH) > MAX_DOCUMENTS_SIZE:
        raise InvalidValue(param, f"must have at most {MAX_DOCUMENTS_SIZE} characters in all")


def _size(value: object, param: str, *, depth: int) -> int:
    if isinstance(value, str):
        return VALUE_SIZE + len(value)
    if isinstance(value, dict | list):
        if depth == 0:
            raise InvalidValue(param, f"must not be nested deeper than {MAX_DEPTH} levels")
        if isinstance(value, dict):
            keys = sum(map(len, value))
            return VALUE_SIZE + keys + sum(_size(v, param, depth=depth - 1) for v in value.values())
        return VALUE_SIZE + sum(_size(v, param, depth=depth - 1) for v in value)
    if isinstance(value, int) and abs(value) > MAX_INTEGER:
        raise InvalidValue(param, "has a number that is too large")
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidValue(param, "has a number that is infinite or NaN")
    return VALUE_SIZE
