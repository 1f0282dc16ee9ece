"""System prompt, tools and the newest message are found in every family's prompts."""

from __future__ import annotations

import pytest

from firn.core.values import Chat, Message, RawText, Role, TextPart, Tool
from firn.text.prompt import PromptMaker
from tests import families

LOOKUP = Tool("lookup", "finds whatever is asked for", {"type": "object", "properties": {}})
SYSTEM = ("system", "Rules of the house: be brief.")
TALK = [
    ("user", "A first long document. " * 20),
    ("assistant", "I have read it."),
    ("user", "A second one. " * 30),
    ("assistant", "That one, too."),
    ("user", "What does the last one say?"),
]
WITH_TOOLS = [name for name in families.FAMILIES if not name.startswith("gemma")]


def parts(name: str, said: list[tuple[str, str]], *tools: Tool) -> tuple[str, str, str]:
    """What is essential at the beginning, what is between, and the essential end."""
    tokenizer = families.tokenizer(name)
    roles: dict[str, Role] = {"system": "system", "user": "user", "assistant": "assistant"}
    chat = Chat(tuple(Message(roles[r], (TextPart(t.strip()),)) for r, t in said), tools)
    prompt = PromptMaker(tokenizer, context_length=1 << 20).make(chat)
    *head, (newest, n) = prompt.essential
    end = head[0][1] if head else 0
    assert n == len(prompt)
    assert all(start == 0 for start, _ in head)
    ranges = ((0, end), (end, newest), (newest, n))
    first, between, last = (tokenizer.decode(prompt.ids[a:b].tolist()) for a, b in ranges)
    return first, between, last


@pytest.mark.parametrize("name", families.FAMILIES)
def test_the_system_prompt_and_the_newest_message(name: str) -> None:
    first, between, last = parts(name, [SYSTEM, *TALK])
    assert SYSTEM[1] in first
    assert TALK[-1][1] in last
    assert "first long document" in between
    assert "second one" in between
    assert "second one" not in first + last


@pytest.mark.parametrize("name", WITH_TOOLS)
@pytest.mark.parametrize("system", [True, False])
def test_tools_wherever_the_template_puts_them(name: str, system: bool) -> None:
    first, between, last = parts(name, [*([SYSTEM] if system else []), *TALK], LOOKUP)
    assert LOOKUP.description in first + last
    assert LOOKUP.description not in between
    assert "second one" in between


@pytest.mark.parametrize("name", families.FAMILIES)
def test_a_lone_message_is_all_essential(name: str) -> None:
    first, between, last = parts(name, TALK[:1])
    assert "first long document" in last or "first long document" in first
    assert "first long document" not in between


@pytest.mark.parametrize("name", families.FAMILIES)
def test_a_newest_message_that_could_stand_anywhere(name: str) -> None:
    _, _, last = parts(name, [SYSTEM, *TALK[:-1], ("user", "a")])
    assert "a" in last.replace("assistant", "")


def test_raw_text_has_nothing_essential() -> None:
    maker = PromptMaker(families.tokenizer("qwen3"), context_length=1 << 20)
    assert maker.make(RawText("some text " * 50)).essential == ()
