"""The tokenizer port over mlx-lm's wrapper of a Hugging Face tokenizer. Thread-safe.

Encoding and decoding call the Rust tokenizer directly where there is one: the Python layer above it
sets truncation and padding on each call, which two threads must not do at the same time.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

from firn.core.errors import TemplateFailed, TemplateTooSlow
from firn.models.tokenizer.piecewise import PiecewiseEncoder
from firn.models.tokenizer.plain_text import PlainText
from firn.models.tokenizer.template_guard import RenderTooSlow, guard

log = logging.getLogger("firn.models")

TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    KeyError,
    IndexError,
    AttributeError,
    ArithmeticError,
    NotImplementedError,
)
UNBOUNDED = 2**31
_OWN_TOOLS = re.compile(r"\+ functions\b.*\+ datetime\b", re.DOTALL)
"""FireFunction's template takes tools as JSON text, and the time: both under names of its own."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class HfTokenizer:
    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper
        self._hf = wrapper._tokenizer
        self._fast = getattr(self._hf, "backend_tokenizer", None)
        if self._fast is not None:
            # The file may have settings from training; prompts must not be truncated or padded.
            self._fast.no_truncation()
            self._fast.no_padding()
        self._pieces = None if self._fast is None else PiecewiseEncoder(self._fast, self._vocab)
        self._copying = threading.Lock()
        self._plain: PlainText | None = None
        self._has_copy = self._fast is not None

    @property
    def tool_parser(self) -> tuple[str, str, str, Callable[..., Any]] | None:
        """The tool-call parser that mlx-lm found for this template: name, markers, function."""
        w = self._wrapper
        if not w.has_tool_calling or w.tool_parser is None:
            return None
        name = str(self._hf.init_kwargs.get("tool_parser_type", "native"))
        return name, w.tool_call_start or "", w.tool_call_end or "", w.tool_parser

    @cached_property
    def eos(self) -> frozenset[int]:
        """May contain ids that the vocabulary does not have: they come from configuration files."""
        return frozenset(int(t) for t in self._wrapper.eos_token_ids if t >= 0)

    @cached_property
    def special(self) -> frozenset[int]:
        added = self._hf.added_tokens_decoder.items()
        ids = (int(token) for token, definition in added if definition.special)
        return frozenset([*self._hf.all_special_ids, *ids])

    @cached_property
    def added(self) -> frozenset[int]:
        """Ids that were added to the vocabulary by name: control tokens and markup."""
        return frozenset(int(t) for t in self._hf.added_tokens_decoder)

    @cached_property
    def added_tokens(self) -> Mapping[str, int]:
        return {str(t.content): int(i) for i, t in self._hf.added_tokens_decoder.items()}

    @cached_property
    def max_token_chars(self) -> int:
        model = getattr(self._fast, "model", None)
        if getattr(model, "fuse_unk", False) and not getattr(model, "byte_fallback", False):
            return UNBOUNDED  # a run of unknown characters is one token
        return max(map(len, self._vocab), default=1)

    @cached_property
    def n_ids(self) -> int:
        """One more than the largest id; a model's logits may be wider, or narrower."""
        return max(self._vocab.values(), default=-1) + 1

    @property
    def definition(self) -> str | None:
        """The Rust tokenizer as its tokenizer.json; None where there is none."""
        return None if self._fast is None else str(self._fast.to_str())

    @cached_property
    def chat_template(self) -> str | None:
        if not self._wrapper.has_chat_template:
            return None
        return "\n".join(dict.fromkeys(filter(None, (self._template, self._tool_template))))

    @cached_property
    def _named_templates(self) -> Mapping[str, str]:
        """Most models have one template; a few have one for chats with tools, and others."""
        own = self._hf.chat_template
        return own if isinstance(own, dict) else {"default": own} if isinstance(own, str) else {}

    @property
    def _template(self) -> str | None:
        named = self._named_templates
        return named.get("default") or next(iter(named.values()), None)

    @property
    def _tool_template(self) -> str | None:
        return self._named_templates.get("tool_use") or self._template

    def encode(
        self, text: str, *, add_special: bool, typed: Sequence[tuple[int, int]] = ()
    ) -> list[int]:
        if add_special:
            if self._frame is None and not typed:
                return self._whole(text, add_special=True)
            before, after = self._frame or ([], [])
            return [*before, *self.encode(text, add_special=False, typed=typed), *after]
        if typed:
            return self._encode_typed(text, typed)
        if self._pieces is not None:
            return self._pieces.encode(text)
        return self._whole(text, add_special=False)

    def _whole(self, text: str, *, add_special: bool) -> list[int]:
        if self._fast is not None:
            return list(self._fast.encode(text, add_special_tokens=add_special).ids)
        return list(self._hf.encode(text, add_special_tokens=add_special))

    def _encode_typed(self, text: str, typed: Sequence[tuple[int, int]]) -> list[int]:
        plain = self._plain_text()
        if plain is not None:
            return plain.encode(text, typed)
        # A name that is cut after its first character is not recognised: it is encoded as text,
        # though not in its usual tokens.
        ids: list[int] = []
        at = 0
        for start, _ in typed:
            ids += self.encode(text[at : start + 1], add_special=False)
            at = start + 1
        return ids + self.encode(text[at:], add_special=False)

    def _plain_text(self) -> PlainText | None:
        """Created on first use: it takes as much time and memory as the tokenizer itself."""
        with self._copying:
            if self._plain is None and self._has_copy:
                try:
                    self._plain = PlainText(self.definition or "", self.added_tokens)
                except ValueError as e:
                    self._has_copy = False
                    log.info(
                        "the tokenizer cannot be copied, so typed control tokens are split: %s", e
                    )
            return self._plain

    @cached_property
    def _frame(self) -> tuple[list[int], list[int]] | None:
        """Tokens that `add_special` puts before and after a text; None: it does something else."""
        bare, whole = (self._whole("a", add_special=add) for add in (False, True))
        for at in range(len(whole) - len(bare) + 1):
            if whole[at : at + len(bare)] == bare:
                return whole[:at], whole[at + len(bare) :]
        return None

    def decode(self, ids: Sequence[int]) -> str:
        if self._fast is not None:
            return str(self._fast.decode(list(ids), skip_special_tokens=False))
        return str(
            self._hf.decode(
                list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def token_bytes(self, token: int) -> bytes:
        text = self._hf.convert_ids_to_tokens(token)
        if text is None:
            return b""
        if token in self.added:
            return str(text).encode()
        if self._byte_level:
            return bytes(_BYTES_OF_CHAR[c] for c in text if c in _BYTES_OF_CHAR)
        byte = _BYTE_TOKEN.fullmatch(text)
        if byte:
            return bytes([int(byte[1], 16)])
        return str(text).replace("\u2581", " ").encode()

    def token_id(self, text: str) -> int | None:
        if self._byte_level:
            spelled = "".join(_CHAR_OF_BYTE[b] for b in text.encode())
        else:
            spelled = text.replace(" ", "\u2581")
        for form in (text, spelled):
            token = self._vocab.get(form)
            # The entry found under this spelling may be a token for another text.
            if token is not None and self.token_bytes(token) == text.encode():
                return int(token)
        return None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        kwargs: Mapping[str, Any],
    ) -> str:
        options: dict[str, Any] = {"add_generation_prompt": True, **kwargs}
        if tools is not None:
            options["tools"] = list(tools)
        # Calls without tools are what is left of a chat that had them: its template stays the same.
        about_tools = bool(tools) or any(m.get("tool_calls") for m in messages)
        source = self._tool_template if about_tools else self._template
        try:
            if source is None or self._has_own_renderer:
                return str(
                    self._wrapper.apply_chat_template(list(messages), tokenize=False, **options)
                )
            guard(source)
            options.setdefault("enable_thinking", self._wrapper.has_thinking)
            if _OWN_TOOLS.search(source):
                options.setdefault("functions", json.dumps(options.get("tools") or [], indent=4))
                options.setdefault("datetime", f"{datetime.now(UTC):%Y-%m-%d} 00:00:00 GMT")
            return _render(source, list(messages), {**self._hf.special_tokens_map, **options})
        except RenderTooSlow as e:
            raise TemplateTooSlow(str(e)) from e
        except RecursionError:
            raise TemplateFailed("the messages or the tools are nested too deeply") from None
        except TEMPLATE_FAULTS as e:
            raise TemplateFailed(str(e) or type(e).__name__) from e

    @cached_property
    def _has_own_renderer(self) -> bool:
        """Whether its template is code: one of mlx-lm's functions, or the tokenizer's own method."""
        inherited = PreTrainedTokenizerBase.apply_chat_template
        own = getattr(type(self._hf), "apply_chat_template", None)
        return self._wrapper._chat_template is not None or own is not inherited

    @cached_property
    def _vocab(self) -> dict[str, int]:
        return dict(self._hf.get_vocab())

    @cached_property
    def _byte_level(self) -> bool:
        return self._fast is not None and "ByteLevel" in repr(self._fast.decoder)


def _render(source: str, messages: list[Mapping[str, Any]], options: dict[str, Any]) -> str:
    """What `apply_chat_template` does, without leaving out fields that are None.

    Some templates write a call only where a message's content is None.
    """
    rendered, _ = chat_template_utils.render_jinja_template(
        [messages], chat_template=source, **options
    )
    return str(rendered[0])


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes: printable Latin-1 as is, the others from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTES_OF_CHAR = _byte_alphabet()
_CHAR_OF_BYTE = {b: c for c, b in _BYTES_OF_CHAR.items()}
