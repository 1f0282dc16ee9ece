"""The form that a reply must have.

All dialects but Ollama's accept the same forms, each in a field of its own. JSON is requested as in
OpenAI's and Anthropic's APIs; regex, choice and lark are extensions. Pure.
"""

from __future__ import annotations

import json
from typing import Any

from firn.api import fields
from firn.api.fields import Fields
from firn.core.errors import InvalidValue
from firn.core.values import Grammar
from firn.text.json_lark import MAX_CHARS

MAX_CHOICES = 16_384
"""The time to compile them grows with the square of their number."""
MARKS = ":([{"
MAX_MARKS = 2000
"""The compiler recurses into rules and brackets, and a stack overflow would kill the whole server.
It happens at a chain of 3500 rules, each of which leads to the next."""
KINDS = ("text", "json_object", "json_schema", "regex", "choice", "lark")


def output_format(owner: Fields, member: str, *, schema_in: str = "") -> Grammar | None:
    """The form in this member; None: any text. schema_in: the member that wraps a schema and its
    name, if any."""
    given = owner.get(member)
    if given is None:
        return None
    path = owner.name(member)
    form = fields.members(given, path)
    kind = fields.one_of(form.require("type"), form.name("type"), KINDS)
    match kind:
        case "json_object":
            return Grammar("json_object", param=path)
        case "json_schema":
            return Grammar("json_schema", _schema(form, schema_in), param=path)
        case "regex":
            pattern = fields.string(form.require("regex"), form.name("regex"))
            return Grammar("regex", pattern, param=path)
        case "choice":
            return Grammar("choice", _choices(form), param=path)
        case "lark":
            grammar = lark(form.require("grammar"), form.name("grammar"))
            return Grammar("lark", grammar, param=path)
        case _:
            return None


def lark(given: object, param: str) -> str:
    """A grammar that a user has written. Raises InvalidValue."""
    text = fields.string(given, param, max_chars=MAX_CHARS)
    if sum(map(text.count, MARKS)) > MAX_MARKS:
        raise InvalidValue(param, f"must have at most {MAX_MARKS} of the characters {MARKS}")
    return text


def _schema(form: Fields, schema_in: str) -> str:
    if schema_in:
        form.require(schema_in)
        form = form.object(schema_in)
    form.string("name")
    form.boolean("strict", False)  # a schema is always enforced
    return json.dumps(fields.mapping(form.require("schema"), form.name("schema")))


def _choices(form: Fields) -> str:
    param = form.name("choices")
    given = fields.array(form.require("choices"), param, low=1, high=MAX_CHOICES)
    return json.dumps([fields.string(text, f"{param}[{i}]") for i, text in enumerate(given)])


def schema_of_format() -> dict[str, Any]:
    """For /openapi.json."""
    return {
        "type": ["object", "null"],
        "description": f"type is one of {', '.join(KINDS)}; see the README.",
    }
