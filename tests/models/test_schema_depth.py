"""Deep schemas: the compiler would overflow its stack, which ends the process."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from firn.core.errors import InvalidValue
from firn.core.values import Grammar, SoftenedSchema
from firn.models.grammar import Compiler
from firn.models.schema_depth import MAX_DEPTH, is_too_deep
from tests.models.test_grammar_compile import N_VOCAB, zoo_tokenizer

Schema = dict[str, Any]


def ref(i: int) -> Schema:
    return {"$ref": f"#/$defs/d{i}"}


def chain(n: int, wrap: Callable[[Schema], Schema] = lambda inner: inner) -> Schema:
    defs = {f"d{i}": wrap(ref(i + 1)) for i in range(n)}
    return {"$defs": {**defs, f"d{n}": {"type": "string"}}, **ref(0)}


def listed(inner: Schema) -> Schema:
    return {"type": "array", "items": inner}


def by_anchor(n: int) -> Schema:
    defs = {f"d{i}": {"$anchor": f"a{i}", "items": {"$ref": f"#a{i + 1}"}} for i in range(n)}
    return {"$defs": {**defs, f"d{n}": {"$anchor": f"a{n}"}}, "$ref": "#a0"}


def by_id(n: int) -> Schema:
    """Inside a part with an id, a pointer starts at that part; the root has other content there."""
    defs = chain(n, listed)["$defs"]
    inner = {"$id": "http://x/inner", "$defs": defs, **ref(0)}
    return {"$defs": {f"d{i}": {} for i in range(n)}, "items": inner}


def one_cycle(n: int) -> Schema:
    """Each definition leads to some of the others, and from there to all."""
    defs = {f"d{i}": {"items": {"anyOf": [ref((i + k) % n) for k in (2, 3)]}} for i in range(n)}
    return {"$defs": defs, **ref(0)}


DEEP = {
    "references": chain(5000),
    "lists": chain(1500, listed),
    "anchors": by_anchor(3000),
    "ids": by_id(1500),
    "a cycle": one_cycle(400),
}


@pytest.mark.parametrize("name", DEEP)
def test_a_schema_that_leads_too_deep_is_refused(name: str) -> None:
    made = Compiler(zoo_tokenizer(), vocab_size=N_VOCAB)
    with pytest.raises(InvalidValue, match="levels deep"):
        made.compile(Grammar("json_schema", json.dumps(DEEP[name]), param="response_format"))


@pytest.mark.parametrize("name", DEEP)
def test_nothing_of_a_tools_schema_that_is_too_deep_is_enforced(name: str) -> None:
    made = Compiler(zoo_tokenizer(), vocab_size=N_VOCAB)
    assert made.soften(DEEP[name]) == SoftenedSchema({"type": "object"}, ("#",))


def optional(inner: Schema) -> Schema:
    return {"anyOf": [inner, {"type": "null"}]}


@pytest.mark.parametrize("wrap", [listed, optional])
def test_a_schema_that_is_almost_too_deep_is_compiled(wrap: Callable[[Schema], Schema]) -> None:
    schema = chain(MAX_DEPTH // 2 - 2, wrap)
    assert not is_too_deep(schema)
    made = Compiler(zoo_tokenizer(), vocab_size=N_VOCAB)
    made.compile(Grammar("json_schema", json.dumps(schema)))


def test_a_wide_schema_is_not_too_deep() -> None:
    wide = {
        "$defs": {f"d{i}": listed({"type": "string"}) for i in range(5000)},
        "anyOf": [ref(i) for i in range(5000)],
    }
    assert not is_too_deep(wide)


def test_a_recursive_schema_is_not_too_deep() -> None:
    tree = {"type": "object", "properties": {f"p{i}": {"$ref": "#"} for i in range(5000)}}
    assert not is_too_deep(tree)
    assert not is_too_deep(chain(MAX_DEPTH // 4, listed))
