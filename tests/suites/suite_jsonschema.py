"""The JSON Schema test suite (from jsonschema's archive, MIT), as schemas that replies must satisfy.

A schema may be refused by name; a reply to one that is accepted must be valid by an independent
validator. Instances of the suite are not used: what matters here is what a model can be made to write.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest
from target import DATA, HI, chats

MAX_TOKENS = 60
DRAFT = "/json/tests/draft2020-12/"


def groups() -> Iterator[tuple[str, dict[str, Any]]]:
    (archive,) = DATA.glob("jsonschema-*.tar.gz")
    with tarfile.open(archive) as tar:
        for member in tar:
            _, found, name = member.name.partition(DRAFT)
            if not found or "/" in name or not name.endswith(".json"):
                continue
            file = tar.extractfile(member)
            assert file is not None
            for i, group in enumerate(json.load(file)):
                if isinstance(group["schema"], dict):
                    yield f"{name.removesuffix('.json')}-{i}", group["schema"]


SCHEMAS = dict(groups())


@pytest.fixture(scope="module")
def answers() -> dict[str, httpx.Response]:
    bodies = [
        {
            "messages": HI,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "s", "schema": schema},
            },
            "max_tokens": MAX_TOKENS,
            "temperature": 1.5,  # for replies that differ
            "seed": i,
        }
        for i, schema in enumerate(SCHEMAS.values())
    ]
    return dict(zip(SCHEMAS, chats(bodies), strict=True))


@pytest.mark.parametrize("name", SCHEMAS)
def test_schema(name: str, answers: dict[str, httpx.Response]) -> None:
    answer = answers[name]
    if answer.status_code == 400:
        error = answer.json()["error"]
        assert error["param"].startswith("response_format")
        pytest.skip("refused by name")
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    if choice["finish_reason"] == "length":
        pytest.skip("the reply was cut off: a tiny model writes endless strings")
    reply = json.loads(choice["message"]["content"])
    if "x-firn-unenforced" in answer.headers:
        pytest.skip("enforced in part, as x-firn-unenforced says")
    jsonschema.Draft202012Validator(SCHEMAS[name]).validate(reply)
