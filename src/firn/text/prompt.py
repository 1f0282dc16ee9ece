"""A request's source to a Prompt: normalise, render, tokenize, mark where messages end.

Used from the tokenize pool; holds nothing but what was read once from the tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from firn.core.errors import BadRequest, ContextTooLong
from firn.core.ports import Tokenizer
from firn.core.values import (
    Chat,
    ImagePart,
    Message,
    Prompt,
    RawText,
    Reasoning,
    Source,
    TokenArray,
    ToolMode,
)
from firn.text.messages import normalise, to_template, tools_to_template
from firn.text.template import TemplateTraits, openers

TAIL_TOKENS = 64
AS_TEMPLATE = Reasoning()


class PromptMaker:
    """Thread-safe: nothing changes after construction."""

    def __init__(self, tokenizer: Tokenizer, *, context_length: int) -> None:
        self._tokenizer = tokenizer
        self._context_length = context_length
        source = tokenizer.chat_template
        self._traits = None if source is None else TemplateTraits.read(source)
        self._openers = () if source is None else openers(tokenizer)

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
        text, messages = self._render(chat, reasoning)
        # The template writes the special tokens itself: adding them again would double the BOS.
        ids = self._ids(self._tokenizer.encode(text, add_special=False))
        points = {int(p) for p in self._message_starts(ids)}
        points.update(self._end_of_system(text, ids, messages))
        return Prompt(ids, boundaries=tuple(sorted(p for p in points if 0 < p < len(ids))))

    def _render(self, chat: Chat, reasoning: Reasoning) -> tuple[str, tuple[Message, ...]]:
        traits = self._traits
        if traits is None:
            raise BadRequest(
                "This model has no chat template; use the completions API.", param="messages"
            )
        if not chat.messages:
            raise BadRequest("messages: there is none.", param="messages")
        refuse_images(chat.messages)
        tools = () if chat.tool_choice.mode is ToolMode.NONE else chat.tools
        if tools and not traits.takes_tools:
            raise BadRequest("This model's chat template takes no tools.", param="tools")
        messages = normalise(chat.messages)
        text = self._tokenizer.render(
            to_template(messages, style=traits.style),
            tools=tools_to_template(tools) or None,
            kwargs={**_reasoning_kwargs(reasoning), **chat.template_kwargs},
        )
        return _well_formed(text), messages

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
    for message in messages:
        for part in message.parts:
            if isinstance(part, ImagePart):
                raise BadRequest(f"{part.param}: this model takes no images.", param=part.param)


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
