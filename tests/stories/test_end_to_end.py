"""The whole server, as `firn serve` builds it, through the real clients of each API.

The built-in model was trained to read facts out of a document: its answers are right or wrong.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from firn.demo.facts import FactSession, make_session
from tests.api.real import Real, serving
from tests.whole_server import GREEDY, config

LOOKUP = {
    "type": "object",
    "properties": {"attribute": {"type": "string"}, "entity": {"type": "string"}},
    "required": ["attribute", "entity"],
}
ASKED = "Look up the birthday of Palralin Zelby."
FOUND = {"attribute": "birthday", "entity": "Palralin Zelby"}


@pytest.fixture(scope="module")
def real() -> Iterator[Real]:
    with serving(Path(), config=config("firn-demo")) as running:
        yield running


@pytest.fixture(scope="module")
def hybrid() -> Iterator[Real]:
    with serving(Path(), config=config("firn-demo-hybrid")) as running:
        yield running


# --- facts, through every API --------------------------------------------------------------

Answer = tuple[str, int, int]
"""The text, the prompt's tokens, and how many of them came from the cache."""


def by_chat(real: Real, messages: list[Any], *, stream: bool) -> Answer:
    create = real.openai().chat.completions.create
    if not stream:
        whole = create(model="", messages=messages, temperature=0, max_tokens=64)
        assert whole.usage is not None
        assert whole.usage.prompt_tokens_details is not None
        cached = whole.usage.prompt_tokens_details.cached_tokens or 0
        return whole.choices[0].message.content or "", whole.usage.prompt_tokens, cached
    text, usage = "", None
    for chunk in create(
        model="",
        messages=messages,
        temperature=0,
        max_tokens=64,
        stream=True,
        stream_options={"include_usage": True},
    ):
        text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        usage = chunk.usage or usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    return text, usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens or 0


def by_messages(real: Real, messages: list[Any], *, stream: bool) -> Answer:
    system, *rest = messages
    body: Any = {
        "model": "claude-opus-5",
        "max_tokens": 64,
        "system": system["content"],
        "messages": rest,
        "extra_body": GREEDY,
    }
    client = real.anthropic()
    n_counted = client.messages.count_tokens(
        model="claude-opus-5", system=system["content"], messages=rest
    ).input_tokens
    if stream:
        with client.messages.stream(**body) as running:
            message: Any = running.get_final_message()
    else:
        message = client.messages.create(**body)
    usage = message.usage
    n_prompt = usage.input_tokens + usage.cache_read_input_tokens
    assert n_prompt + usage.cache_creation_input_tokens == n_counted
    assert message.stop_reason == "end_turn"
    return message.content[0].text, n_prompt, usage.cache_read_input_tokens


def by_responses(real: Real, messages: list[Any], *, stream: bool) -> Answer:
    system, *rest = messages
    body: Any = {
        "model": "",
        "instructions": system["content"],
        "input": rest,
        "temperature": 0,
        "max_output_tokens": 64,
    }
    client = real.openai()
    if stream:
        with client.responses.stream(**body) as running:
            response: Any = running.get_final_response()
    else:
        response = client.responses.create(**body)
    usage = response.usage
    return response.output_text, usage.input_tokens, usage.input_tokens_details.cached_tokens


ROUTES: dict[str, Callable[..., Answer]] = {
    "chat": by_chat,
    "messages": by_messages,
    "responses": by_responses,
}


def session(seed: int) -> FactSession:
    return make_session(seed, n_facts=16, n_questions=3, placement="message", kinds=("fact",))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("route", ROUTES)
def test_answers_are_right_and_later_turns_are_cached(real: Real, route: str, stream: bool) -> None:
    talk = session(seed=10 + 2 * list(ROUTES).index(route) + stream)
    for n, question in enumerate(talk.questions):
        text, n_prompt, n_cached = ROUTES[route](real, talk.messages(n), stream=stream)
        assert text == question.answer
        assert n_cached < n_prompt * 0.2 if n == 0 else n_cached > n_prompt * 0.8


@pytest.mark.parametrize("route", ROUTES)
def test_the_same_on_a_recurrent_model(hybrid: Real, route: str) -> None:
    talk = session(seed=20 + list(ROUTES).index(route))
    for n, question in enumerate(talk.questions[:2]):
        text, n_prompt, n_cached = ROUTES[route](hybrid, talk.messages(n), stream=True)
        assert text == question.answer
        assert n_cached < n_prompt * 0.2 if n == 0 else n_cached > n_prompt * 0.8


def test_one_apis_prompt_is_anothers_prefix(real: Real) -> None:
    """All APIs share one normal form: the same question through another API is already cached."""
    talk = session(seed=40)
    for route, ask in ROUTES.items():
        text, n_prompt, n_cached = ask(real, talk.messages(0), stream=False)
        assert text == talk.questions[0].answer
        assert n_cached < n_prompt * 0.2 if route == "chat" else n_cached == n_prompt - 1


def test_a_conversation_by_its_last_response(real: Real) -> None:
    talk = session(seed=41)
    system, *first = talk.messages(0)
    client = real.openai()
    previous = None
    for n, question in enumerate(talk.questions):
        items: Any = first if n == 0 else question.text
        response = client.responses.create(
            model="",
            instructions=system["content"],
            input=items,
            previous_response_id=previous,
            temperature=0,
            max_output_tokens=64,
        )
        assert response.output_text == question.answer
        assert response.usage is not None
        assert n == 0 or response.usage.input_tokens_details.cached_tokens > 100
        previous = response.id


@pytest.mark.parametrize("served", ["real", "hybrid"])
def test_a_reply_goes_on_from_what_the_assistant_has_begun(
    served: str, request: pytest.FixtureRequest
) -> None:
    real: Real = request.getfixturevalue(served)
    talk = session(seed=42)
    answer = talk.questions[0].answer
    begun = answer[: answer.rindex(" ")]
    system, *rest = talk.messages(0)
    messages: Any = [*rest, {"role": "assistant", "content": begun}]
    by_claude = real.anthropic().messages.create(
        model="claude-opus-5",
        max_tokens=64,
        system=system["content"],
        messages=messages,
        extra_body=GREEDY,
    )
    assert by_claude.content[0].text == answer.removeprefix(begun)  # type: ignore[union-attr]
    by_openai = real.openai().chat.completions.create(
        model="",
        messages=[system, *messages],  # type: ignore[list-item]
        temperature=0,
        extra_body={"continue_final_message": True},
    )
    assert by_openai.choices[0].message.content == answer.removeprefix(begun)
    usage = by_openai.usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1


# --- tools ---------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_tool_through_anthropics_api(real: Real, stream: bool) -> None:
    client = real.anthropic()
    tools: Any = [
        {
            "name": "lookup",
            "description": "Look up an attribute of an entity.",
            "input_schema": LOOKUP,
        }
    ]
    messages: list[Any] = [{"role": "user", "content": ASKED}]

    def ask() -> Any:
        body: Any = {"model": "claude", "max_tokens": 64, "messages": messages, "tools": tools}
        if not stream:
            return client.messages.create(**body, extra_body=GREEDY)
        with client.messages.stream(**body, extra_body=GREEDY) as running:
            return running.get_final_message()

    called = ask()
    assert called.stop_reason == "tool_use"
    (call,) = called.content
    assert (call.name, call.input) == ("lookup", FOUND)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "9 May 1961"}
    messages += [called.to_param(), {"role": "user", "content": [result]}]
    answer = ask()
    assert answer.content[0].text == "The birthday of Palralin Zelby is 9 May 1961."
    assert answer.usage.cache_read_input_tokens > 50


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_tool_through_the_responses_api(real: Real, stream: bool) -> None:
    client = real.openai()
    tools: Any = [
        {
            "type": "function",
            "name": "lookup",
            "description": "Look up an attribute of an entity.",
            "parameters": LOOKUP,
        }
    ]

    def ask(**body: Any) -> Any:
        body |= {"model": "", "temperature": 0, "max_output_tokens": 64, "tools": tools}
        if not stream:
            return client.responses.create(**body)
        with client.responses.stream(**body) as running:
            return running.get_final_response()

    called = ask(input=ASKED)
    (call,) = called.output
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "lookup", FOUND)
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "9 May 1961"}
    answer = ask(input=[output], previous_response_id=called.id)
    assert answer.output_text == "The birthday of Palralin Zelby is 9 May 1961."


def test_a_forced_call_through_each_new_api(real: Real) -> None:
    """The grammar forces the call, whatever the model was asked."""
    tool: Any = {"name": "lookup", "input_schema": LOOKUP}
    message = real.anthropic().messages.create(
        model="claude",
        max_tokens=200,
        messages=[{"role": "user", "content": "Hello!"}],
        tools=[tool],
        tool_choice={"type": "any"},
        extra_body=GREEDY,
    )
    assert [block.type for block in message.content] == ["tool_use"]
    function: Any = {"type": "function", "name": "lookup", "parameters": LOOKUP}
    response = real.openai().responses.create(
        model="",
        input="Hello!",
        tools=[function],
        tool_choice={"type": "function", "name": "lookup"},
        temperature=0,
        max_output_tokens=200,
    )
    assert [item.type for item in response.output] == ["function_call"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_tool_through_the_chat_api(real: Real, stream: bool) -> None:
    function = {"name": "lookup", "description": "Look up an attribute of an entity."}
    tools: Any = [{"type": "function", "function": function | {"parameters": LOOKUP}}]
    messages: list[Any] = [{"role": "user", "content": ASKED}]
    create = real.openai().chat.completions

    def ask() -> Any:
        body: Any = {"model": "", "messages": messages, "tools": tools, "max_tokens": 64}
        if not stream:
            return create.create(**body, **GREEDY).choices[0]
        with create.stream(**body, **GREEDY) as running:
            return running.get_final_completion().choices[0]

    called = ask()
    assert called.finish_reason == "tool_calls"
    (call,) = called.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("lookup", FOUND)
    messages += [
        called.message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}),
        {"role": "tool", "tool_call_id": call.id, "content": "9 May 1961"},
    ]
    assert ask().message.content == "The birthday of Palralin Zelby is 9 May 1961."


def test_a_schema_through_each_new_api(real: Real) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [7]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "schema": schema}
    message = real.anthropic().messages.create(
        model="claude",
        max_tokens=100,
        messages=[{"role": "user", "content": "Hello!"}],
        output_config={"format": form},
    )
    assert message.content[0].type == "text"
    assert json.loads(message.content[0].text) == {"n": 7}
    with real.anthropic().messages.stream(
        model="claude",
        max_tokens=100,
        messages=[{"role": "user", "content": "Hello!"}],
        output_config={"format": form},
    ) as stream:
        assert json.loads("".join(stream.text_stream)) == {"n": 7}
    response = real.openai().responses.create(
        model="", input="Hello!", max_output_tokens=100, text={"format": form | {"name": "n"}}
    )
    assert json.loads(response.output_text) == {"n": 7}
