"""How a model writes its replies: read once from its chat template and vocabulary."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType

from firn.core.errors import SetupError
from firn.core.ports import Tokenizer
from firn.core.values import Tool
from firn.text.calls.call_parser import CallParser, NativeParser
from firn.text.calls.parsers import Clues, ToolFormat, formats, names
from firn.text.calls.parsers.whole_call import WholeCall
from firn.text.calls.schema import ToolSchemas
from firn.text.reply.splitter import CallMarkers, ReplySplitter, TagSplitter, ThinkTags

HARMONY = "harmony"
NONE = "none"
AUTO = "auto"
FALLBACK = "json_tags"
"""The format that a model without one is asked to use: many have seen it in training."""


def _tags(open: str, close: str) -> ThinkTags:
    return ThinkTags(open, close, clues=(close,))


THINK_TAGS: Mapping[str, ThinkTags] = MappingProxyType(
    {
        "hunyuan": ThinkTags(
            "<think>",
            "</think>",
            answer=("<answer>", "</answer>"),
            clues=("</think>", "<answer>"),
        ),
        "ernie45": ThinkTags(
            "<think>",
            "</think>",
            answer=("<response>", "</response>"),
            clues=("</think>", "<response>"),
        ),
        "apriel": ThinkTags(
            "Here are my reasoning steps:",
            "[BEGIN FINAL RESPONSE]",
            drop=("[END FINAL RESPONSE]",),
            clues=("[BEGIN FINAL RESPONSE]",),
        ),
        "solar": ThinkTags(
            "<|think|>",
            "<|end|>",
            drop=("<|begin|>assistant", "<|content|>", "<|end|>"),
            clues=("<|begin|>assistant", "<|think|>"),
        ),
        "seed": _tags("<seed:think>", "</seed:think>"),
        "longcat": _tags("<longcat_think>", "</longcat_think>"),
        "minimax_m3": _tags("<mm:think>", "</mm:think>"),
        "hy_v3": ThinkTags(
            "<think:opensource>", "</think:opensource>", clues=(":opensource", "</think{}>")
        ),
        "think_bars": _tags("<|think:start|>", "<|think:end|>"),
        "magistral": _tags("[THINK]", "[/THINK]"),
        "cohere": _tags("<|START_THINKING|>", "<|END_THINKING|>"),
        "apertus": _tags("<|inner_prefix|>", "<|inner_suffix|>"),
        "kimi_vl": _tags("◁think▷", "◁/think▷"),
        "gemma4": _tags("<|channel>thought", "<channel|>"),
        "kimi_k3": ThinkTags(
            "<|open|>think<|sep|>",
            "<|close|>think<|sep|>",
            drop=(
                "<|open|>response<|sep|>",
                "<|close|>response<|sep|>",
                "<|close|>message<|sep|>",
            ),
            clues=("<|close|>think<|sep|>",),
        ),
        "think": _tags("<think>", "</think>"),
        "thinking": _tags("<thinking>", "</thinking>"),
        "deepseek_r1": ThinkTags("<think>", "</think>", implied=True),
    }
)
"""Reasoning formats by name. Of several that match, the first is the model's: many a template of another
family strips <think> from what clients send."""

_REASONING_ALIASES = {
    "deepseek_v3": "think",
    "qwen3": "think",
    "glm45": "think",
    "minimax_m2": "think",
    "kimi_k2": "think",
    "step3": "deepseek_r1",
    "seed_oss": "seed",
    "hunyuan_a13b": "hunyuan",
    "mistral": "magistral",
    "command_a": "cohere",
    "gpt_oss": HARMONY,
    "openai_gptoss": HARMONY,
}


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """How to read a reply.

    tool: the name of a tool-call format, or None if the model cannot call tools. think: its
    reasoning tags. visible: control tokens that are markup, which the splitter must see as text.
    native: the tokenizer's own parser, for `whole_call`.
    """

    tool: str | None = None
    think: ThinkTags | None = None
    visible: frozenset[int] = frozenset()
    native: NativeParser | None = None

    @property
    def closing(self) -> str:
        """What ends reasoning and begins the answer; "" where there is no reasoning."""
        closing = formats()[self.tool].closing if self.tool else ""
        return closing or (f"\n{self.think.close}\n\n" if self.think else "")


PLAIN = ReplyFormat()
"""All of the reply is text: for raw completions."""


def markup_tokens() -> frozenset[str]:
    """Every token that any model uses to mark up reasoning or calls."""
    calls = {token for form in formats().values() for token in form.tokens}
    return frozenset(calls.union(*map(tokens_of, THINK_TAGS.values())))


def assistant_markup() -> frozenset[str]:
    """The markup tokens that may occur in an assistant's text; those of channels never do."""
    shaping = {token for form in formats().values() if form.splitter for token in form.tokens}
    return markup_tokens() - shaping


def tool_parser_names() -> tuple[str, ...]:
    return (AUTO, NONE, *sorted(names()))


def reasoning_parser_names() -> tuple[str, ...]:
    return (AUTO, NONE, *sorted({*THINK_TAGS, *_REASONING_ALIASES, HARMONY}))


def detect_format(
    tokenizer: Tokenizer,
    *,
    tool_override: str | None = None,
    reasoning_override: str | None = None,
    native: NativeParser | None = None,
    takes_tools: bool = True,
) -> ReplyFormat:
    """The model's format. Raises SetupError for an override that is not in the lists above.

    native: the parser that the tokenizer itself names. It reads formats that no file here supports, or
    that only a weak clue shows, and any format if the override is "whole_call". takes_tools: whether the
    chat template does; if not, the system prompt describes the tools and how to call them.
    """
    template = tokenizer.chat_template or ""
    clues = Clues(template, lambda text: tokenizer.token_id(text) is not None)
    tool = _tool_format(clues, tool_override, native)
    if tool is None and tool_override in (None, AUTO) and template and not takes_tools:
        tool = formats()[FALLBACK]
    think = _think_tags(clues, reasoning_override, tool)
    tokens: list[str] = list(tool.tokens) if tool else []
    if tool and native and tool.name == "whole_call":
        tokens += native.tokens
    if think:
        tokens += tokens_of(think)
    ids = {tokenizer.token_id(t) for t in tokens}
    return ReplyFormat(
        tool=tool.name if tool else None,
        think=think,
        visible=frozenset(t for t in ids if t is not None and t in tokenizer.special),
        native=native,
    )


def reads_calls(template: str, tokens: Container[str]) -> bool:
    """Whether the template takes tools and a model's calls are read, as far as both of these show."""
    clues = Clues(template, tokens.__contains__)
    return "tools" in template and _tool_format(clues, None, None) is not None


def opens_in_reasoning(prompt_tail: str, think: ThinkTags | None) -> bool:
    """Whether the reply to a prompt that ends like this begins inside reasoning."""
    if think is None:
        return False
    tail = prompt_tail.rstrip()
    return tail.endswith(think.open) or (think.implied and not tail.endswith(think.close))


def _tool_format(
    clues: Clues, override: str | None, native: NativeParser | None
) -> ToolFormat | None:
    if override == NONE:
        return None
    if override and override != AUTO:
        if override not in names():
            raise SetupError(_unknown("tool-call parser", override, tool_parser_names()))
        return formats()[names()[override]]
    matching = [f for f in formats().values() if f.matches(clues)]
    if native:
        matching.append(formats()["whole_call"])
    return max(matching, key=lambda f: f.rank, default=None)


def _think_tags(clues: Clues, override: str | None, tool: ToolFormat | None) -> ThinkTags | None:
    if override == NONE or (tool and tool.splitter and override in (None, AUTO)):
        return None
    if override and override != AUTO:
        name = _REASONING_ALIASES.get(override, override)
        if name not in THINK_TAGS and name != HARMONY:
            raise SetupError(_unknown("reasoning parser", override, reasoning_parser_names()))
        return THINK_TAGS.get(name)
    for tags in THINK_TAGS.values():
        if not tags.clues:
            continue
        in_template = all(clue in clues.template for clue in tags.clues)
        if in_template or all(map(clues.has_token, tokens_of(tags))):
            return tags
    return None


def tokens_of(tags: ThinkTags) -> list[str]:
    """The control tokens that the markup of reasoning may consist of."""
    texts = (tags.open, tags.close, *tags.drop, *(tags.answer or ()))
    tokens = (re.findall(r"<[^<>]*>", text) or [text] for text in texts)
    return list(dict.fromkeys(chain.from_iterable(tokens)))


def _unknown(kind: str, name: str, known: Iterable[str]) -> str:
    return f"unknown {kind} {name!r}; choose one of: {', '.join(known)}"


def make_splitter(
    format: ReplyFormat, tools: tuple[Tool, ...], prompt_tail: str
) -> ReplySplitter | None:
    """None if the whole reply is text. Without tools, call markup is text as well."""
    tool_format = formats()[format.tool] if format.tool else None
    schemas = ToolSchemas(tools)
    if tool_format and tool_format.splitter:
        return tool_format.splitter(schemas, prompt_tail)
    calls = _call_markers(format, tool_format, schemas) if tool_format and tools else None
    if format.think is None and calls is None:
        return None
    return TagSplitter(
        format.think,
        calls,
        in_reasoning=opens_in_reasoning(prompt_tail, format.think),
    )


def _call_markers(
    format: ReplyFormat, tool_format: ToolFormat, schemas: ToolSchemas
) -> CallMarkers | None:
    native = format.native
    if tool_format.parser is WholeCall:
        if native is None:
            return None

        def make_native(marker: str, *, known_only: bool) -> CallParser:
            return WholeCall(marker, schemas, known_only=known_only, native=native)

        return CallMarkers((native.opens,), make_native)

    def make(marker: str, *, known_only: bool) -> CallParser:
        return tool_format.parser(marker, schemas, known_only=known_only)

    return CallMarkers(tool_format.opens, make, starts=tool_format.starts)
