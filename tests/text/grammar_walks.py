"""Random replies within the grammars of tool formats, with a tokenizer for each format's tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jsonschema
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from firn.core.values import (
    Chat,
    GenerateRequest,
    Grammar,
    Message,
    Reasoning,
    Tool,
    ToolChoice,
    ToolMode,
)
from firn.models.grammar.compiler import Compiler, Constraint
from firn.models.load.loader import load_tokenizer
from firn.models.tokenizer.hf_tokenizer import HfTokenizer
from firn.text.calls.parsers import ToolFormat, formats
from firn.text.grammar.constraint import ReplyConstraint, constraint
from firn.text.reply.formats import ReplyFormat
from firn.text.reply.splitter import ThinkTags
from tests.models.grammar.grammar_lab import wander
from tests.text.replies import Reply, read
from tests.zoo.folder import CORPUS

END = "<|end_of_reply|>"
THINK = ThinkTags("<think>", "</think>")

WEATHER = Tool(
    "get_weather",
    "The weather of a place.",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 12},
            "days": {"type": "integer", "minimum": 0, "maximum": 99},
            "unit": {"enum": ["c", "f"]},
            "spot": {"$ref": "#/$defs/spot"},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2},
            "note": {"type": ["string", "null"], "maxLength": 5},
        },
        "required": ["city", "days"],
        "$defs": {
            "spot": {
                "type": "object",
                "properties": {"exact": {"type": "boolean"}, "name": {"enum": ["a b", "c"]}},
                "required": ["exact"],
                "additionalProperties": False,
            }
        },
    },
)
PING = Tool("ping", "", {"type": "object", "properties": {}})
SAY = Tool(
    "say",
    "",
    {
        "type": "object",
        "properties": {
            "word": {"type": "string", "pattern": "^(ab|cd)+$", "minLength": 2, "maxLength": 6},
            "path": {"type": "string", "pattern": "^/[a-z]", "maxLength": 5},
        },
        "required": ["word"],
    },
)
TOOLS = (WEATHER, PING, SAY)


@cache
def tokenizer(format: str, *, has_markers: bool = True) -> HfTokenizer:
    """Byte-level, with the control tokens of one format. Its template is the format's example.

    has_markers: otherwise the model writes the format's markup as plain text.
    """
    form = formats()[format]
    control = [END, *((THINK.open, THINK.close, *form.tokens) if has_markers else ())]
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=control,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([CORPUS], trainer)
    with TemporaryDirectory() as path:
        write(Path(path), made.to_str(), chat_template=form.example)
        return load_tokenizer(Path(path))


def write(path: Path, definition: str, *, chat_template: str) -> None:
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 0}))
    (path / "tokenizer.json").write_text(definition)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "chat_template": chat_template,
        "clean_up_tokenization_spaces": False,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


@cache
def compiler(format: str) -> Compiler:
    return Compiler(tokenizer(format), vocab_size=tokenizer(format).n_ids)


def asked(
    choice: ToolChoice,
    *,
    tools: Sequence[Tool] = TOOLS,
    grammar: Grammar | None = None,
    thinks: bool | None = False,
) -> GenerateRequest:
    placed = tuple(replace(tool, param=f"tools[{i}]") for i, tool in enumerate(tools))
    chat = Chat((Message("user"),), tools=placed, tool_choice=choice)
    return GenerateRequest("m", chat, grammar=grammar, reasoning=Reasoning(enabled=thinks))


def grammar_of(format: str, request: GenerateRequest, *, tail: str = "") -> Grammar | None:
    return constraint_of(format, request, tail=tail).grammar


def constraint_of(format: str, request: GenerateRequest, *, tail: str = "") -> ReplyConstraint:
    think = None if formats()[format].splitter else THINK
    return constraint(
        request,
        format=ReplyFormat(tool=format, think=think),
        tokenizer=tokenizer(format),
        prompt_tail=tail,
        relax=compiler(format).relax,
    )


def start(format: str, request: GenerateRequest, *, tail: str = "") -> Constraint:
    grammar = grammar_of(format, request, tail=tail)
    assert grammar is not None
    return compiler(format).compile(grammar).start()


def accepts(format: str, begun: Constraint, text: str) -> bool:
    """Whether this is a complete reply, with its tokens as encoded, not as a mask would force."""
    for token in tokenizer(format).encode(text, add_special=False):
        if begun.matcher.is_stopped() or not begun.matcher.consume_token(token):
            return False
    return begun.matcher.is_accepting()


def required(**options: Any) -> ToolChoice:
    return ToolChoice(ToolMode.REQUIRED, **options)


ENFORCEABLE = {name: f for name, f in formats().items() if f.grammar}
EACH = pytest.mark.parametrize("format", ENFORCEABLE.values(), ids=ENFORCEABLE)
SCHEMAS = {tool.name: tool.parameters for tool in TOOLS}
N_WALKS = 12


def reply_of(format: ToolFormat, text: str, tail: str = "") -> Reply:
    think = None if format.splitter else THINK
    return read(ReplyFormat(tool=format.name, think=think), [text], tools=TOOLS, tail=tail)


def walks(format: ToolFormat, choice: ToolChoice, **options: object) -> list[Reply]:
    """Replies that the grammar allows, read back; those that did not end are left out."""
    request = asked(choice, **options)  # type: ignore[arg-type]
    vocabulary = tokenizer(format.name)
    replies = []
    for seed in range(N_WALKS):
        begun = start(format.name, request)
        walk = wander(begun, vocabulary.eos, seed=seed, n_most=600)
        if walk is not None:
            replies.append(reply_of(format, vocabulary.decode(walk)))
    assert len(replies) > N_WALKS // 3
    return replies


def check(reply: Reply) -> None:
    assert reply.calls
    assert reply.text == ""
    for call in reply.calls:
        jsonschema.validate(call.arguments, SCHEMAS[call.name])
