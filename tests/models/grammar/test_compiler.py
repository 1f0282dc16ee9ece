"""From a grammar to a constraint: what is refused and where, what is kept, every kind of tokenizer."""

from __future__ import annotations

import gc
import json
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from firn.core.errors import BadRequest, GrammarFailed, InvalidValue
from firn.core.values import Grammar, RelaxedSchema
from firn.models.grammar import compiler as grammars
from firn.models.grammar import trial_process
from firn.models.grammar.compiler import Compiler, Constraint
from firn.models.grammar.relax_schema import relax
from firn.models.grammar.schema_faults import is_endless, locate
from firn.models.load.loader import load_tokenizer
from firn.models.tokenizer.hf_tokenizer import HfTokenizer
from tests import zoo
from tests.models.grammar.grammar_lab import N_VOCAB, compiled, compiler, wander
from tests.models.grammar.grammar_lab import tokenizer as zoo_tokenizer
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


# --- kept ----------------------------------------------------------------------------------


def test_the_same_grammar_is_compiled_once() -> None:
    first = compiled("json_schema", '{"type": "boolean"}')
    assert compiled("json_schema", '{"type": "boolean"}') is first
    assert compiled("json_schema", '{"type": "null"}') is not first


@dataclass
class Weight:
    nbytes: int


def test_room_is_made_by_the_owner_who_fills_the_most() -> None:
    kept = grammars._Kept[Weight](max_nbytes=100)
    for i, nbytes in enumerate((20, 30, 20)):
        kept.put("alice", str(i), Weight(nbytes))
    assert kept.get("alice", "0")
    kept.put("bob", "0", Weight(40))
    assert kept.get("alice", "1") is None, "the least recently used of alice"
    assert all([kept.get("alice", "0"), kept.get("alice", "2"), kept.get("bob", "0")])
    kept.put("bob", "1", Weight(30))
    assert kept.get("bob", "0") is None
    assert all([kept.get("alice", "0"), kept.get("alice", "2"), kept.get("bob", "1")])
    kept.put("carol", "0", Weight(101))
    assert kept.get("carol", "0") is None, "larger than all there is"


def test_what_has_grown_makes_room() -> None:
    kept = grammars._Kept[Weight](max_nbytes=100)
    grows = Weight(10)
    kept.put("alice", "grows", grows)
    kept.put("bob", "0", Weight(10))
    grows.nbytes = 95
    kept.put("bob", "1", Weight(10))
    assert kept.get("alice", "grows") is None
    assert all([kept.get("bob", "0"), kept.get("bob", "1")])


def test_a_grammar_that_has_written_much_is_compiled_anew() -> None:
    """Its lexer has grown; how much, nothing tells."""
    made = Compiler(zoo_tokenizer(), vocab_size=N_VOCAB)
    grammar = Grammar("regex", "[ab]*")
    first = made.compile(grammar)
    begun = first.start()
    (a,) = zoo_tokenizer().encode("a", add_special=False)
    begun.take([a] * (grammars.MAX_KEPT_NBYTES // grammars.TOKEN_NBYTES))
    assert made.compile(grammar) is first
    made.compile(Grammar("regex", "another"))
    assert made.compile(grammar) is not first
    assert begun.fault is None


def test_many_threads_can_compile_at_once() -> None:
    made = Compiler(zoo_tokenizer(), vocab_size=N_VOCAB)
    with ThreadPoolExecutor(8) as pool:
        made_by_all = list(
            pool.map(lambda i: made.compile(Grammar("regex", f"a{i % 5}")), range(60))
        )
    assert all(f.start().fault is None for f in made_by_all)


def test_what_two_threads_have_compiled_counts_once() -> None:
    kept = grammars._Kept[Weight](max_nbytes=100)
    kept.put("", "first", Weight(40))
    for _ in range(3):
        kept.put("", "second", Weight(40))
    assert kept.get("", "first")


def test_each_start_is_a_constraint_of_its_own() -> None:
    grammar = compiled("choice", '["ab", "cd"]')
    first, second = grammar.start(), grammar.start()
    first.take(zoo_tokenizer().encode("ab", add_special=False))
    second.take(zoo_tokenizer().encode("cd", add_special=False))
    assert first.fault is second.fault is None
    assert grammar.start().fault is None


def test_a_grammar_that_failed_once_is_compiled_again() -> None:
    """All constraints of a compiled grammar share a lexer, which stays failed."""
    made = Compiler(zoo_tokenizer(), vocab_size=N_VOCAB)
    words = ["<a_call>", "<b_a_call>", "<a_calls>", "<ACALL>", "<BEGIN_ACTION>", "<a_begin><a_in>"]
    without = " & ".join(f"~/(?s:.*){word}(?s:.*)/" for word in [*words, "<a_call>\\n"])
    lark = f'start[lazy]: T\nT: TEXT "<a_call>\\n"\nTEXT: /(?s:.*)/ & {without}'
    costly = Grammar("lark", lark, "tools")

    def go_on(text: str) -> Constraint:
        begun = made.compile(costly).start()
        for token in zoo_tokenizer().encode(text, add_special=False):
            begun.take([token])
            begun.matcher.compute_bitmask()
        begun.check()
        return begun

    assert go_on("abc").fault is None
    failed = go_on("abc <a_call>").fault
    assert isinstance(failed, GrammarFailed)
    assert (failed.status, failed.param) == (400, "tools")
    assert "too many expressions" in failed.message
    assert go_on("abc").fault is None


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


def test_a_grammar_counts_by_the_memory_that_it_takes() -> None:
    """The length of its text does not tell."""
    made = Compiler(zoo_tokenizer(), vocab_size=N_VOCAB)
    optional = made.compile(Grammar("regex", "a?" * 1000))
    plain = made.compile(Grammar("regex", "b" * 2000))
    assert optional.nbytes > plain.nbytes + 2**20


# --- schemas, as far as they can be enforced -------------------------------------------------

LOOK_AHEAD = {"type": "string", "pattern": "^(?!x).*$"}
NOT_ENFORCED = RelaxedSchema({"type": "object"}, ("#",))


def loose(n: int) -> dict[str, Any]:
    """A schema with `n` patterns that cannot be enforced."""
    return {"type": "object", "properties": {f"p{i}": LOOK_AHEAD for i in range(n)}}


def test_a_relaxed_schema_is_kept_for_its_owner() -> None:
    made = Compiler(zoo_tokenizer(), vocab_size=N_VOCAB)
    [mine] = made.relax([loose(1)], "alice")
    assert mine.left_out == ("#/properties/p0/pattern",)
    assert made.relax([loose(1)], "alice")[0] is mine
    assert made.relax([loose(1)], "bob")[0] is not mine


def test_nothing_of_a_huge_schema_is_enforced() -> None:
    made = Compiler(zoo_tokenizer(), vocab_size=N_VOCAB)
    huge = {"type": "object", "description": "x" * grammars.MAX_SCHEMA_CHARS}
    assert made.relax([huge, loose(1)]) == [NOT_ENFORCED, *made.relax([loose(1)])]


def test_a_schema_that_ends_the_trial_costs_the_enforcement_of_its_request() -> None:
    made = Compiler(zoo_tokenizer(), vocab_size=N_VOCAB)
    costly = {"type": "object", "patternProperties": {f"^a{i}$": {} for i in range(5000)}}
    assert made.relax([costly, loose(1)]) == [NOT_ENFORCED, NOT_ENFORCED]
    assert made.relax([loose(1)])[0].left_out == ("#/properties/p0/pattern",)


def test_relaxing_has_a_time_limit() -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 1.0
        return now

    different = {f"p{i}": LOOK_AHEAD | {"maxLength": i} for i in range(60)}
    schema = {"type": "object", "properties": different}
    assert relax(schema, until=10.0, clock=clock) == ({"type": "object"}, ["#"], [])


# --- a process that tries them first ---------------------------------------------------------


def test_a_trial_process_that_was_killed_is_started_again() -> None:
    made = Compiler(zoo_tokenizer(), vocab_size=N_VOCAB)
    killed = set[int]()
    for i in range(3):
        made.compile(Grammar("regex", f"{i}"))
        process = made._built().trial.process
        assert process is not None
        assert process.pid not in killed
        killed.add(process.pid)
        process.kill()
        process.wait()


def test_a_trial_process_ends_with_its_compiler() -> None:
    made = Compiler(zoo_tokenizer(), vocab_size=N_VOCAB)
    made.prepare()
    process = made._built().trial.process
    assert process is not None
    assert process.poll() is None
    del made
    gc.collect()
    assert process.wait(10) == 0


@pytest.mark.parametrize("stranger", [10**6, N_VOCAB + 3, -1])
@pytest.mark.parametrize("has_definition", [True, False])
def test_an_end_token_that_the_vocabulary_lacks_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stranger: int, has_definition: bool
) -> None:
    """As generation_config.json of some models names one."""
    zoo.write_folder("llama", tmp_path)
    (own,) = zoo_tokenizer().eos
    config = {"eos_token_id": [own, stranger]}
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    if not has_definition:
        monkeypatch.setattr(HfTokenizer, "definition", None)
    made = load_tokenizer(tmp_path)
    assert own in made.eos
    constraint = Compiler(made, vocab_size=N_VOCAB).compile(Grammar("regex", "[a-z]{3}")).start()
    said = wander(constraint, made.eos, seed=1, n_most=20)
    assert said is not None
    assert re.fullmatch("[a-z]{3}", made.decode(said))
    assert [made.decode([t]) for t in made.eos]


def test_a_grammar_that_takes_long_lets_streams_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its trial is another process, which would take half of two processors from the engine."""
    lowered: list[int] = []
    real = os.setpriority

    def lower(which: int, pid: int, priority: int) -> None:
        lowered.append(pid)
        real(which, pid, priority)

    monkeypatch.setattr(trial_process.os, "setpriority", lower)
    monkeypatch.setattr(trial_process, "PROMPT_S", 60.0)
    source = Grammar("regex", "[a-c]{2,9}x")
    assert compiler().compile(source).start().fault is None
    assert lowered == [], "an ordinary one is tried at once"
    monkeypatch.setattr(trial_process, "PROMPT_S", 1e-6)
    for n in range(400, 410):  # one may be tried before this thread runs again
        slow = Grammar("regex", f"(a|b|c|d){{1,{n}}}[e-g]{{1,{n}}}x")
        assert compiler().compile(slow).start().fault is None
        if lowered:
            break
    assert lowered
    assert os.getpid() not in lowered
