"""A request's source to a Prompt: normalise, render, tokenize, mark where messages end.

Used from the tokenize pool; holds nothing but what was read once from the tokenizer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from firn.core.errors import BadRequest, ContextTooLong
from firn.core.ports import Pictures, Tokenizer
from firn.core.values import (
    Chat,
    Message,
    Prompt,
    RawText,
    Reasoning,
    Source,
    TokenArray,
    Tool,
    ToolMode,
)
from firn.text.illustrate import Illustration, images_of
from firn.text.messages import normalise, to_template, tools_to_template
from firn.text.template import TemplateTraits, keeps_header, openers, wants_lists

TAIL_TOKENS = 64
HEADER_TOKENS = 16
"""A reply's header is shorter than this; no message that is has to have a boundary of its own."""
N_KWARGS = 64
"""Different template variables of which the answer to one question is kept."""
AS_TEMPLATE = Reasoning()
CONTINUE = {"add_generation_prompt": False, "continue_final_message": True}


class PromptMaker:
    """Thread-safe: nothing that matters changes after construction."""

    def __init__(
        self, tokenizer: Tokenizer, *, context_length: int, pictures: Pictures | None = None
    ) -> None:
        """pictures: None for a model that takes none."""
        self._tokenizer = tokenizer
        self._context_length = context_length
        self._pictures = pictures
        source = tokenizer.chat_template
        self._traits = None if source is None else TemplateTraits.read(source)
        if self._traits is not None and wants_lists(tokenizer):
            self._traits = self._traits.with_lists()
        self._openers = () if source is None else openers(tokenizer)
        self._keeps_header = lru_cache(maxsize=N_KWARGS)(self._ask_for_header)

    def make(self, source: Source, *, reasoning: Reasoning = AS_TEMPLATE) -> Prompt:
        """Raises BadRequest, ContextTooLong, TemplateFailed."""
        if isinstance(source, Chat):
            return self._chat(source, reasoning)
        if isinstance(source, RawText):
            text = _well_formed(source.text)
            ids = self._ids(self._tokenizer.encode(text, add_special=True))
        else:
            ids = self._ids(source.ids)
        return Prompt(ids)

    def tail(self, prompt: Prompt) -> str:
        """The prompt's last text, for a reader that must know what the template has opened."""
        return self._tokenizer.decode([int(t) for t in prompt.ids[-TAIL_TOKENS:]])

    def _chat(self, chat: Chat, reasoning: Reasoning) -> Prompt:
        messages = self._checked(chat)
        if images_of(messages) and self._pictures is not None:
            return self._illustrated(chat, messages, self._pictures, reasoning)
        keeps_header = self._next_keeps_header(chat, reasoning)
        text = _well_formed(
            self._tokenizer.render(**self._template_inputs(chat, messages, reasoning))
        )
        # The template writes the special tokens itself: adding them again would double the BOS.
        ids = self._ids(self._tokenizer.encode(text, add_special=False))
        return self._marked(Prompt(ids), text, messages, keeps_header=keeps_header)

    def _illustrated(
        self, chat: Chat, messages: tuple[Message, ...], pictures: Pictures, reasoning: Reasoning
    ) -> Prompt:
        keeps_header = self._next_keeps_header(chat, reasoning)
        found = Illustration(messages, pictures)
        text = found.render(self._tokenizer, **self._template_inputs(chat, messages, reasoning))
        expanded = found.expand(_well_formed(text))
        ids = self._ids(found.encode(self._tokenizer, expanded))
        prompt = Prompt(
            ids,
            media=found.spans(ids),
            images=tuple(image.inputs for image in found.prepared),
            whole_images=pictures.whole,
        )
        return self._marked(prompt, found.readable(expanded), messages, keeps_header=keeps_header)

    def _marked(
        self, prompt: Prompt, text: str, messages: Sequence[Message], *, keeps_header: bool
    ) -> Prompt:
        """With the positions where messages end; up to the last, the next turn will agree."""
        ids = prompt.ids
        starts = self._message_starts(ids)
        points = {int(p) for p in starts}
        if points and keeps_header:
            # All but the last token, which the tokenizer may join with the reply's first.
            header, end = max(points), len(ids) - 1
            points = (points - {header} if end - header < HEADER_TOKENS else points) | {end}
        points.update(self._end_of_system(text, ids, messages))
        boundaries = tuple(sorted(p for p in points if 0 < p < len(ids)))
        return replace(prompt, boundaries=boundaries, hints=self._hints(text, starts, messages))

    def _next_keeps_header(self, chat: Chat, reasoning: Reasoning) -> bool:
        """Whether the reply's header will be a part of the next turn's prompt."""
        kwargs = {**_reasoning_kwargs(reasoning), **chat.template_kwargs}
        kwargs.pop("documents", None)  # long, and nothing to the answer
        return not chat.continues and self._keeps_header(json.dumps(kwargs, sort_keys=True))

    def _ask_for_header(self, kwargs: str) -> bool:
        assert self._traits is not None
        return keeps_header(self._tokenizer, self._traits.style, json.loads(kwargs))

    def _checked(self, chat: Chat) -> tuple[Message, ...]:
        """The messages as templates want them, of a chat that this model can take."""
        if self._traits is None:
            raise BadRequest(
                "This model has no chat template; use the completions API.", param="messages"
            )
        if not chat.messages:
            raise BadRequest("messages: there is none.", param="messages")
        last = chat.messages[-1]
        if chat.continues and (
            last.role != "assistant" or last.tool_calls or not last.text.strip()
        ):
            raise BadRequest(
                "Only the text of an assistant can be continued, in the last message.",
                param="messages",
            )
        if self._pictures is None:
            refuse_images(chat.messages)
        if _tools_of(chat) and not self._traits.takes_tools:
            raise BadRequest("This model's chat template takes no tools.", param="tools")
        return normalise(chat.messages)

    def _template_inputs(
        self, chat: Chat, messages: Sequence[Message], reasoning: Reasoning
    ) -> dict[str, Any]:
        assert self._traits is not None
        going_on = CONTINUE if chat.continues else {}
        return {
            "messages": to_template(messages, style=self._traits.style),
            "tools": tools_to_template(_tools_of(chat)) or None,
            "kwargs": {**_reasoning_kwargs(reasoning), **chat.template_kwargs, **going_on},
        }

    def _ids(self, ids: Sequence[int]) -> TokenArray:
        try:
            found = np.asarray(ids, dtype=np.int64)
        except OverflowError as e:
            raise BadRequest("prompt: a token id is out of range.", param="prompt") from e
        if not len(found):
            raise BadRequest("The prompt is empty.", param="prompt")
        if len(found) >= self._context_length:
            raise ContextTooLong(len(found), self._context_length)
        return found

    def _message_starts(self, ids: TokenArray) -> TokenArray:
        """Positions of the tokens that begin a message; the last is where the reply's header is."""
        if not self._openers:
            return np.empty(0, dtype=np.int64)
        return np.flatnonzero(np.isin(ids, self._openers)).astype(np.int64)

    def _hints(self, text: str, starts: TokenArray, messages: Sequence[Message]) -> tuple[int, ...]:
        """Where the messages end that the caller has marked.

        Each is looked for in the rendered text, behind the one before it; as many messages have
        begun up to its end as there are openers in front of it, and the next opener is the end.
        """
        if not self._openers or not any(m.checkpoint for m in messages):
            return ()
        marks = sorted((self._tokenizer.decode([t]) for t in self._openers), key=len, reverse=True)
        opener = re.compile("|".join(map(re.escape, marks)))
        found: list[int] = []
        at = n_begun = 0
        for message in messages:
            said = message.text.strip()
            start = text.find(said, at) if said else -1
            if start < 0:
                continue
            n_begun += len(opener.findall(text, at, start + len(said)))
            at = start + len(said)
            if message.checkpoint and n_begun < len(starts):
                found.append(int(starts[n_begun]))
        return tuple(dict.fromkeys(found))

    def _end_of_system(
        self, text: str, ids: TokenArray, messages: Sequence[Message]
    ) -> Sequence[int]:
        """Where the system prompt ends in a template that puts it inside the first user message.

        Other chats share the prompt up to there, but no token marks it. The bytes of the tokens are
        counted up to that character; a tokenizer that changes the text gives no boundary.
        """
        if len(messages) < 2 or messages[0].role != "system" or messages[1].role != "user":
            return ()
        system, user = messages[0].text.strip(), messages[1].text.strip()
        at = text.find(system) if system and user else -1
        if at < 0:
            return ()
        end = at + len(system)
        start = text.find(user, end)
        if start < 0 or self._has_opener(text[end:start]):
            return ()
        n_bytes = len(text[:end].encode())
        n_seen = 0
        for i, token in enumerate(ids):
            n_seen += len(self._tokenizer.token_bytes(int(token)))
            if n_seen > n_bytes:
                return (i,) if text.startswith(self._tokenizer.decode(ids[:i].tolist())) else ()
        return ()

    def _has_opener(self, text: str) -> bool:
        ids = self._tokenizer.encode(text, add_special=False)
        return any(t in self._openers for t in ids)


def refuse_images(messages: Sequence[Message]) -> None:
    for part in images_of(messages):
        raise BadRequest(f"{part.param}: this model takes no images.", param=part.param)


def _tools_of(chat: Chat) -> tuple[Tool, ...]:
    return () if chat.tool_choice.mode is ToolMode.NONE else chat.tools


def _well_formed(text: str) -> str:
    """Half a surrogate pair (JSON can carry one) is no text; it becomes U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _reasoning_kwargs(reasoning: Reasoning) -> dict[str, Any]:
    """Template variables by the names that templates use for them."""
    found: dict[str, Any] = {}
    if reasoning.enabled is not None:
        found["enable_thinking"] = found["thinking"] = reasoning.enabled
    if reasoning.effort is not None:
        found["reasoning_effort"] = reasoning.effort
    return found
