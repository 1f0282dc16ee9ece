"""System prompt, tools and the newest message are essential in every family's prompts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from firn.core.values import Chat, FillInMiddle, Message, RawText, Role, TextPart, Tool
from firn.text.prompt.essential import BEGINNING, ENDING, essential
from firn.text.prompt.maker import PromptMaker
from tests import families
from tests.fakes import END, START, FakeTokenizer

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
    """The essential beginning, the part in between, and the essential end."""
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
def test_the_system_prompt_and_the_newest_message_are_essential(name: str) -> None:
    first, between, last = parts(name, [SYSTEM, *TALK])
    assert SYSTEM[1] in first
    assert TALK[-1][1] in last
    assert "first long document" in between
    assert "second one" in between
    assert "second one" not in first + last


@pytest.mark.parametrize("name", WITH_TOOLS)
@pytest.mark.parametrize("system", [True, False])
def test_tools_are_essential_wherever_the_template_puts_them(name: str, system: bool) -> None:
    first, between, last = parts(name, [*([SYSTEM] if system else []), *TALK], LOOKUP)
    assert LOOKUP.description in first + last
    assert LOOKUP.description not in between
    assert "second one" in between


@pytest.mark.parametrize("name", families.FAMILIES)
def test_a_short_lone_message_is_all_essential(name: str) -> None:
    first, between, last = parts(name, TALK[:1])
    assert "first long document" in last or "first long document" in first
    assert "first long document" not in between


FILE = " ".join(f"Line {i} of the file says {i * 7919 % 1000}." for i in range(400))
LONG_MESSAGES = [
    ("user", f"Summarise what begins here. {FILE} Which line says 42?"),
    ("user", f"{FILE}\n\nWhich line says 42?"),
    ("user", f"Summarise what begins here.\n\n{FILE}"),
]


def thinnable(name: str, said: list[tuple[str, str]], *tools: Tool) -> tuple[str, int]:
    """The part of the prompt that may be skipped, and its number of tokens."""
    tokenizer = families.tokenizer(name)
    roles: dict[str, Role] = {"system": "system", "user": "user", "assistant": "assistant"}
    chat = Chat(tuple(Message(roles[r], (TextPart(t.strip()),)) for r, t in said), tools)
    prompt = PromptMaker(tokenizer, context_length=1 << 20).make(chat)
    is_essential = np.zeros(len(prompt), dtype=np.bool_)
    for start, end in prompt.essential:
        assert 0 <= start < end <= len(prompt)
        is_essential[start:end] = True
    skippable = prompt.ids[~is_essential].tolist()
    return tokenizer.decode(skippable), len(skippable)


@pytest.mark.parametrize("name", families.FAMILIES)
@pytest.mark.parametrize("message", LONG_MESSAGES)
@pytest.mark.parametrize("earlier", [[], [SYSTEM], [SYSTEM, *TALK[:-1]]])
def test_the_middle_of_a_long_newest_message_may_be_skipped(
    name: str, message: tuple[str, str], earlier: list[tuple[str, str]]
) -> None:
    skippable, n = thinnable(name, [*earlier, message])
    assert n > 1024
    assert "Line 200 " in skippable
    for kept in ("Summarise what", "Which line says 42", SYSTEM[1]):
        assert kept not in skippable
    assert "Line 1 of" not in skippable, "its beginning"
    assert "Line 399 of" not in skippable, "its end"


@pytest.mark.parametrize("name", WITH_TOOLS)
@pytest.mark.parametrize("earlier", [[], [SYSTEM], [SYSTEM, *TALK[:-1]]])
def test_tools_beside_a_long_newest_message_are_essential(
    name: str, earlier: list[tuple[str, str]]
) -> None:
    long = "something that is told at length " * 100
    tools = [replace(LOOKUP, name=f"lookup{i}", description=f"{i}: {long}") for i in range(3)]
    skippable, n = thinnable(name, [*earlier, LONG_MESSAGES[0]], *tools)
    assert n > 1024
    assert "told at length" not in skippable
    assert "Which line says 42" not in skippable


@pytest.mark.parametrize("name", families.FAMILIES)
@pytest.mark.parametrize("word", ["a", "user", "assistant", "</think>"])
def test_a_newest_message_that_could_occur_anywhere_is_essential(name: str, word: str) -> None:
    """Also one that occurs in the header of the reply."""
    expected = parts(name, [SYSTEM, *TALK])[2].replace(TALK[-1][1], word)
    assert word in expected
    assert parts(name, [SYSTEM, *TALK[:-1], ("user", word)])[2].endswith(expected)


def test_a_raw_text_keeps_its_beginning_and_its_end() -> None:
    maker = PromptMaker(families.tokenizer("qwen3"), context_length=1 << 20)
    assert maker.make(RawText("some text " * 50)).essential == ()
    prompt = maker.make(RawText(FILE))
    assert prompt.essential == ((0, BEGINNING), (len(prompt) - ENDING, len(prompt)))


def test_everything_around_a_gap_is_essential() -> None:
    tokenizer = FakeTokenizer(special=(END, START, "[SUFFIX]", "[PREFIX]"))
    prompt = PromptMaker(tokenizer, context_length=1 << 20).make(FillInMiddle("a " * 3000, "b"))
    assert prompt.essential == ((0, len(prompt)),)


def test_a_chat_whose_messages_cannot_be_told_apart_is_all_essential() -> None:
    message = Message("user", (TextPart(FILE),))
    assert essential(FILE, [], [message], n_tokens=5000, count=len) == ((0, 5000),)
