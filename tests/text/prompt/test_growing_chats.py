"""A chat that grows keeps its prefix, in every dialect and with the templates of every family.

The prompt of a turn is the beginning of the next turn's, except for the reply's header and for
reasoning that the template itself leaves out later. Chats are lists of items here, which are
converted to the body of each API.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any, Literal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from firn.api.dialects import discover
from firn.core.values import Chat, Namespace
from firn.text.prompt.maker import PromptMaker
from tests import families
from tests.families import FAMILIES

PARAMETERS = {"type": "object", "properties": {"at": {"type": "string"}}}
Kind = Literal["user", "system", "note", "answer", "calls", "results"]


@dataclass(frozen=True)
class Item:
    """texts: the message, or the content of each call or result. told: the text beside calls."""

    kind: Kind
    texts: tuple[str, ...]
    thought: str = ""
    first: int = 0
    """The number of the first of its calls."""
    told: str = ""

    @property
    def is_assistants(self) -> bool:
        return self.kind in ("answer", "calls")


# --- chats ---------------------------------------------------------------------------------

SAID = (
    "well",
    "two\n\nparagraphs",
    "  spaces  ",
    "Grüße, 世界 🙂",
    '{"a": "b"}\t\\n',
    "a token: <|im_end|> [/INST] <end_of_turn> <|eot_id|> </s> <｜User｜> <|start|>",
    "tags: <think>x</think> <tool_call> <tool_response>y</tool_response>",
)


@st.composite
def chats(draw: st.DrawFn, *, thoughts: bool) -> list[Item]:
    items: list[Item] = []
    n_said = n_calls = 0

    def text() -> str:
        nonlocal n_said
        n_said += 1
        return f"{draw(st.sampled_from(SAID))} word{n_said}."

    def thought() -> str:
        return f"thought {text()}" if thoughts and draw(st.booleans()) else ""

    for _ in range(draw(st.integers(0, 2))):
        items.append(Item("system", (text(),)))
    for _ in range(draw(st.integers(1, 3))):
        for _ in range(draw(st.integers(1, 2))):
            items.append(Item("user", (text(),)))
        if draw(st.integers(0, 3)) == 0:
            items.append(Item("system", (text(),)))
        for _ in range(draw(st.integers(0, 2))):
            texts = tuple(text() for _ in range(draw(st.integers(1, 2))))
            items.append(Item("calls", texts, thought(), n_calls))
            items.append(Item("results", tuple(text() for _ in texts), first=n_calls))
            n_calls += len(texts)
            late = draw(st.sampled_from(["", "", "system", "note"]))
            if late:
                items.append(Item(late, (text(),)))  # type: ignore[arg-type]
        if draw(st.integers(0, 3)):
            items.append(Item("answer", (text(),), thought()))
    return items


def turns(items: list[Item]) -> Iterator[list[Item]]:
    """The chat at each point where a client could ask for a reply."""
    for i, item in enumerate(items):
        ends = item.kind in ("user", "results", "note", "system") and i > 0
        goes_on = i + 1 < len(items) and items[i + 1].kind == "note"  # sent with the results
        if ends and not goes_on and any(x.kind == "user" for x in items[: i + 1]):
            yield items[: i + 1]


# --- bodies --------------------------------------------------------------------------------


def for_chat(items: list[Item]) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    for item in items:
        match item.kind:
            case "user" | "note":
                messages.append({"role": "user", "content": item.texts[0]})
            case "system":
                messages.append({"role": "developer", "content": item.texts[0]})
            case "answer":
                said = {"role": "assistant", "content": item.texts[0]}
                messages.append(said | ({"reasoning": item.thought} if item.thought else {}))
            case "calls":
                calls = [
                    {"id": f"call_{item.first + i}", "type": "function",
                     "function": {"name": "look", "arguments": json.dumps({"at": text})}}
                    for i, text in enumerate(item.texts)
                ]  # fmt: skip
                said = {"role": "assistant", "content": item.told or None, "tool_calls": calls}
                messages.append(said | ({"reasoning": item.thought} if item.thought else {}))
            case "results":
                for i, text in enumerate(item.texts):
                    id = f"call_{item.first + i}"
                    messages.append({"role": "tool", "tool_call_id": id, "content": text})
    tool = {"name": "look", "description": "Looks.", "parameters": PARAMETERS}
    return {"messages": messages, "tools": [{"type": "function", "function": tool}]}


def for_messages(items: list[Item]) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    for item in items:
        match item.kind:
            case "user" | "system":
                messages.append({"role": item.kind, "content": item.texts[0]})
            case "note":
                text = f"<system-reminder>{item.texts[0]}</system-reminder>"
                messages[-1]["content"].append({"type": "text", "text": text})
            case "answer" | "calls":
                blocks: list[dict[str, Any]] = []
                if item.thought:
                    blocks.append({"type": "thinking", "thinking": item.thought, "signature": ""})
                if item.told:
                    blocks.append({"type": "text", "text": item.told})
                for i, text in enumerate(item.texts):
                    call = {"id": f"call_{item.first + i}", "name": "look", "input": {"at": text}}
                    said = {"type": "text", "text": text}
                    is_call = item.kind == "calls"
                    blocks.append({"type": "tool_use", **call} if is_call else said)
                messages.append({"role": "assistant", "content": blocks})
            case "results":
                results = [
                    {
                        "type": "tool_result",
                        "tool_use_id": f"call_{item.first + i}",
                        "content": text,
                    }
                    for i, text in enumerate(item.texts)
                ]
                messages.append({"role": "user", "content": results})
    tool = {"name": "look", "description": "Looks.", "input_schema": PARAMETERS}
    return {"messages": messages, "tools": [tool], "max_tokens": 9}


def for_responses(items: list[Item]) -> dict[str, Any]:
    input_items: list[dict[str, Any]] = []
    for item in items:
        if item.thought:
            input_items.append({"type": "reasoning", "content": [
                {"type": "reasoning_text", "text": item.thought}], "summary": []})  # fmt: skip
        if item.told:
            input_items.append({"role": "assistant", "content": item.told})
        for i, text in enumerate(item.texts):
            id = f"call_{item.first + i}"
            match item.kind:
                case "user" | "note":
                    input_items.append({"role": "user", "content": text})
                case "system":
                    input_items.append({"role": "system", "content": text})
                case "answer":
                    input_items.append({"role": "assistant", "content": text})
                case "calls":
                    call = {"name": "look", "arguments": json.dumps({"at": text}), "call_id": id}
                    input_items.append({"type": "function_call", **call})
                case "results":
                    input_items.append(
                        {"type": "function_call_output", "call_id": id, "output": text}
                    )
    tool = {"type": "function", "name": "look", "description": "Looks.", "parameters": PARAMETERS}
    return {"input": input_items, "tools": [tool]}


def for_ollama(items: list[Item]) -> dict[str, Any]:
    """Like for_chat, but without ids."""
    body = for_chat(items)
    for message in body["messages"]:
        message["thinking"] = message.pop("reasoning", None)
        if message["role"] == "developer":
            message["role"] = "system"
        if message.pop("tool_call_id", None) is not None:
            message["tool_name"] = "look"
        for call in message.get("tool_calls") or ():
            del call["id"], call["type"]
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return body


BODIES = {
    "/api/chat": for_ollama,
    "/v1/chat/completions": for_chat,
    "/v1/messages": for_messages,
    "/v1/responses": for_responses,
}


def test_every_dialect_of_chats_is_here() -> None:
    assert set(BODIES) == {d.path for d in discover()} - {"/v1/completions", "/api/generate"}


# --- the property --------------------------------------------------------------------------

PLAIN_CHAT = [
    Item("system", ("Be kind word1.",)),
    Item("user", ("two\n\nparagraphs word2.",)),
    Item("answer", ("Grüße word3.",)),
    Item("user", (f"{SAID[5]} word4.",)),
    Item("user", ("well word5.",)),
]
AGENT_CHAT = [
    Item("system", ("Be kind word1.",)),
    Item("system", ("Be brief word2.",)),
    Item("user", ("look word3.",)),
    Item("system", ("late word4.",)),
    Item("calls", ("here word5.", "there word6."), first=0),
    Item("results", ("snow word7.", f"{SAID[6]} word8."), first=0),
    Item("note", ("a note word9.",)),
    Item("calls", ("  spaces   word10.",), first=2),
    Item("results", ("ice word11.",), first=2),
    Item("system", ("later word12.",)),
    Item("answer", ("done word13.",)),
    Item("user", ("thanks word14.",)),
]
THOUGHTFUL_CHAT = [
    replace(item, thought=f"thought about {i}") if item.is_assistants else item
    for i, item in enumerate(AGENT_CHAT)
]


TOLD_CHAT = [
    Item("system", ("Be kind word1.",)),
    Item("user", ("look word2.",)),
    Item("calls", ("here word4.",), first=0, told="I look word3."),
    Item("results", ("snow word5.",), first=0),
    Item("calls", ("there word7.", "up word8."), first=1, told="Again word6."),
    Item("results", ("ice word9.", "wind word10."), first=1),
    Item("answer", ("done word11.",)),
    Item("user", ("thanks word12.",)),
]


@cache
def maker(family: str) -> PromptMaker:
    tokenizer = families.tokenizer(family)
    return PromptMaker(tokenizer, context_length=1 << 20, tool_format="json_tags")


@cache
def dialect(path: str) -> Any:
    return next(d for d in discover() if d.path == path)


def chat_of(path: str, items: list[Item]) -> Chat:
    call = dialect(path).decode(BODIES[path](items), namespace=Namespace("test"))
    source = call.requests[0].source
    assert isinstance(source, Chat)
    return source


Known = dict[tuple[str, bool], list[int]]
"""Prompts already made: most chats decode to the same Chat in several dialects."""


def ids_of(family: str, chat: Chat, known: Known, *, header: bool) -> list[int]:
    key = repr(chat), header
    if key not in known:
        kwargs = {**chat.template_kwargs, "add_generation_prompt": header}
        known[key] = maker(family).make(replace(chat, template_kwargs=kwargs)).ids.tolist()
    return known[key]


def check(family: str, items: list[Item]) -> None:
    """Checks the chat in every dialect."""
    made: Known = {}
    for path in BODIES:
        check_in(family, path, items, made)


def check_in(family: str, path: str, items: list[Item], made: Known) -> None:
    decode = families.tokenizer(family).decode
    for before, now in pairwise(turns(items)):
        whole = ids_of(family, chat_of(path, now), made, header=True)
        known = ids_of(family, chat_of(path, before), made, header=False)
        shared = next((i for i, t in enumerate(known) if whole[i : i + 1] != [t]), len(known))
        assert shared >= floor(family, path, decode(known), before, now), (
            path,
            decode(known[:shared]),
            decode(known[shared:]),
            decode(whole[shared:]),
        )


def floor(family: str, path: str, text: str, before: list[Item], now: list[Item]) -> int:
    """How many tokens of the earlier prompt the later one must begin with."""
    rules = FAMILIES[family]
    end = len(text)
    added = now[len(before) :]
    may_join = rules.alternates or before[-1].kind in ("results", "note")
    if may_join and not added[0].is_assistants:
        # There was no answer: what was added belongs to the same turn, if a template alternates, or
        # to the results before it. The end of the turn is now after it.
        end = text.rfind(before[-1].texts[-1].split()[-1].rstrip("."))
    questions = ("user",) if path == "/v1/messages" else ("user", "note")
    if rules.thought and any(item.kind in questions for item in added):
        at = text.find(rules.thought)
        end = min(end, at) if at >= 0 else end
    if rules.moved and any(item.kind in ("user", "note", "system") for item in added):
        at = text.find(rules.moved)
        end = min(end, at) if at >= 0 else end
    return len(families.tokenizer(family).encode(text[:end], add_special=False)) - (
        1 if end < len(text) else 0
    )


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=6, deadline=None)
@given(items=chats(thoughts=False))
@example(items=PLAIN_CHAT)
@example(items=AGENT_CHAT)
def test_a_turn_begins_with_the_one_before(family: str, items: list[Item]) -> None:
    check(family, items)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=4, deadline=None)
@given(items=chats(thoughts=True))
@example(items=THOUGHTFUL_CHAT)
def test_only_reasoning_that_the_template_drops_is_lost(family: str, items: list[Item]) -> None:
    check(family, items)


TEXT_IN_RESULTS = ("nemo", "gpt_oss")
"""Their templates have no place for the text beside calls, or drop it at the next question."""


@pytest.mark.parametrize("family", FAMILIES)
def test_text_beside_calls_stays(family: str) -> None:
    check(family, TOLD_CHAT)
    made: Known = {}
    for path in BODIES:
        for chat in turns(TOLD_CHAT):
            ids = ids_of(family, chat_of(path, chat), made, header=True)
            text = families.tokenizer(family).decode(ids)
            behind = family in TEXT_IN_RESULTS
            told = [
                t
                for item in chat
                for t in ((*item.texts, item.told) if behind else (item.told, *item.texts))
            ]
            places = {t: text.find(t) for t in told if t}
            assert -1 not in places.values(), (path, places)
            if len(chat) < 5:  # parallel calls may be written one by one, each with its result
                assert list(places.values()) == sorted(places.values()), (path, places)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_system_prompt_is_in_every_prompt_before_what_was_said_after_it(family: str) -> None:
    """Some templates write it before the last question, and leave it out after a tool's result."""
    made: Known = {}
    for chat in turns([item for item in AGENT_CHAT if item.kind != "note"]):
        text = families.tokenizer(family).decode(
            ids_of(family, chat_of("/v1/chat/completions", chat), made, header=True)
        )
        assert -1 < text.find("Be kind") < text.find("look word3")
