"""Every schema, on a model whose weights are noise: only the grammar can make the answer right."""

from __future__ import annotations

import datetime
import ipaddress
import json
import uuid
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from firn.core.values import Sampling
from tests.harness import Result
from tests.models.grammar.grammar_lab import (
    PROMPT,
    closing_bias,
    compiled,
    harness,
    sampled,
    text_of,
    tokenizer,
)
from tests.models.grammar.schemas import SCHEMAS

WAYS: dict[str, Sampling] = {
    "greedy": Sampling(temperature=0.0, logit_bias=closing_bias(20.0)),
    "seed 1": sampled(1),
    "seed 2": sampled(2, weight=3.0),
    "top-k, top-p, min-p, penalties": Sampling(
        temperature=1.3,
        top_k=40,
        top_p=0.9,
        min_p=0.02,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        seed=3,
        logit_bias=closing_bias(4.0),
    ),
}
N_MOST = 500
FORMATS: dict[str, Callable[[str], Any]] = {
    "date": datetime.date.fromisoformat,
    "uuid": uuid.UUID,
    "ipv4": ipaddress.IPv4Address,
}


@pytest.fixture(scope="module")
def replies() -> dict[tuple[str, str], Result]:
    """All replies, from one batch of mixed grammars."""
    running = harness(max_rows=48)
    try:
        submitted = {
            (name, way): running.submit(
                PROMPT,
                N_MOST,
                sampling=sampling,
                eos=tokenizer().eos,
                grammar=compiled("json_schema", json.dumps(schema)),
            )
            for name, schema in SCHEMAS.items()
            for way, sampling in WAYS.items()
        }
        return {key: result.wait() for key, result in submitted.items()}
    finally:
        running.close()


def test_at_least_sixty_schemas_are_tried() -> None:
    assert len(SCHEMAS) >= 60


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_answer_is_valid(name: str, replies: dict[tuple[str, str], Result]) -> None:
    schema = SCHEMAS[name]
    for way in WAYS:
        result = replies[name, way]
        assert result.error is None
        assert result.reasons == {0: "stop"}, f"{way}: {text_of(result.reply)[:300]}"
        assert result.reply[-1] in tokenizer().eos
        value = json.loads(text_of(result.reply))
        jsonschema.Draft202012Validator(schema).validate(value)
        if isinstance(schema, dict) and schema.get("format") in FORMATS:
            FORMATS[schema["format"]](value)
