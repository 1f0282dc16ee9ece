"""The Berkeley Function Calling Leaderboard's functions (bfcl-eval, Apache 2.0).

A tiny model cannot choose the right call, so this asks what a server owes: every function is accepted
as a tool, and a required call is one of the functions offered, with arguments that its schema accepts.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest
from target import DATA, chats

FILES = ("simple_python", "simple_java", "simple_javascript", "multiple", "parallel", "live_simple")
EVERY = 10
"""One case in so many is asked: the functions are much alike."""
MAX_TOKENS = 200
TYPES = {
    "dict": "object", "float": "number", "tuple": "array", "any": None, "String": "string",
    "HashMap": "object", "ArrayList": "array", "Array": "array", "list": "array", "int": "integer",
    "Boolean": "boolean", "double": "number", "long": "integer", "char": "string", "byte": "integer",
    "short": "integer", "bool": "boolean", "Bigint": "integer", "Object": "object",
}  # fmt: skip
"""The data's names of types, as JSON Schema's; None: anything."""


def cases() -> Iterator[dict[str, Any]]:
    (wheel,) = DATA.glob("bfcl_eval-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for name in FILES:
            text = archive.read(f"bfcl_eval/data/BFCL_v4_{name}.json").decode()
            for line in text.splitlines()[::EVERY]:
                yield json.loads(line)


def schema(given: Any) -> Any:
    """The data's description of a type as a JSON schema."""
    if isinstance(given, list):
        return [schema(value) for value in given]
    if not isinstance(given, dict):
        return given
    shown = {}
    for name, value in given.items():
        if name == "properties":
            shown[name] = {key: schema(inner) for key, inner in value.items()}
        elif name == "type" and isinstance(value, str):
            kind = TYPES.get(value, value)
            shown |= {"type": kind} if kind else {}
        elif name in ("description", "required", "enum", "items", "additionalProperties"):
            shown[name] = schema(value) if name == "items" else value
    return shown


CASES = list(cases())


def tools(case: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "name": re.sub(r"\W", "_", function["name"]),
            "description": function["description"],
            "parameters": schema(function["parameters"]),
        }
        for function in case["function"]
    ]


@pytest.fixture(scope="module")
def answers() -> dict[str, httpx.Response]:
    bodies = [
        {
            "messages": case["question"][0],
            "tools": [{"type": "function", "function": tool} for tool in tools(case)],
            "tool_choice": "required",
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
        }
        for case in CASES
    ]
    return dict(zip((case["id"] for case in CASES), chats(bodies), strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_functions(case: dict[str, Any], answers: dict[str, httpx.Response]) -> None:
    answer = answers[case["id"]]
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    if choice["finish_reason"] == "length":
        pytest.skip("the reply was cut off: a tiny model writes endless strings")
    by_name = {tool["name"]: tool["parameters"] for tool in tools(case)}
    for call in choice["message"]["tool_calls"]:
        function = call["function"]
        assert function["name"] in by_name
        if "x-firn-unenforced" not in answer.headers:
            jsonschema.validate(json.loads(function["arguments"]), by_name[function["name"]])
