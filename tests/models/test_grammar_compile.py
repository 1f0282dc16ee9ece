"""From a grammar to a constraint: what is refused and where, what is kept, every kind of tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from firn.core.errors import BadRequest, InvalidValue
from firn.core.values import Grammar, SoftenedSchema
from firn.models import grammar as grammars
from firn.models.grammar import Compiler
from firn.models.loader import load_tokenizer
from firn.models.schema_faults import is_endless, locate
from firn.models.tokenizer import HfTokenizer
from tests.models.grammar_lab import N_VOCAB, compiled, compiler, wander
from tests.models.grammar_lab import tokenizer as zoo_tokenizer
from tests.text import trained

DEEP = {"type": "object", "properties": {"a": {"type": "array", "items": {"not": {}}}}}


def refusal(kind: Any, text: str, param: str = "response_format") -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        compiler().compile(Grammar(kind, text, param))
    assert caught.value.status == 400
    assert caught.value.param == param
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 600
    return caught.value


# --- refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "where", "what"),
    [
        (DEEP, "#/properties/a/items:", "not"),
        ({"enum": []}, "#:", "empty"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "#:", "greater"),
        ({"type": "whatever"}, "#:", "whatever"),
        ({"type": "string", "format": "shoe-size"}, "#:", "shoe-size"),
        ({"type": "string", "pattern": "("}, "#:", "unclosed group"),
        ({"type": "string", "pattern": "(?=a)b"}, "#:", "look-around"),
        ({"$ref": "#/$defs/nowhere"}, "#:", "nowhere"),
        ({"$ref": "https://example.com/schema"}, "#:", "example.com"),
        ({"anyOf": [{"type": "null"}, {"if": {}, "then": {}}]}, "#/anyOf/1:", "if"),
        ({"properties": {"a/b~c": {"uniqueItems": True}}}, "#/properties/a~1b~0c:", "uniqueItems"),
        (
            {
                "$ref": "#/$defs/a",
                "$defs": {"a": {"items": {"$ref": "#/$defs/b"}}, "b": {"not": {}}},
            },
            "#/$defs/b:",
            "not",
        ),
        (
            {
                "type": "object",
                "properties": {
                    "fine": {"enum": []},
                    "bad": {"type": "array", "items": {"enum": []}, "minItems": 1},
                },
                "required": ["bad"],
            },
            "#/properties/bad/items:",
            "empty",
        ),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "#:", "oneOf"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "#:", "incompatible"),
    ],
)
def test_a_schema_is_refused_with_its_place(schema: Any, where: str, what: str) -> None:
    message = refusal("json_schema", json.dumps(schema)).message
    assert message.startswith(f"response_format: the schema is not supported at {where}")
    assert what in message


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
        {
            "$ref": "#/$defs/a",
            "$defs": {
                "a": {
                    "type": "object",
                    "properties": {"b": {"$ref": "#/$defs/b"}},
                    "required": ["b"],
                },
                "b": {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 1},
            },
        },
        {"anyOf": [{"$ref": "#"}, {"allOf": [{"$ref": "#"}]}]},
    ],
)
def test_a_value_that_would_contain_itself_is_impossible(schema: Any) -> None:
    assert is_endless(schema)
    assert "contain itself" in refusal("json_schema", json.dumps(schema)).message


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "required": [["a"], 1, None], "properties": {"a": {}}},
        {"$ref": "#/anyOf/\u00b2", "anyOf": [{}]},
        {"$ref": "#/anyOf/" + "9" * 5000, "anyOf": [{}]},
    ],
)
def test_odd_schemas_are_assumed_to_have_values(schema: dict[str, Any]) -> None:
    assert not is_endless(schema)


def test_the_fault_of_a_schema_that_is_no_object_is_its_own() -> None:
    assert locate([1], "not a schema", lambda schema: "not a schema") == ("", "not a schema")


@pytest.mark.parametrize(
    ("kind", "text", "what"),
    [
        ("regex", "a(", "unclosed group"),
        ("regex", "(?<=x)y", "look-around"),
        ("regex", "(" * 3000 + ")" * 3000, "nest"),
        ("lark", "start: missing", "missing"),
        ("lark", 'begin: "a"', "start"),
        ("lark", "start: <no_such_token>", "no_such_token"),
        ("lark", "start: " + "(" * 5000, "nested"),
        ("lark", "start: A\nA: /x/ & /y/", ""),
        ("lark", "start: a\na: b\nb: a", ""),
    ],
)
def test_a_broken_regex_or_lark_grammar_is_refused(kind: str, text: str, what: str) -> None:
    assert what in refusal(kind, text).message


def test_a_part_is_blamed_by_its_own_parameter() -> None:
    parts = (
        ("fine", Grammar("json_schema", '{"type": "null"}', "tools[0]")),
        ("bad", Grammar("json_schema", json.dumps(DEEP), "tools[1]")),
    )
    with pytest.raises(InvalidValue) as caught:
        compiler().compile(Grammar("lark", "start: @fine | @bad", "tool_choice", parts))
    assert caught.value.param == "tools[1]"
    assert "#/properties/a/items" in caught.value.message


def test_a_huge_grammar_is_refused() -> None:
    text = json.dumps({"enum": ["x" * 1000] * 5000})
    assert "too large" in refusal("json_schema", text).message


def test_a_model_without_an_end_token_cannot_be_constrained() -> None:
    class Endless:
        eos: frozenset[int] = frozenset()

    with pytest.raises(BadRequest, match="no end token"):
        Compiler(Endless(), vocab_size=10).compile(Grammar("json_object"))  # type: ignore[arg-type]


def test_a_search_for_the_fault_is_bounded() -> None:
    wide = {"anyOf": [{"type": "null"}] * 5000}
    n_checks = 0

    def fault_of(schema: Any) -> str:
        nonlocal n_checks
        n_checks += 1
        return ""

    assert locate(wide, "hm", fault_of) == ("", "hm")
    assert n_checks <= 400


def test_a_search_for_the_fault_has_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part is checked with all definitions: a large schema would take minutes."""
    schema = json.dumps({"type": "object", "properties": {"a": {"not": {}}}})
    assert " at #/properties/a: " in refusal("json_schema", schema).message
    monkeypatch.setattr(grammars, "LOCATE_S", 0.0)
    assert " at #: " in refusal("json_schema", schema).message


# --- kept ----------------------------------------------------------------------------------


def test_the_same_grammar_is_compiled_once() -> None:
    first = compiled("json_schema", '{"type": "boolean"}')
    assert compiled("json_schema", '{"type": "boolean"}') is first
    assert compiled("json_schema", '{"type": "null"}') is not first


def test_the_least_recently_used_grammar_is_dropped() -> None:
    made = Compiler(zoo_tokenizer(), vocab_size=N_VOCAB)
    first = made.compile(Grammar("regex", "x"))
    second = made.compile(Grammar("regex", "y"))
    for i in range(grammars.MAX_KEPT - 1):
        made.compile(Grammar("regex", f"a{i}"))
        made.compile(Grammar("regex", "x"))
    assert made.compile(Grammar("regex", "x")) is first
    assert made.compile(Grammar("regex", "y")) is not second


def test_many_threads_can_compile_at_once() -> None:
    made = Compiler(zoo_tokenizer(), vocab_size=N_VOCAB)
    with ThreadPoolExecutor(8) as pool:
        made_by_all = list(
            pool.map(lambda i: made.compile(Grammar("regex", f"a{i % 5}")), range(60))
        )
    assert all(f.start().fault is None for f in made_by_all)


def test_what_two_threads_have_compiled_counts_once() -> None:
    kept = grammars._RecentlyUsed[str](max_entries=8, max_chars=100)
    kept.put(("", "first"), "one", n_chars=40)
    for _ in range(3):
        kept.put(("", "second"), "two", n_chars=40)
    assert kept.get(("", "first")) == "one"


def test_each_start_is_a_constraint_of_its_own() -> None:
    grammar = compiled("choice", '["ab", "cd"]')
    first, second = grammar.start(), grammar.start()
    first.take(zoo_tokenizer().encode("ab", add_special=False))
    second.take(zoo_tokenizer().encode("cd", add_special=False))
    assert first.fault is second.fault is None
    assert grammar.start().fault is None


# --- tokenizers ----------------------------------------------------------------------------


def hf(path: Path, made: trained.TrainedTokenizer) -> HfTokenizer:
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (path / "tokenizer.json").write_text(made._tokenizer.to_str())
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return load_tokenizer(path)


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "where is it": {"enum": ["in the house", "été 雪", "<think>"]},
        "size": {"type": "integer", "minimum": -50, "maximum": 5000},
    },
    "required": ["name", "where is it", "size"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "make",
    [
        trained.byte_level,
        lambda: trained.fallback(strips=True),
        lambda: trained.fallback(strips=False),
    ],
    ids=["byte-level", "byte fallback", "byte fallback behind marked spaces"],
)
def test_grammars_hold_with_every_kind_of_tokenizer(
    make: Callable[[], trained.TrainedTokenizer], tmp_path: Path
) -> None:
    """The text that a reader sees, by the tokenizer port's own bytes, satisfies the grammar."""
    tokenizer = hf(tmp_path, make())
    made = Compiler(tokenizer, vocab_size=tokenizer.n_ids + 40)
    schema = made.compile(Grammar("json_schema", json.dumps(SCHEMA)))
    regex = made.compile(Grammar("regex", " ?[a-z ]{3,9}(雪|é|🙂)"))
    for seed in range(12):
        walk = wander(schema.start(), tokenizer.eos, seed=seed, n_most=400)
        assert walk is not None
        text = b"".join(map(tokenizer.token_bytes, walk)).decode()
        jsonschema.validate(json.loads(text), SCHEMA)
        assert not tokenizer.added & set(walk)
        walk = wander(regex.start(), tokenizer.eos, seed=seed, n_most=400)
        assert walk is not None
        text = b"".join(map(tokenizer.token_bytes, walk)).decode()
        assert re.fullmatch(" ?[a-z ]{3,9}(雪|é|🙂)", text)


def test_any_of_several_end_tokens_ends_a_reply() -> None:
    class TwoEnds(HfTokenizer):
        eos = frozenset({0, 2})  # type: ignore[assignment]

    two = TwoEnds(zoo_tokenizer()._wrapper)
    start = Compiler(two, vocab_size=N_VOCAB).compile(Grammar("choice", '["a"]')).start()
    start.take(two.encode("a", add_special=False))
    assert wander(start, two.eos, seed=0, n_most=1) == []
    start.take([0])
    start.take([0, 2, 5])
    assert start.fault is None


def test_a_grammar_is_kept_for_its_owner() -> None:
    """The time it takes to compile tells nobody what others have sent."""
    made = Compiler(zoo_tokenizer(), vocab_size=N_VOCAB)
    grammar = Grammar("regex", "[a-z]+")
    mine = made.compile(grammar, "alice")
    assert made.compile(grammar, "alice") is mine
    assert made.compile(grammar, "bob") is not mine


def test_kept_grammars_are_bounded_in_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "MAX_KEPT_CHARS", 100)
    made = Compiler(zoo_tokenizer(), vocab_size=N_VOCAB)
    small = made.compile(Grammar("regex", "a"))
    long = [Grammar("regex", "b" * 40 + str(i)) for i in range(9)]
    for grammar in long:
        made.compile(grammar)
    assert made.compile(Grammar("regex", "a")) is not small
    kept = made._compiled
    assert kept._n_chars == sum(len(g.text) for _, g in kept._entries) <= 100


# --- schemas of tools, as far as they can be enforced ----------------------------------------

LOOK_AHEAD = {"type": "string", "pattern": "^(?!x).*$"}


def loose(n: int) -> dict[str, Any]:
    """A schema with `n` patterns that cannot be enforced."""
    return {"type": "object", "properties": {f"p{i}": LOOK_AHEAD for i in range(n)}}


def test_a_softened_schema_is_kept_for_its_owner() -> None:
    made = Compiler(zoo_tokenizer(), vocab_size=N_VOCAB)
    mine = made.soften(loose(1), "alice")
    assert mine.left_out == ("#/properties/p0/pattern",)
    assert made.soften(loose(1), "alice") is mine
    assert made.soften(loose(1), "bob") is not mine


def test_softened_schemas_are_bounded_in_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "MAX_SOFTENED_CHARS", 1000)
    made = Compiler(zoo_tokenizer(), vocab_size=N_VOCAB)
    first = made.soften({"description": "0"})
    for i in range(9):
        made.soften({"description": f"{i}" * 300})
    assert made.soften({"description": "0"}) is not first
    kept = made._softened
    assert kept._n_chars == sum(len(text) for _, text in kept._entries) <= 1000


def test_nothing_of_a_huge_schema_is_enforced() -> None:
    made = Compiler(zoo_tokenizer(), vocab_size=N_VOCAB)
    huge = {"type": "object", "description": "x" * grammars.MAX_SCHEMA_CHARS}
    assert made.soften(huge) == SoftenedSchema({"type": "object"}, ("#",))
    assert not made._softened._entries


def test_each_tool_has_the_time_that_those_before_it_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now, given = 0.0, list[float]()
    made = Compiler(zoo_tokenizer(), vocab_size=N_VOCAB)

    def soften(schema: Any, owner: str, *, time_s: float) -> SoftenedSchema:
        nonlocal now
        now += 0.5
        given.append(time_s)
        return SoftenedSchema(schema, ())

    monkeypatch.setattr(made, "soften", soften)
    monkeypatch.setattr(grammars.time, "thread_time", lambda: now)
    soften_next = made.softener("alice")
    for _ in range(3):
        soften_next({})
    assert given == [grammars.SOFTEN_S, grammars.SOFTEN_S - 0.5, grammars.SOFTEN_S - 1.0]


def test_the_tools_of_a_request_share_one_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """To find what cannot be enforced, the compiler is called hundreds of times."""
    monkeypatch.setattr(grammars, "SOFTEN_S", 0.05)
    made = Compiler(zoo_tokenizer(), vocab_size=N_VOCAB)
    soften = made.softener("alice")
    softened = [soften(loose(60) | {"description": str(i)}) for i in range(200)]
    assert softened[-1] == SoftenedSchema({"type": "object"}, ("#",))
    # The next request has a time limit of its own.
    assert made.softener("alice")(loose(1)).left_out == ("#/properties/p0/pattern",)
