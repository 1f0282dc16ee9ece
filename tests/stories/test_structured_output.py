"""Structured output through a real server and the openai client: a random model, valid answers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pydantic
import pytest

from firn.text.calls.parsers import formats
from tests.api.real import Real, serving, write_model
from tests.text.grammar_walks import TOOLS, WEATHER

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}\n{% endif %}assistant:\n"
    "{% if enable_thinking is defined and enable_thinking %}<think>\n{% endif %}"
)
STYLES = (
    "xml_functions",
    "mistral",
    "pythonic",
    "glm",
    "deepseek",
    "python_tag",
    "bare_json",
    "gemma4",
    "harmony",
)
SCHEMAS = {tool.name: tool.parameters for tool in TOOLS}
OFFER: list[Any] = [
    {"type": "function", "function": {"name": t.name, "parameters": dict(t.parameters)}}
    for t in TOOLS
]
POINT = {
    "type": "object",
    "properties": {
        "x": {"type": "integer", "minimum": 0, "maximum": 99},
        "label": {"type": "string", "maxLength": 8},
    },
    "required": ["x", "label"],
    "additionalProperties": False,
}


def as_format(schema: Any) -> Any:
    return {
        "type": "json_schema",
        "json_schema": {"name": "answer", "strict": True, "schema": schema},
    }


def ask(live: Real, *, seed: int = 1, raw: bool = False, likely: str = "", **options: Any) -> Any:
    """Ask with a bias towards what ends strings, lists, objects, thoughts and the reply. raw: return
    the response with its headers. likely: a token with a greater bias."""
    ids = [live.tokenizer.token_id(c) for c in ('"', "]", "}", "<|end|>")]
    bias = {str(t): 4 for t in (*ids, *live.tokenizer.eos) if t is not None}
    bias |= {str(live.tokenizer.token_id(likely)): 12} if likely else {}
    completions = live.openai().chat.completions
    create: Any = completions.with_raw_response.create if raw else completions.create
    asked = {"model": "", "messages": [{"role": "user", "content": "Where am I?"}]}
    return create(**{**asked, "max_tokens": 500, "seed": seed, "logit_bias": bias, **options})


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    path = tmp_path_factory.mktemp("hermes")
    example = formats()["json_tags"].example
    write_model(path, format="json_tags", template=f"{TEMPLATE}{{# {example} </think> #}}")
    with serving(path) as running:
        yield running


def content(reply: Any) -> Any:
    (choice,) = reply.choices
    assert choice.finish_reason == "stop"
    return json.loads(choice.message.content)


QUIET: dict[str, Any] = {"extra_body": {"enable_thinking": False}}


# --- answers -------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_reply_follows_its_schema(live: Real, seed: int) -> None:
    value = content(ask(live, response_format=as_format(POINT), seed=seed, **QUIET))
    jsonschema.validate(value, POINT)


def test_a_stream_follows_its_schema(live: Real) -> None:
    whole = content(ask(live, response_format=as_format(POINT), **QUIET))
    stream = ask(live, response_format=as_format(POINT), stream=True, **QUIET)
    text, reason, n_pieces = "", None, 0
    for chunk in stream:
        (choice,) = chunk.choices
        text += choice.delta.content or ""
        n_pieces += bool(choice.delta.content)
        reason = choice.finish_reason or reason
    assert reason == "stop"
    assert n_pieces > 5
    assert json.loads(text) == whole


def test_the_clients_pydantic_models_are_followed(live: Real) -> None:
    class Step(pydantic.BaseModel):
        n: int = pydantic.Field(ge=0, le=9)
        done: bool

    class Plan(pydantic.BaseModel):
        steps: list[Step] = pydantic.Field(min_length=1, max_length=2)
        note: str | None = pydantic.Field(max_length=5)

    reply = live.openai().chat.completions.parse(
        model="",
        messages=[{"role": "user", "content": "Plan."}],
        response_format=Plan,
        max_tokens=500,
        seed=4,
        extra_body={"enable_thinking": False},
    )
    plan = reply.choices[0].message.parsed
    assert plan is not None
    assert 1 <= len(plan.steps) <= 2


def test_every_choice_follows_its_schema(live: Real) -> None:
    reply = ask(live, response_format=as_format(POINT), n=3, **QUIET)
    values = [json.loads(choice.message.content) for choice in reply.choices]
    for value in values:
        jsonschema.validate(value, POINT)
    assert len(values) == 3


def test_choice_regex_and_lark_are_followed_in_chats(live: Real) -> None:
    pick = {"type": "choice", "choices": ["one", "two words"]}
    reply = ask(live, extra_body={"response_format": pick, "enable_thinking": False})
    assert reply.choices[0].message.content in pick["choices"]
    regex = {"type": "regex", "regex": "[a-c]{4}"}
    reply = ask(live, extra_body={"response_format": regex, "enable_thinking": False})
    assert set(reply.choices[0].message.content) <= set("abc")
    lark = {"type": "lark", "grammar": 'start: "<" /[0-9]{2}/ ">"'}
    reply = ask(live, extra_body={"response_format": lark, "enable_thinking": False})
    assert reply.choices[0].message.content[1:3].isdigit()


def test_extensions_are_followed_in_completions_and_responses(live: Real) -> None:
    """A raw completion is constrained from its first token, since it has no thinking."""
    pick = {"type": "choice", "choices": ["one", "two words"]}
    raw = live.openai().completions.create(
        model="", prompt="Which?", max_tokens=50, extra_body={"response_format": pick}
    )
    assert raw.choices[0].text in pick["choices"]
    assert raw.choices[0].finish_reason == "stop"
    form: Any = {"type": "regex", "regex": "[a-c]{4}"}
    quiet = {"enable_thinking": False}
    events: Any = live.openai().responses.create(
        model="",
        input="Which?",
        text={"format": form},
        max_output_tokens=50,
        stream=True,
        extra_body=quiet,
    )
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert re.fullmatch(form["regex"], "".join(deltas))
    broken: Any = {"type": "regex", "regex": "(["}
    with pytest.raises(openai.BadRequestError) as caught:
        live.openai().responses.create(model="", input="Which?", text={"format": broken})
    assert caught.value.param == "text.format"


def test_ignore_eos_does_not_outlast_a_grammar(live: Real) -> None:
    body = {"enable_thinking": False, "ignore_eos": True}
    reply = ask(live, response_format=as_format({"type": "boolean"}), extra_body=body)
    assert content(reply) in (True, False)


def test_the_answer_after_thinking_follows_its_schema(live: Real) -> None:
    """The template opens the tag: thinking is free, the answer is constrained."""
    token = live.tokenizer.token_id("</think>")
    reply = live.openai().chat.completions.create(
        model="",
        messages=[{"role": "user", "content": "Think."}],
        response_format=as_format({"enum": ["a", "b"]}),
        max_tokens=500,
        seed=1,
        logit_bias={str(token): 3},
        extra_body={"enable_thinking": True},
    )
    assert content(reply) in ("a", "b")
    assert reply.choices[0].message.model_dump()["reasoning_content"]


def test_a_thinking_budget_and_a_grammar_go_together(live: Real) -> None:
    reply = ask(
        live,
        response_format=as_format(POINT),
        extra_body={"enable_thinking": True, "thinking_budget": 12},
    )
    jsonschema.validate(content(reply), POINT)


def test_an_answer_cut_off_has_the_reason_length(live: Real) -> None:
    reply = live.openai().chat.completions.create(
        model="",
        messages=[{"role": "user", "content": "Go on."}],
        response_format=as_format({"type": "array", "items": {"const": 1}, "minItems": 9}),
        max_tokens=5,
        extra_body={"enable_thinking": False},
    )
    assert reply.choices[0].finish_reason == "length"
    assert (reply.choices[0].message.content or "").startswith("[")


# --- control tokens and refusals -----------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "texts"),
    [
        ({"type": "choice", "choices": ["<|end_of_reply|>x"]}, r"<\|end_of_reply\|>x"),
        ({"type": "regex", "regex": r"<\|end_of_reply\|>{1,3}"}, r"<\|end_of_reply\|>{1,3}"),
        ({"type": "regex", "regex": r"<[|]end_of_reply[|]>"}, r"<\|end_of_reply\|>"),
        (
            {"type": "lark", "grammar": r"start: /<\|end_of_reply\|>[ab]/"},
            r"<\|end_of_reply\|>[ab]",
        ),
    ],
)
def test_a_control_token_in_a_grammar_is_text(live: Real, form: Any, texts: str) -> None:
    """It is text, even if the model can write nothing else."""
    extra = {"response_format": form, "enable_thinking": False}
    (choice,) = ask(live, extra_body=extra).choices
    assert choice.finish_reason == "stop"
    assert re.fullmatch(texts, choice.message.content)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "object", "properties": {"a": {"not": {}}}}, "#/properties/a"),
        ({"type": "integer", "minimum": 2, "maximum": 1}, "greater than maximum"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused(
    live: Real, schema: Any, words: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(live, response_format=as_format(schema), stream=stream)
    assert caught.value.status_code == 400
    assert caught.value.param == "response_format"
    assert words in caught.value.message


# --- tools ---------------------------------------------------------------------------------


def check_calls(reply: Any, names: set[str], *, at_most: int = 99) -> None:
    (choice,) = reply.choices
    assert choice.finish_reason == "tool_calls"
    assert not choice.message.content
    assert 0 < len(choice.message.tool_calls) <= at_most
    for call in choice.message.tool_calls:
        assert call.function.name in names
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_required_call_is_made(live: Real, seed: int) -> None:
    reply = ask(live, tools=OFFER, tool_choice="required", seed=seed, **QUIET)
    check_calls(reply, set(SCHEMAS))


def test_a_named_call_is_made_in_a_stream(live: Real) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    stream = ask(
        live, tools=OFFER, tool_choice=named, parallel_tool_calls=False, stream=True, **QUIET
    )
    name = arguments = ""
    for chunk in stream:
        for call in chunk.choices[0].delta.tool_calls or ():
            name += call.function.name or ""
            arguments += call.function.arguments or ""
    assert name == "get_weather"
    jsonschema.validate(json.loads(arguments), WEATHER.parameters)


def test_with_auto_the_model_calls_or_answers(live: Real) -> None:
    n_calls = n_answers = 0
    options = {**QUIET, "parallel_tool_calls": False}
    for seed in range(6):
        options["likely"] = "<tool_call>" if seed % 2 else ""
        reply = ask(live, tools=OFFER, response_format=as_format(POINT), seed=seed, **options)
        if reply.choices[0].message.tool_calls:
            check_calls(reply, set(SCHEMAS))
            n_calls += 1
        else:
            jsonschema.validate(content(reply), POINT)
            n_answers += 1
    assert n_calls
    assert n_answers


LOOSE = {
    "type": "object",
    "properties": {
        "where": {"type": "string", "format": "path", "maxLength": 8},
        "tags": {
            "type": "array",
            "items": {"enum": ["a", "b"]},
            "maxItems": 2,
            "uniqueItems": True,
        },
        "word": {"type": "string", "pattern": "^(?!x)[a-z]*$", "maxLength": 4},
    },
    "required": ["where", "tags", "word"],
    "additionalProperties": False,
}


def test_what_no_grammar_can_enforce_is_left_out_and_named(live: Real) -> None:
    form = as_format(LOOSE)
    form["json_schema"]["strict"] = False
    reply = ask(live, response_format=form, raw=True, **QUIET)
    assert reply.headers["x-firn-unenforced"] == (
        "response_format#/properties/tags/uniqueItems, response_format#/properties/word/pattern"
    )
    value = content(reply.parse())
    assert value.keys() == LOOSE["properties"].keys()
    assert set(value["tags"]) <= {"a", "b"}
    assert len(value["word"]) <= 4


def test_a_strict_schema_that_no_grammar_can_enforce_is_refused_by_name(live: Real) -> None:
    with pytest.raises(openai.BadRequestError, match="#/properties/tags/uniqueItems cannot be"):
        ask(live, response_format=as_format(LOOSE), **QUIET)
    only_formats = LOOSE | {"properties": {"where": LOOSE["properties"]["where"]}}
    only_formats["required"] = ["where"]
    reply = ask(live, response_format=as_format(only_formats), raw=True, **QUIET)
    assert "x-firn-unenforced" not in reply.headers, "an unknown format is an annotation"
    assert isinstance(content(reply.parse())["where"], str)


def test_an_impossible_schema_is_refused_although_it_is_not_strict(live: Real) -> None:
    form = as_format({"type": "object", "properties": {"a": {"enum": []}}, "required": ["a"]})
    form["json_schema"]["strict"] = False
    with pytest.raises(openai.BadRequestError, match="empty"):
        ask(live, response_format=form, **QUIET)


def test_a_schema_that_overflows_the_compilers_stack_costs_its_own_request(live: Real) -> None:
    names = [f"name_{i}" for i in range(100_000)]
    with pytest.raises(openai.BadRequestError, match="response_format"):
        ask(live, response_format=as_format({"type": "object", "required": names}), **QUIET)
    jsonschema.validate(content(ask(live, response_format=as_format(POINT), **QUIET)), POINT)


@pytest.mark.parametrize("style", STYLES)
def test_required_calls_are_made_in_every_format(style: str, tmp_path: Path) -> None:
    example = formats()[style].example
    clue = '{"name": ..., "parameters": ...}' if style == "bare_json" else example
    write_model(tmp_path, format=style, template=f"{TEMPLATE}{{# {clue} #}}")
    with serving(tmp_path) as live:
        assert live.server.services.reply_format.tool == style
        options = {**QUIET, "tools": OFFER, "parallel_tool_calls": False}
        reply = ask(live, tool_choice="required", seed=5, **options)
        check_calls(reply, set(SCHEMAS), at_most=1)
        named = {"type": "function", "function": {"name": "ping"}}
        reply = ask(live, tool_choice=named, **options)
        check_calls(reply, {"ping"}, at_most=1)
