"""The whole server, as `firn serve` builds it, through the real clients of each API.

The built-in model was trained to read facts out of a document: its answers are right or wrong. What
it was not trained for (thinking, embeddings) is shown on tiny random models.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import mlx.core as mx
import numpy as np
import openai
import pytest

from firn.config import CacheConfig, Config, ModelConfig
from firn.core.errors import SetupError
from firn.demo.facts import Session, make_session
from tests.api.real import Real, serving
from tests.models.test_embedder import bert, write
from tests.zoo import build, write_folder

__all__ = ["bert"]

MEMORY = CacheConfig(no_ssd_cache=True, cache_memory_mb=64)
LOOKUP = {
    "type": "object",
    "properties": {"attribute": {"type": "string"}, "entity": {"type": "string"}},
    "required": ["attribute", "entity"],
}
ASKED = "Look up the birthday of Palralin Zelby."
FOUND = {"attribute": "birthday", "entity": "Palralin Zelby"}
GREEDY: Any = {"temperature": 0}


def config(path: str, **model: Any) -> Config:
    return Config(model=ModelConfig(path=path, **model), cache=MEMORY)


@pytest.fixture(scope="module")
def real() -> Iterator[Real]:
    with serving(Path(), config=config("firn-demo")) as running:
        yield running


@pytest.fixture(scope="module")
def hybrid() -> Iterator[Real]:
    with serving(Path(), config=config("firn-demo-hybrid")) as running:
        yield running


def url(real: Real) -> str:
    return f"http://127.0.0.1:{real.port}"


def claude(real: Real) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url(real), api_key="unused", max_retries=0, timeout=60)


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
    client = claude(real)
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


def session(seed: int) -> Session:
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
    """There is one normal form: who asks the same thing elsewhere finds it read."""
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
    by_claude = claude(real).messages.create(
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
    client = claude(real)
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
    """The grammar holds the model to it, whatever it was asked."""
    tool: Any = {"name": "lookup", "input_schema": LOOKUP}
    message = claude(real).messages.create(
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
    message = claude(real).messages.create(
        model="claude",
        max_tokens=100,
        messages=[{"role": "user", "content": "Hello!"}],
        output_config={"format": form},
    )
    assert message.content[0].type == "text"
    assert json.loads(message.content[0].text) == {"n": 7}
    with claude(real).messages.stream(
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


# --- thinking ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    """A random model whose template begins the thinking; it would hardly ever end it."""
    folder = tmp_path_factory.mktemp("thinker")
    write_folder("qwen3", folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = settings["chat_template"].replace(
        "<|im_start|>assistant\\n' }}{% endif %}",
        "<|im_start|>assistant\\n<think>\\n' }}{% endif %}",
    )
    assert "assistant\\n<think>" in settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with serving(Path(), config=config(str(folder))) as running:
        yield running


@pytest.mark.parametrize("budget", [0, 5, 50])
def test_a_budget_ends_thinking_at_the_same_token_each_time(thinker: Real, budget: int) -> None:
    closing = thinker.tokenizer.encode("\n</think>\n\n", add_special=False)
    seen = set()
    for _ in range(3):
        response = thinker.openai().responses.create(
            model="",
            input="hi",
            temperature=0,
            max_output_tokens=budget + 30,
            extra_body={"thinking_budget": budget, "ignore_eos": True},
        )
        assert response.usage is not None
        n_thought = response.usage.output_tokens_details.reasoning_tokens
        # The tag itself is read as thinking, up to the token that completes it.
        assert budget < n_thought <= budget + len(closing)
        assert response.output_text
        seen.add(json.dumps([item.model_dump(exclude={"id"}) for item in response.output]))
    assert len(seen) == 1


Thought = tuple[str, str, int, int]
"""The reasoning, the answer, the prompt's tokens, and how many of them came from the cache."""


def brief(real: Real) -> Any:
    """A few tokens of thinking, once: noise would begin it again, or end."""
    ids = [real.tokenizer.token_id("<think>"), *real.tokenizer.eos]
    return {"thinking_budget": 5, "logit_bias": {str(token): -100 for token in ids}, **GREEDY}


def think_by_chat(real: Real, history: list[Any], *, stream: bool) -> Thought:
    body: Any = {"model": "", "messages": history, "max_tokens": 16, "extra_body": brief(real)}
    create = real.openai().chat.completions.create
    thought = said = ""
    if stream:
        for chunk in create(**body, stream=True, stream_options={"include_usage": True}):
            usage: Any = chunk.usage
            for choice in chunk.choices:
                thought += choice.delta.model_dump().get("reasoning_content") or ""
                said += choice.delta.content or ""
    else:
        done: Any = create(**body)
        usage = done.usage
        thought, said = done.choices[0].message.reasoning_content, done.choices[0].message.content
    return thought, said, usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens


def think_by_messages(real: Real, history: list[Any], *, stream: bool) -> Thought:
    def blocks(message: Any) -> Any:
        if "reasoning_content" not in message:
            return message
        thought = {"type": "thinking", "thinking": message["reasoning_content"], "signature": ""}
        said = {"type": "text", "text": message["content"]}
        return {"role": "assistant", "content": [thought, said]}

    body: Any = {
        "model": "claude",
        "messages": [blocks(message) for message in history],
        "max_tokens": 16,
        "thinking": {"type": "enabled", "budget_tokens": 5},
        "extra_body": brief(real),
    }
    client = claude(real).messages
    if stream:
        with client.stream(**body) as running:
            done: Any = running.get_final_message()
    else:
        done = client.create(**body)
    thinking, text = done.content
    assert (thinking.type, text.type) == ("thinking", "text")
    usage = done.usage
    n_prompt = usage.input_tokens + usage.cache_read_input_tokens
    return thinking.thinking, text.text, n_prompt, usage.cache_read_input_tokens


def think_by_responses(real: Real, history: list[Any], *, stream: bool) -> Thought:
    items: list[Any] = []
    for message in history:
        if "reasoning_content" in message:
            thought = {"type": "reasoning_text", "text": message["reasoning_content"]}
            items.append({"type": "reasoning", "summary": [], "content": [thought]})
        items.append({"role": message["role"], "content": message["content"]})
    body: Any = {"model": "", "input": items, "max_output_tokens": 16, "extra_body": brief(real)}
    done: Any = real.openai().responses.create(**body, stream=stream)
    if stream:
        *_, last = done
        assert last.type == "response.incomplete"
        done = last.response
    thought, _ = done.output
    usage = done.usage
    cached = usage.input_tokens_details.cached_tokens
    return thought.content[0].text, done.output_text, usage.input_tokens, cached


THINKERS: dict[str, Callable[..., Thought]] = {
    "chat": think_by_chat,
    "messages": think_by_messages,
    "responses": think_by_responses,
}


@pytest.mark.parametrize("keeps", [True, False], ids=["sent back", "left out"])
@pytest.mark.parametrize("route", THINKERS)
def test_the_turn_after_some_thinking_is_cached(thinker: Real, route: str, keeps: bool) -> None:
    """Whether or not the client sends the old thoughts along, streamed or not."""
    think = THINKERS[route]
    history: list[Any] = [{"role": "user", "content": f"{route} {keeps} " + "word " * 40}]
    thought, said, n_first, _ = think(thinker, history, stream=False)
    assert thought
    assert said
    assert (thought, said) == think(thinker, history, stream=True)[:2]
    answer = {"role": "assistant", "content": said}
    history.append(answer | {"reasoning_content": thought} if keeps else answer)
    history.append({"role": "user", "content": "And then?"})
    for stream in (True, False):
        thought, said, n_prompt, n_cached = think(thinker, history, stream=stream)
        assert n_prompt > n_first
        assert n_cached > n_first - 8, "all but what opens the reply"
        assert "<think>" not in said + thought


# --- embeddings ----------------------------------------------------------------------------


def test_a_decoder_that_pools_also_generates(tmp_path: Path) -> None:
    write_folder("qwen3", tmp_path)
    write(tmp_path, "1_Pooling/config.json", {"pooling_mode_lasttoken": True})
    with serving(Path(), config=config(str(tmp_path))) as real:
        texts = ["The quick brown fox", "snow", "The server keeps what it has read"]
        found = real.openai().embeddings.create(model="", input=texts)
        model = build("qwen3")
        for text, item in zip(texts, found.data, strict=True):
            ids = real.tokenizer.encode(text, add_special=True)
            hidden = np.array(model.model(mx.array([ids]))[0, -1].astype(mx.float32))
            np.testing.assert_allclose(item.embedding, hidden / np.linalg.norm(hidden), atol=1e-4)
        cut = real.openai().embeddings.create(model="", input=texts[0], dimensions=8)
        assert np.linalg.norm(cut.data[0].embedding) == pytest.approx(1.0, abs=1e-5)
        assert real.openai().completions.create(model="", prompt="snow", max_tokens=3).choices


def test_an_encoder_refuses_to_generate(bert: Path) -> None:
    with serving(Path(), config=config(str(bert))) as real:
        found = real.openai().embeddings.create(model="", input=["snow", "ice and firn"])
        assert [len(item.embedding) for item in found.data] == [32, 32]
        with pytest.raises(openai.BadRequestError, match="does not generate"):
            real.openai().completions.create(model="", prompt="snow")
        with pytest.raises(anthropic.BadRequestError):
            claude(real).messages.create(
                model="claude", max_tokens=9, messages=[{"role": "user", "content": "hi"}]
            )


def test_a_model_that_only_generates_makes_no_embeddings(real: Real) -> None:
    with pytest.raises(openai.BadRequestError, match="says nothing about pooling"):
        real.openai().embeddings.create(model="", input="snow")


# --- options -------------------------------------------------------------------------------


def test_parsers_and_origins_can_be_chosen(tmp_path: Path) -> None:
    write_folder("qwen3", tmp_path)
    wanted = config(str(tmp_path), tool_call_parser="mistral", reasoning_parser="magistral")
    origin = "https://app.example"
    server = type(wanted.server)(allow_origins=(origin,))
    chosen = Config(server=server, model=wanted.model, cache=MEMORY)
    with serving(Path(), config=chosen) as real:
        form = real.server.services.reply_format
        assert form.tool == "mistral"
        assert form.think is not None
        assert form.think.open == "[THINK]"
        asked = {"origin": origin, "access-control-request-method": "POST"}
        allowed = httpx.options(f"{url(real)}/v1/messages", headers=asked)
        assert allowed.headers["access-control-allow-origin"] == origin
        other = httpx.get(f"{url(real)}/v1/models", headers={"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize("option", ["tool_call_parser", "reasoning_parser"])
def test_an_unknown_parser_is_one_line(tmp_path: Path, option: str) -> None:
    write_folder("qwen3", tmp_path)
    with (
        pytest.raises(SetupError, match="'klingon'; known are: auto, none"),
        serving(Path(), config=config(str(tmp_path), **{option: "klingon"})),
    ):
        pass
