"""Tools on a whole server, with the real clients: a random model, constrained by grammars."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jsonschema
import openai
import pytest

from firn.config import CacheConfig, Config, ModelConfig
from firn.text.calls.parsers import formats
from tests.api.real import Real, serving, write_family, write_model

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:\n"
)
HI: Any = [{"role": "user", "content": "Where am I? " * 12}]
PLACE = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 6}},
         "required": ["city"], "additionalProperties": False}  # fmt: skip
NAMES = ("look", "ask", "leave")


def function(name: str, parameters: Any = PLACE, **more: Any) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


QUIET = {"enable_thinking": False}
TOOLS = [function(name) for name in NAMES]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    path = tmp_path_factory.mktemp("hermes")
    example = formats()["json_tags"].example
    write_model(path, format="json_tags", template=f"{TEMPLATE}{{# {example} #}}")
    cache = CacheConfig(no_ssd_cache=True, cache_block_tokens=16)
    config = Config(model=ModelConfig(path=str(path)), cache=cache)
    with serving(path, config=config) as running:
        yield running


def bias(live: Real, *texts: str, by: float = 4) -> dict[str, float]:
    """A bias towards tokens that end strings, objects and replies, and towards these texts."""
    ids = [live.tokenizer.token_id(text) for text in ('"', "}", *texts)]
    return {str(t): by for t in (*ids, *live.tokenizer.eos) if t is not None}


def chat(live: Real, **options: Any) -> Any:
    ask = {"model": "", "messages": HI, "max_tokens": 300, "seed": 3, "logit_bias": bias(live)}
    ask["extra_body"] = QUIET
    return live.openai().chat.completions.create(**(ask | options))


def calls(reply: Any) -> list[tuple[str, Any]]:
    tool_calls = reply.choices[0].message.tool_calls or []
    return [(call.function.name, json.loads(call.function.arguments)) for call in tool_calls]


# --- which may be called -------------------------------------------------------------------


def test_tool_choice_none_keeps_the_prompt_and_forbids_calls(live: Real) -> None:
    """An agent's last step: since the tools stay in the prompt, all of it is cached."""
    pushed = bias(live, "<tool_call>", by=60)
    (seen,) = calls(
        chat(live, tools=TOOLS, parallel_tool_calls=False, tool_choice="required", max_tokens=300)
    )
    assert seen[0] in NAMES
    reply = chat(live, tools=TOOLS, tool_choice="none", logit_bias=pushed, max_tokens=24)
    assert calls(reply) == []
    assert "<tool_call>" not in (reply.choices[0].message.content or "")
    usage = reply.usage
    assert usage.prompt_tokens_details.cached_tokens >= usage.prompt_tokens - 1
    client = live.anthropic()
    ask: Any = {"model": "", "messages": HI, "max_tokens": 8}
    ask["tools"] = [{"name": name, "input_schema": PLACE} for name in NAMES]
    n_read = 0
    for choice in ("auto", "none"):
        message = client.messages.create(**ask, tool_choice={"type": choice})
        n_read = message.usage.cache_read_input_tokens or 0
    assert n_read >= message.usage.input_tokens + n_read - 1
    items: Any = {"model": "", "input": HI, "max_output_tokens": 16}
    items["tools"] = [{"type": "function", "name": n, "parameters": PLACE} for n in NAMES]
    for choice in ("auto", "none"):
        made = live.openai().responses.create(**items, tool_choice=choice)
        assert made.usage is not None
        n_read = made.usage.input_tokens_details.cached_tokens
    assert n_read >= made.usage.input_tokens - 1
    assert all(item.type != "function_call" for item in made.output)


@pytest.mark.parametrize("seed", range(3))
def test_only_allowed_tools_are_called(live: Real, seed: int) -> None:
    some = [{"type": "function", "function": {"name": "leave"}}]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": some}}
    called = calls(chat(live, tools=TOOLS, tool_choice=choice, seed=seed))
    assert {name for name, _ in called} == {"leave"}
    flat: Any = [{"type": "function", "name": n, "parameters": PLACE} for n in NAMES]
    made = live.openai().responses.create(
        model="", input=HI, tools=flat, max_output_tokens=300,
        extra_body={"seed": seed, "logit_bias": bias(live), **QUIET},
        tool_choice={"type": "allowed_tools", "mode": "required",
                     "tools": [{"type": "function", "name": "ask"}]},
    )  # fmt: skip
    assert {item.name for item in made.output if item.type == "function_call"} == {"ask"}


def test_the_older_functions_are_enforced_too(live: Real) -> None:
    old: Any = [tool["function"] for tool in TOOLS]
    reply = chat(live, functions=old, function_call={"name": "look"})
    message = reply.choices[0].message
    assert reply.choices[0].finish_reason == "function_call"
    assert message.function_call.name == "look"
    jsonschema.validate(json.loads(message.function_call.arguments), PLACE)
    assert not message.tool_calls
    history = [*HI, message.model_dump(exclude_none=True),
            {"role": "function", "name": "look", "content": "in Bonn"}]  # fmt: skip
    assert chat(live, functions=old, function_call="none", messages=history, max_tokens=4).choices
    text = name = ""
    for chunk in chat(live, functions=old, function_call={"name": "ask"}, stream=True):
        call = chunk.choices[0].delta.function_call
        name += (call.name if call else "") or ""
        text += (call.arguments if call else "") or ""
    assert name == "ask"
    jsonschema.validate(json.loads(text), PLACE)


# --- schemas that no grammar fully enforces ------------------------------------------------

LOOK_AHEAD = {"type": "object", "required": ["file"], "additionalProperties": False,
              "properties": {"file": {"type": "string", "pattern": "^(?!/)[a-z]+$", "maxLength": 9},
                             "n": {"type": "integer", "minimum": 1, "maximum": 9}}}  # fmt: skip
LOOSE: list[tuple[str, Any]] = [
    ("pattern", LOOK_AHEAD),
    ("not", PLACE | {"not": {"required": ["x"]}}),
    ("contains", PLACE | {"properties": {"city": {"type": "array", "items": {"enum": ["a"]},
                                                   "maxItems": 2, "contains": {"const": "a"}}}}),
    ("dependentRequired", PLACE | {"dependentRequired": {"city": ["land"]}}),
]  # fmt: skip


@pytest.mark.parametrize(("word", "schema"), LOOSE, ids=[word for word, _ in LOOSE])
def test_a_schema_is_enforced_as_far_as_it_goes(live: Real, word: str, schema: Any) -> None:
    client = live.openai()
    answer = client.chat.completions.with_raw_response.create(
        model="", messages=HI, max_tokens=300, seed=5, logit_bias=bias(live),  # type: ignore[arg-type]
        tools=[function("look", schema)], tool_choice="required", parallel_tool_calls=False,
        extra_body=QUIET,
    )  # fmt: skip
    assert word in answer.headers["x-firn-unenforced"]
    assert "tools[0]#" in answer.headers["x-firn-unenforced"]
    ((name, given),) = calls(answer.parse())
    assert name == "look"
    assert set(given) >= set(schema["required"])
    assert set(given) <= set(schema["properties"])
    with pytest.raises(openai.BadRequestError, match=word) as caught:
        chat(live, tools=[function("look", schema, strict=True)], tool_choice="required")
    assert "tools[0]" in str(caught.value)


def test_a_fully_enforced_request_has_no_header(live: Real) -> None:
    answer = live.openai().chat.completions.with_raw_response.create(
        model="", messages=HI, tools=TOOLS, tool_choice="required", max_tokens=4
    )
    assert "x-firn-unenforced" not in answer.headers


# --- free-form tools -----------------------------------------------------------------------

PATCH = 'start: "BEGIN " NAME " END"\nNAME: /[a-c]{1,4}/'
GRAMMARS = [
    ("lark", PATCH, r"BEGIN [a-c]{1,4} END"),
    ("regex", r"[xy]{2}-[0-9]{1,3}", r"[xy]{2}-\d{1,3}"),
]


@pytest.mark.parametrize(("syntax", "definition", "form"), GRAMMARS, ids=["lark", "regex"])
def test_a_custom_tools_grammar_is_enforced(
    live: Real, syntax: str, definition: str, form: str
) -> None:
    grammar = {"syntax": syntax, "definition": definition}
    tool: Any = {"type": "custom", "name": "patch"}
    made = live.openai().responses.create(
        model="", input=HI, max_output_tokens=200, tool_choice="required", extra_body=QUIET,
        parallel_tool_calls=False, tools=[tool | {"format": {"type": "grammar", **grammar}}],
    )  # fmt: skip
    (call,) = [item for item in made.output if item.type == "custom_tool_call"]
    assert call.name == "patch"
    assert re.fullmatch(form, call.input)
    wrapped = {"name": "patch", "format": {"type": "grammar", "grammar": grammar}}
    reply = chat(
        live, tools=[{"type": "custom", "custom": wrapped}], tool_choice="required",
        parallel_tool_calls=False, logit_bias=None,
    )  # fmt: skip
    (asked,) = reply.choices[0].message.tool_calls
    assert asked.type == "custom"
    assert re.fullmatch(form, asked.custom.input)


@pytest.mark.parametrize("n_tokens", [12, 16, 20, 24, 28])
def test_a_custom_input_that_is_cut_off_is_plain_text(live: Real, n_tokens: int) -> None:
    form = {"type": "grammar", "syntax": "regex", "definition": '[a"]{40}'}
    made = live.openai().responses.create(
        model="", input=HI, max_output_tokens=n_tokens, tool_choice="required",
        tools=[{"type": "custom", "name": "patch", "format": form}],  # type: ignore[list-item]
        extra_body=QUIET,
    )  # fmt: skip
    assert made.status == "incomplete"
    for item in made.output:
        if item.type == "custom_tool_call":
            assert set(item.input) <= set('a"')


# --- a template without tools --------------------------------------------------------------


def test_a_model_without_tools_is_told_of_them_in_words(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tmp_path_factory.mktemp("gemma2")
    write_family(path, "gemma2")
    with serving(path) as plain:
        prompt = {"messages": HI, "tools": TOOLS}
        tokenized = plain.openai().post("/tokenize", body=prompt, cast_to=object)
        assert isinstance(tokenized, dict)
        text = plain.tokenizer.decode(tokenized["ids"])
        assert '"look"' in text
        assert "To call a tool" in text
        reply = chat(plain, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
        ((name, given),) = calls(reply)
        assert name in NAMES
        jsonschema.validate(given, PLACE)
        message = reply.choices[0].message.model_dump(exclude_none=True)
        call_id = reply.choices[0].message.tool_calls[0].id
        history = [*HI, message, {"role": "tool", "tool_call_id": call_id, "content": "in Bonn"}]
        assert chat(plain, tools=TOOLS, messages=history, max_tokens=4).choices
        client = plain.anthropic()
        made = client.messages.create(
            model="", max_tokens=300, messages=HI, tool_choice={"type": "any"},
            tools=[{"name": name, "input_schema": PLACE} for name in NAMES],
        )  # type: ignore[call-overload]  # fmt: skip
        assert made.content[0].type in ("tool_use", "text")


def test_the_format_of_tool_call_parser_is_enforced(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tmp_path_factory.mktemp("gemma2")
    write_family(path, "gemma2")
    base = Config(model=ModelConfig(path=str(path)))
    config = replace(base, model=replace(base.model, tool_call_parser="mistral"))
    off = replace(config, cache=CacheConfig(disable_prefix_cache=True))
    with serving(path, config=off) as plain:
        assert plain.server.services.reply_format.tool == "mistral"
        reply = chat(plain, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
        ((name, given),) = calls(reply)
        assert name in NAMES
        jsonschema.validate(given, PLACE)
