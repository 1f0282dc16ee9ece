"""From a request's source to its Prompt: read, arrange, render, tokenize, mark where messages end.

Runs in the tokenize pool; keeps only what it read from the tokenizer at the start.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache

import numpy as np

from firn.core.errors import (
    BadRequest,
    ContextTooLong,
    InvalidValue,
    TemplateFailed,
    TemplateTooSlow,
)
from firn.core.ports import Pictures, Tokenizer
from firn.core.values import (
    Chat,
    FillInMiddle,
    Message,
    Prompt,
    RawText,
    RawTokens,
    Reasoning,
    Source,
    TokenArray,
    Tool,
)
from firn.text.calls.parsers import ToolFormat, formats
from firn.text.prompt.arrange import arrange
from firn.text.prompt.boundaries import Boundaries
from firn.text.prompt.essential import essential_of_text
from firn.text.prompt.infill import detect_infill
from firn.text.prompt.message_parts import PartReader
from firn.text.prompt.messages import normalize_calls, to_template, tools_to_template
from firn.text.prompt.picture_spans import PromptPictures, pictures_of
from firn.text.prompt.rendering import Content, Rendered
from firn.text.prompt.template import (
    MESSAGE_OPENERS,
    Template,
    keeps_header,
    nearest_effort,
    reasoning_kwargs,
    shows_pictures_in_results,
)
from firn.text.prompt.tool_prompt import with_plain_schema, with_tools_as_text
from firn.text.prompt.typed_control import TypedControl, control_texts
from firn.text.reply.formats import FALLBACK, assistant_markup, markup_tokens
from firn.text.well_formed import well_formed

SUSPICIOUS_CHARS = 8
"""Per token of the context: a longer text is first tokenized in slices. Prose and code have three
to five characters per token; a text that has more, but fits, is tokenized twice."""
SLICE_CHARS = 1 << 18
SLACK_TOKENS = 64
"""Per slice: the most tokens that cutting the text may add."""


TAIL_TOKENS = 64
N_KWARGS = 64
"""How many results of `_probe_header` are cached, one for each set of template variables."""
TEMPLATE_DEFAULT = Reasoning()
"""The template decides whether the model reasons."""
CONTINUE = {"add_generation_prompt": False, "continue_final_message": True}


def refuse_too_long(text: str, tokenizer: Tokenizer, *, limit: int) -> None:
    """Raises ContextTooLong, with an estimate of the token count; a text that may fit passes. To
    tokenize all of it takes long."""
    n_chars = len(text)
    if n_chars <= max(limit * SUSPICIOUS_CHARS, SLICE_CHARS):
        return
    if n_chars > limit * tokenizer.max_token_chars:
        n_tokens = len(tokenizer.encode(text[:SLICE_CHARS], add_special=False))
        raise _too_long(n_tokens, SLICE_CHARS, n_chars, limit)
    n_tokens = 0
    for start in range(0, n_chars, SLICE_CHARS):
        piece = text[start : start + SLICE_CHARS]
        n_tokens += max(len(tokenizer.encode(piece, add_special=False)) - SLACK_TOKENS, 0)
        if n_tokens >= limit:
            raise _too_long(n_tokens, start + len(piece), n_chars, limit)


def _too_long(n_tokens: int, n_seen: int, n_chars: int, limit: int) -> ContextTooLong:
    return ContextTooLong(max(n_tokens * n_chars // n_seen, limit), limit, estimated=True)


class PromptMaker:
    """Thread-safe: nothing but a cache changes after construction."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        context_length: int,
        n_ids: int | None = None,
        pictures: Pictures | None = None,
        tool_format: str | None = None,
        template: Template | None = None,
    ) -> None:
        """n_ids: how many tokens the model has embeddings for; None: all. pictures: None for a
        model that accepts none. tool_format: how calls are written if the template does not support
        tools; None: tools are then refused. template: None: it is read from the tokenizer."""
        self._tokenizer = tokenizer
        self._infill = detect_infill(tokenizer)
        self._context_length = context_length
        self._n_ids = n_ids
        self._pictures = pictures
        if template is None and tokenizer.chat_template is not None:
            template = Template.read(tokenizer)
        self._template = template
        self._boundaries = Boundaries(tokenizer, template.openers if template else ())
        self._tool_format = formats()[tool_format] if tool_format else None
        self._reader = PartReader(
            pictures, in_results=self._shows_pictures_in_results(), max_tokens=context_length
        )
        own = assistant_markup() - {
            *MESSAGE_OPENERS,
            *map(tokenizer.decode, ([t] for t in tokenizer.eos)),
        }
        known = {*markup_tokens(), *MESSAGE_OPENERS}
        self._typed = TypedControl(control_texts(tokenizer, known), own=own)
        self._keeps_header = lru_cache(maxsize=N_KWARGS)(self._probe_header)
        self._effort = lru_cache(maxsize=N_KWARGS)(self._nearest_effort)

    def make(self, source: Source, *, reasoning: Reasoning = TEMPLATE_DEFAULT) -> Prompt:
        """Raises BadRequest, ContextTooLong, TemplateFailed."""
        match source:
            case Chat():
                return self._chat(source, reasoning)
            case RawText():
                text = well_formed(source.text)
                typed = () if source.parse_special else self._typed.spans(text)
                ids = self._encode(Rendered(text, typed), add_special=source.add_special)
                return _plain(self._checked_ids(ids, param="prompt"))
            case RawTokens():
                return _plain(self._checked_ids(self._ids(source.ids), param="prompt"))
            case FillInMiddle():
                ids = self._checked_ids(self._infilled(source), param="prompt")
                return Prompt(ids, essential=((0, len(ids)),))  # the gap may be anywhere in it

    def ends(self, source: Source) -> frozenset[int]:
        """The tokens that end a reply to this source, in addition to those that end every reply."""
        if isinstance(source, FillInMiddle) and self._infill is not None:
            return self._infill.ends
        return frozenset()

    def tail(self, prompt: Prompt) -> str:
        """The end of the prompt's text, which shows whether the template has begun reasoning."""
        return self._tokenizer.decode([int(t) for t in prompt.ids[-TAIL_TOKENS:]])

    def _chat(self, chat: Chat, reasoning: Reasoning) -> Prompt:
        template = self._check(chat)
        read = self._reader.read(chat.messages, newest=chat.newest)
        effort = self._effort(reasoning.effort, reasoning.enabled) if reasoning.effort else None
        kwargs = {**reasoning_kwargs(reasoning.enabled, effort), **chat.template_kwargs}
        # Documents are long, and make no difference to the header.
        short = {k: v for k, v in kwargs.items() if k != "documents"}
        keeps = not chat.continues and self._keeps_header(json.dumps(short, sort_keys=True))
        continuing = CONTINUE if chat.continues else {}
        content = Content(
            normalize_calls(read.messages, template.style), chat.tools, {**kwargs, **continuing}
        )
        pictures = self._pictures_in(read.messages)
        typed = self._typed.including(pictures.tokens(self._tokenizer)) if pictures else self._typed
        rendered = typed.render(content, lambda c: well_formed(self._render(c, template, pictures)))
        if pictures is not None:
            rendered = pictures.expand(rendered)
        # The template writes the special tokens itself: adding them again would double the BOS.
        prompt = Prompt(self._encode(rendered, add_special=False), notes=read.notes)
        if pictures is not None:
            prompt = self._with_pictures(prompt, pictures)
        self._checked_ids(prompt.ids, param="messages", prompt=prompt)
        messages = self._arrange(content, template)
        # As sent: arranging messages may turn the system prompt into user text.
        sent = content.messages
        prompt = self._boundaries.marked(prompt, rendered, messages, sent=sent, keeps_header=keeps)
        return replace(prompt, essential=self._boundaries.essential(prompt, rendered, sent))

    def _check(self, chat: Chat) -> Template:
        """The template, if this model can render the chat. Raises BadRequest."""
        if self._template is None:
            raise BadRequest(
                "This model has no chat template; use the completions API.", param="messages"
            )
        if not chat.messages:
            raise BadRequest("messages: must have at least one message.", param="messages")
        last = chat.messages[-1]
        if chat.continues and (
            last.role != "assistant" or last.tool_calls or not last.text.strip()
        ):
            raise BadRequest(
                "Only the text of a last message from the assistant can be continued.",
                param="messages",
            )
        if chat.tools and not self._template.rules.tools and not self._writes_calls:
            raise BadRequest(
                "This model's chat template does not support tools; send the request without "
                "tools.",
                param="tools",
            )
        return self._template

    @property
    def _writes_calls(self) -> bool:
        return self._tool_format is not None and self._tool_format.write is not None

    @property
    def _written_format(self) -> ToolFormat:
        """How calls of history are written where the template would lose them."""
        written = self._tool_format if self._writes_calls else None
        return written or formats()[FALLBACK]

    # --- rendering -------------------------------------------------------------------------

    def _arrange(self, content: Content, template: Template) -> tuple[Message, ...]:
        messages, rules = content.messages, template.rules
        shows_calls = rules.tools and rules.calls and (rules.calls_alone or bool(content.tools))
        if not shows_calls:
            tools = () if rules.tools else content.tools
            messages = with_tools_as_text(messages, tools, self._written_format)
        return arrange(messages, rules, with_tools=bool(content.tools) and rules.tools)

    def _render(self, content: Content, template: Template, pictures: PromptPictures | None) -> str:
        plain = to_template(self._arrange(content, template), style=template.style)
        messages = pictures.written_out(plain) if pictures else plain

        def rendered(tools: Sequence[Tool]) -> str:
            given = tools_to_template(tools) or template.style.no_tools
            return self._tokenizer.render(messages, tools=given, kwargs=content.kwargs or {})

        tools = content.tools if template.rules.tools else ()
        try:
            return rendered(tools)
        except TemplateTooSlow:
            raise
        except TemplateFailed:
            if not tools:
                raise
            # The same tools always fail, so the chat's next prompt begins like this one.
            with suppress(TemplateFailed):
                return rendered([with_plain_schema(tool) for tool in tools])
            raise

    def _pictures_in(self, messages: Sequence[Message]) -> PromptPictures | None:
        if self._pictures is None or not pictures_of(messages):
            return None
        return PromptPictures(messages, self._pictures)

    def _with_pictures(self, prompt: Prompt, pictures: PromptPictures) -> Prompt:
        assert self._pictures is not None
        return replace(
            prompt,
            picture_spans=pictures.spans(prompt.ids),
            picture_inputs=tuple(picture.inputs for picture in pictures.prepared),
            whole_pictures=self._pictures.whole,
        )

    def _shows_pictures_in_results(self) -> bool:
        if self._pictures is None or self._template is None:
            return False
        if self._pictures.inline or not self._template.rules.calls:
            return True  # written into the text, or into a user turn
        placeholder = self._pictures.placeholder
        return shows_pictures_in_results(self._tokenizer, self._template, placeholder)

    def _probe_header(self, kwargs: str) -> bool:
        """Whether the next turn's prompt contains the reply's header."""
        assert self._template is not None
        return keeps_header(self._tokenizer, self._template.style, json.loads(kwargs))

    def _nearest_effort(self, effort: str, enabled: bool | None) -> str:
        assert self._template is not None
        return nearest_effort(self._tokenizer, self._template.style, effort, enabled=enabled)

    # --- ids -------------------------------------------------------------------------------

    def _encode(self, rendered: Rendered, *, add_special: bool) -> TokenArray:
        refuse_too_long(rendered.text, self._tokenizer, limit=self._context_length)
        ids = self._tokenizer.encode(rendered.text, add_special=add_special, typed=rendered.typed)
        return self._ids(ids)

    def _infilled(self, source: FillInMiddle) -> TokenArray:
        if self._infill is None:
            raise InvalidValue(
                "suffix", "this model has no tokens for filling in the middle; leave it out"
            )
        prefix, suffix = well_formed(source.prefix), well_formed(source.suffix)
        refuse_too_long(prefix + suffix, self._tokenizer, limit=self._context_length)
        typed = (lambda text: ()) if source.parse_special else self._typed.spans
        return self._ids(
            self._infill.ids(prefix, suffix, add_special=source.add_special, typed=typed)
        )

    def _ids(self, ids: Sequence[int]) -> TokenArray:
        try:
            array = np.asarray(ids, dtype=np.int64)
        except OverflowError as e:
            raise BadRequest("prompt: a token id is out of range.", param="prompt") from e
        if not len(array):
            raise BadRequest("The prompt is empty.", param="prompt")
        if len(array) >= self._context_length:
            raise ContextTooLong(len(array), self._context_length)
        return array

    def _checked_ids(
        self, ids: TokenArray, *, param: str, prompt: Prompt | None = None
    ) -> TokenArray:
        """The ids. Raises InvalidValue for a token of text that the model has no embedding for."""
        if self._n_ids is None or (int(ids.max()) < self._n_ids and int(ids.min()) >= 0):
            return ids
        text = np.ones(len(ids), dtype=np.bool_)
        for span in prompt.picture_spans if prompt else ():
            text[span.start : span.end] = False
        wrong = ids[text & ((ids >= self._n_ids) | (ids < 0))]
        if len(wrong):
            raise InvalidValue(
                param, f"the model has no token {int(wrong[0])}; it has {self._n_ids}"
            )
        return ids


def _plain(ids: TokenArray) -> Prompt:
    return Prompt(ids, essential=essential_of_text(len(ids)))
