"""Adjacent texts are joined in time linear in their length: a client may send very many.

Quadratic work would take minutes in the larger tests here, and exceed the suite's time limit.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from firn.api.dialects import Dialect
from firn.api.dialects._openai_chat import MAX_MESSAGES
from firn.api.dialects.anthropic_messages import AnthropicMessages
from firn.api.dialects.openai_responses import OpenAIResponses
from firn.core.values import Chat, DocumentPart, Message, Namespace, OtherPart, TextPart, ToolCall
from firn.text.calls.parsers import formats
from firn.text.prompt.arrange import arrange
from firn.text.prompt.joined_parts import JoinedParts
from firn.text.prompt.message_parts import PartReader
from firn.text.prompt.tool_prompt import with_tools_as_text
from firn.text.prompt.turn_rules import TurnRules
from firn.text.reply.formats import FALLBACK

SOUND = OtherPart("input_audio")
TEXT = "x" * 3500
N_BLOCKS = 90_000
"""As many as fit into a body."""


def joined(*parts: Any, between: str = "") -> tuple[Any, ...]:
    made = JoinedParts()
    for part in parts:
        made.add(TextPart(part) if isinstance(part, str) else part, between=between)
    return made.result()


def test_adjacent_texts_are_one_and_other_parts_stay() -> None:
    assert joined() == ()
    assert joined("a", "b", SOUND, "c", "d") == (TextPart("ab"), SOUND, TextPart("cd"))
    assert joined("a", "", "b", between="-") == (TextPart("a-b"),)
    assert joined("", "a", between="-") == (TextPart("a"),)
    assert joined("", SOUND, between="-") == (TextPart(""), SOUND)


def test_a_text_that_was_ended_is_not_continued() -> None:
    made = JoinedParts()
    for text in ("a", "b"):
        made.end_text()
        made.add(TextPart(text), between="-")
    made.add(TextPart("c"), between="-")
    assert made.result() == (TextPart("a"), TextPart("b-c"))


def decoded(dialect: Dialect, **body: Any) -> tuple[Message, ...]:
    source = dialect.decode(body, namespace=Namespace("test")).requests[0].source
    assert isinstance(source, Chat)
    return source.messages


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_many_blocks_of_one_message(role: str) -> None:
    blocks = [{"type": "text", "text": TEXT[:700]}] * N_BLOCKS
    message, _ = decoded(
        AnthropicMessages(), messages=[{"role": role, "content": blocks}, {"role": "user"}]
    )
    assert message.text.count("x") == N_BLOCKS * 700


@pytest.mark.parametrize("kind", ["message", "reasoning"])
def test_many_items_of_one_turn(kind: str) -> None:
    summary = [{"type": "summary_text", "text": TEXT}]
    item = {"type": kind, "role": "assistant", "content": TEXT, "summary": summary}
    if kind == "reasoning":
        del item["content"]
    (message,) = decoded(OpenAIResponses(), input=[item] * MAX_MESSAGES)
    said = message.text if kind == "message" else message.reasoning or ""
    assert said == "\n\n".join([TEXT] * MAX_MESSAGES)


@pytest.mark.parametrize(
    ("role", "rules"),
    [
        ("system", TurnRules()),
        ("user", TurnRules(user_runs=False)),
        ("assistant", TurnRules(assistant_runs=False)),
        ("tool", TurnRules(user_after_results=False)),
    ],
)
def test_many_messages_that_become_one(role: Any, rules: TurnRules) -> None:
    first = Message(role, (TextPart(TEXT),))
    next = replace(first, role="user") if role == "tool" else first
    (message,) = arrange([first, *[next] * (MAX_MESSAGES - 1)], rules)[-1:]
    assert message.role == role
    assert message.text == "\n\n".join([TEXT] * MAX_MESSAGES)


def test_many_calls_and_their_results_one_by_one() -> None:
    calls = tuple(ToolCall(str(i), "f", {}) for i in range(60_000))
    results = [
        Message("tool", (TextPart("42"),), tool_call_id=str(i)) for i in reversed(range(60_000))
    ]
    asked = Message("assistant", (TextPart("so"),), tool_calls=calls)
    first, *rest = arrange([asked, *results], TurnRules(several_calls=False))
    assert first == replace(asked, tool_calls=calls[:1])
    assert [m.tool_call_id or m.tool_calls[0].id for m in rest[:4]] == ["0", "1", "1", "2"]


def test_many_parts_that_no_model_takes() -> None:
    paper = DocumentPart("", "application/pdf", TEXT[:700], fault="the document is encrypted.")
    read = PartReader().read([Message("user", (paper,) * N_BLOCKS)], newest=-1).messages[0]
    assert len(read.parts) == 1
    assert read.text.count("[A document was here.") == N_BLOCKS


def test_many_parts_of_a_result_in_words() -> None:
    result = Message("tool", (TextPart(TEXT[:700]),) * N_BLOCKS)
    (turn,) = with_tools_as_text([result], (), formats()[FALLBACK])
    assert turn.text.count("x") == N_BLOCKS * 700
