"""Schemas for templates that fail on any but the plainest."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firn.core.errors import TemplateFailed, TemplateTooSlow
from firn.core.values import Chat, Message, Reasoning, TextPart, Tool
from firn.text.prompt.maker import PromptMaker
from firn.text.prompt.tool_prompt import with_plain_schema
from tests import families

MACRO = """
{%- macro type_of(s) -%}
    {%- if s.type is undefined -%}{{ raise_exception('a schema without a type') }}
    {%- elif s.type in ['string', 'number', 'integer', 'boolean'] -%}{{ s.type ~ s.description.strip() }}
    {%- elif s.type == 'array' -%}{{ 'list of ' + type_of(s['items']) }}
    {%- elif s.type == 'object' -%}
        {%- for name, inner in s.properties.items() -%}{{ name + '=' + type_of(inner) }};{%- endfor -%}
    {%- else -%}{%- for t in s.type -%}{{ type_of({'type': t}) }}{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- for tool in tools or [] -%}
    {{ tool.function.name }}({{ type_of(tool.function.parameters) }})
{%- endfor -%}
{%- for m in messages -%}<|im_start|>{{ m.role }}
{{ m.content }}{%- if m.content == 'refuse' -%}{{ raise_exception('refused') }}{%- endif -%}
{%- for c in m.tool_calls or [] -%}{{ c.function | tojson }}{%- endfor -%}<|im_end|>{%- endfor -%}
"""


def prompt_text(tools: tuple[Tool, ...], said: str = "Hi", source: str = MACRO) -> str:
    tokenizer = families.with_template("qwen3", source)
    made = PromptMaker(tokenizer, context_length=1 << 16, tool_format="json_tags")
    chat = Chat((Message("user", (TextPart(said),)),), tools=tools)
    return tokenizer.decode(made.make(chat).ids.tolist())


SCHEMAS: dict[str, tuple[dict[str, Any], str]] = {
    "no properties": ({"type": "object"}, ""),
    "a list of types": ({"properties": {"a": {"type": ["null", "integer"]}}}, "a=integer;"),
    "null": ({"properties": {"a": {"type": "null"}}}, "a=string;"),
    "no type": ({"properties": {"a": {"description": "any"}}}, "a=stringany;"),
    "anything": ({"properties": {"a": True}}, "a=string;"),
    "values": ({"properties": {"a": {"enum": [2, 3]}, "b": {"const": True}}}, "a=integer;b=boolean;"),
    "branches": (
        {"properties": {"a": {"anyOf": [{"type": "null"}, {"type": "number"}]}}},
        "a=number;",
    ),
    "nested": (
        {"properties": {"a": {"type": "array", "items": [{"properties": {"b": {}}}]}}},
        "a=list of b=string;;",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SCHEMAS)
def test_tools_that_a_template_cannot_read_are_given_in_plain_schemas(case: str) -> None:
    schema, shown = SCHEMAS[case]
    tool = Tool("look", "Looks.", {"type": "object", **schema})
    assert prompt_text((tool,)).startswith(f"look({shown})")


def test_what_a_template_reads_is_not_changed() -> None:
    source = "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}"
    text = prompt_text((Tool("look", "Looks.", {"type": ["object", "null"]}),), source=source)
    assert '"parameters": {"type": ["object", "null"]}' in text


def test_what_fails_for_another_reason_says_that_reason() -> None:
    with pytest.raises(TemplateFailed, match="refused"):
        prompt_text((Tool("look", "Looks.", {"type": "object", "properties": {}}),), "refuse")


def test_a_template_that_takes_too_long_is_not_tried_again() -> None:
    tries = []

    class Slow:
        def __getattr__(self, name: str) -> Any:
            return getattr(families.tokenizer("qwen3"), name)

        def render(self, messages: Any, *, tools: Any, kwargs: Any) -> str:
            if messages[-1]["content"] == "slow":
                tries.append(tools)
                raise TemplateTooSlow("rendering takes too long")
            return families.tokenizer("qwen3").render(messages, tools=tools, kwargs=kwargs)

    slow: Any = Slow()
    made = PromptMaker(slow, context_length=4096, tool_format="json_tags")
    chat = Chat((Message("user", (TextPart("slow"),)),), tools=(Tool("look"),))
    with pytest.raises(TemplateTooSlow):
        made.make(chat)
    assert len(tries) == 1


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "properties", "items", "anyOf", "enum", "const", "a"])
            | st.text(max_size=3),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(schema=st.dictionaries(st.sampled_from(["type", "properties", "items", "a"]), json_values))
def test_any_schema_becomes_plain(schema: dict[str, Any]) -> None:
    def check(plain: Any, *, is_root: bool = False) -> None:
        assert plain["type"] in ("string", "number", "integer", "boolean", "array", "object")
        assert isinstance(plain["description"], str)
        if plain["type"] == "object":
            for inner in plain["properties"].values():
                check(inner)
        if plain["type"] == "array":
            check(plain["items"])

    check(with_plain_schema(Tool("look", "", schema)).parameters)


# --- how hard to think ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("takes", "given", "sent"),
    [
        (("low", "medium", "xhigh"), "high", "xhigh"),
        (("low", "medium", "xhigh"), "max", "xhigh"),
        (("low", "medium", "xhigh"), "minimal", "low"),
        (("low", "medium", "xhigh"), "medium", "medium"),
        (("low", "high"), "medium", "high"),
        (("low", "high"), "xhigh", "high"),
    ],
)
def test_an_effort_that_a_template_refuses_becomes_the_nearest(
    takes: tuple[str, ...], given: str, sent: str
) -> None:
    source = (
        f"{{% if reasoning_effort is defined and reasoning_effort not in {takes!r} %}}"
        "{{ raise_exception('no such effort') }}{% endif %}{{ reasoning_effort }}"
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    tokenizer = families.with_template("qwen3", source)
    made = PromptMaker(tokenizer, context_length=4096)
    chat = Chat((Message("user", (TextPart("Hi"),)),))
    ids = made.make(chat, reasoning=Reasoning(effort=given)).ids.tolist()
    assert tokenizer.decode(ids) == f"{sent}Hi"


def test_an_effort_among_template_variables_is_the_callers_own_affair() -> None:
    source = "{% if reasoning_effort == 'high' %}{{ raise_exception('no') }}{% endif %}"
    source += "{% for m in messages %}{{ m.content }}{% endfor %}"
    made = PromptMaker(families.with_template("qwen3", source), context_length=4096)
    chat = Chat((Message("user", (TextPart("Hi"),)),), template_kwargs={"reasoning_effort": "high"})
    with pytest.raises(TemplateFailed):
        made.make(chat)
