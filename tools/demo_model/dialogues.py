"""Training dialogues: sessions of `firn.demo.facts`, some of them with tools, as chat segments.

`segments` writes what chat_template.jinja writes, but marks what the model must learn to say;
`check` in tokenizer.py ensures that the two agree.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from firn.demo import words
from firn.demo.facts import FactSession, Kind, Question, Split, make_session

Message = dict[str, Any]

LOOKUP = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look up an attribute of an entity.",
        "parameters": {
            "type": "object",
            "properties": {"attribute": {"type": "string"}, "entity": {"type": "string"}},
            "required": ["attribute", "entity"],
        },
    },
}
GET_TIME = {
    "type": "function",
    "function": {
        "name": "get_time",
        "description": "Get the local time of a place.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string"}},
            "required": ["place"],
        },
    },
}


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A finished chat: every user turn is answered."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Segment:
    text: str
    is_answer: bool


def plain(session: FactSession) -> Dialogue:
    last = len(session.questions) - 1
    chat: list[Message] = [*session.messages(last)]
    chat.append({"role": "assistant", "content": session.questions[last].answer})
    return Dialogue(tuple(chat))


def with_tools(session: FactSession, rng: Random, donor: FactSession) -> Dialogue:
    """`session` with tools on offer, and tool turns about the facts of `donor` mixed in."""
    chat: list[Message] = []
    spare = [q for q in donor.questions if q.kind in ("fact", "absent")]
    for message in plain(session).messages:
        if chat and spare and _stands_alone(message) and rng.random() < 0.4:
            chat.extend(_lookup_turn(spare.pop(), rng))
        chat.append(message)
    while spare:
        chat.extend(_lookup_turn(spare.pop(), rng))
    tools = rng.choice(((LOOKUP, GET_TIME), (GET_TIME, LOOKUP), (LOOKUP,)))
    if GET_TIME in tools:
        chat.extend(_time_turn(donor, rng))
    return Dialogue(tuple(chat), tools)


def _stands_alone(message: Message) -> bool:
    """Whether another turn may come before this one: not if it refers to the one before."""
    text = message["content"]
    return message["role"] == "user" and text not in (*words.REPEAT, *words.ASKED)


def _lookup_turn(question: Question, rng: Random) -> Iterator[Message]:
    attribute, entity, value = _parts(question.answer)
    arguments = {"attribute": attribute, "entity": entity}
    result = "not found" if question.kind == "absent" else value
    ask = rng.choice(("Look up the {a} of {e}.", "Use the lookup tool: {a} of {e}."))
    yield {"role": "user", "content": ask.format(a=attribute, e=entity)}
    yield _call("lookup", arguments)
    yield {"role": "tool", "content": result}
    yield {"role": "assistant", "content": question.answer}


def _time_turn(donor: FactSession, rng: Random) -> Iterator[Message]:
    entities = [_parts(q.answer)[1] for q in donor.questions]
    places = [e for e in entities if " " not in e]
    if not places:
        return
    place, time = places[0], f"{rng.randint(10, 23)}:{rng.randint(10, 59)}"
    yield {"role": "user", "content": f"What time is it in {place}?"}
    yield _call("get_time", {"place": place})
    yield {"role": "tool", "content": time}
    yield {"role": "assistant", "content": f"It is {time} in {place}."}


def _parts(answer: str) -> tuple[str, str, str]:
    key, _, value = answer.removeprefix("The ").removesuffix(".").partition(" is ")
    attribute, _, entity = key.partition(" of ")
    return attribute, entity, value


def _call(name: str, arguments: dict[str, str]) -> Message:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def tool_dialogue(
    seed: int, *, n_facts: int, n_questions: int, n_calls: int, split: Split = "train"
) -> Dialogue:
    session = make_session(seed, n_facts=n_facts, n_questions=n_questions, split=split)
    kinds: tuple[Kind, ...] = ("fact", "absent")
    donor = make_session(
        -seed - 1, n_facts=2 * n_calls, n_questions=n_calls, kinds=kinds, split=split
    )
    return with_tools(session, Random(f"tools {seed}"), donor)


def segments(dialogue: Dialogue) -> Iterator[Segment]:
    """The chat as text, in order; an answer ends with its <|im_end|>."""
    messages = dialogue.messages
    rest: Sequence[Message] = messages
    if dialogue.tools:
        lead = f"{messages[0]['content']}\n\n" if messages[0]["role"] == "system" else ""
        rest = messages[1:] if lead else messages
        listing = "".join("\n" + _json(tool) for tool in dialogue.tools)
        yield Segment(
            f"<|im_start|>system\n{lead}# Tools\n<tools>{listing}\n</tools>\n"
            'To call one, answer with:\n<tool_call>\n{"name": <name>, "arguments": <object>}\n'
            "</tool_call><|im_end|>\n",
            False,
        )
    for message in rest:
        role, content = message["role"], message["content"]
        if role == "assistant":
            yield Segment("<|im_start|>assistant\n", False)
            yield Segment(content + written_calls(message) + "<|im_end|>", True)
            yield Segment("\n", False)
        elif role == "tool":
            yield Segment(
                f"<|im_start|>user\n<tool_response>\n{content}\n</tool_response><|im_end|>\n", False
            )
        else:
            yield Segment(f"<|im_start|>{role}\n{content}<|im_end|>\n", False)


def written_calls(message: Message) -> str:
    """The tool calls of an assistant message as the template writes them."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return "\n".join(
        f'<tool_call>\n{{"name": "{call["name"]}", "arguments": {_json(call["arguments"])}}}\n'
        "</tool_call>"
        for call in calls
    )


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
