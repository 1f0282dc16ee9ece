"""Real tokenizers, trained on the spot: byte-level BPE, and SentencePiece kinds with byte fallback."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from typing import Any

import jinja2
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from firn.models.tokenizer.plain_text import PlainText

CONTROL = (
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<bos>",
    "[INST]",
    "[/INST]",
    "</s>",
    "<|odd_open|>",
    "<|odd_close|>",
)
MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>")

CHATML = (
    "{%- if tools %}<|im_start|>system\nTools:{{ tools | tojson }}<|im_end|>\n{% endif -%}"
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{%- for c in m.tool_calls %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor -%}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and "
    "enable_thinking %}<think>\n{% endif %}{% endif -%}"
)

CORPUS = (
    "The quick brown fox jumps over the lazy dog. ",
    "def f(x):\n    return {'a': [1, 2, 3], \"b\": x ** 2}\n\n\n",
    "Grüße aus München, ça va très bien, señor, naïve façade. ",
    "日本語のテキストと中文字符混合在一起。 ",
    "Привет, мир! Как дела? ",
    "🙂🙃 👩‍👩‍👧‍👦 family 🇩🇪 flags 🏳️‍🌈 ",
    "system user assistant Tools: name arguments \n\t ",
)
HARD_TEXTS = (
    "",
    " ",
    "   leading spaces kept",
    "trailing spaces   ",
    "\n\n\tindent\n    four",
    "a  b   c",
    "naïve café — “quotes” … ™",
    "日本語と English と 中文 mixed 한국어",
    "🙂🙃👩‍👩‍👧‍👦🇩🇪🏳️‍🌈 z̸̢̛a̷l̶g̵o",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𓀀𓀁 ﷽",
    "x\u0000y\u200bz\u00a0w",
    "<|im_start|>not hidden by itself<think>hm</think>",
)


class TrainedTokenizer:
    """Implements the tokenizer port with a tokenizer of the `tokenizers` library."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        byte_level: bool,
        special: Sequence[str] = CONTROL,
        chat_template: str | None = CHATML,
    ) -> None:
        self._tokenizer = tokenizer
        self._byte_level = byte_level
        self._chat_template = chat_template
        self._special = frozenset(self._known(special))
        self.longest_decode = 0

    def _known(self, texts: Sequence[str]) -> list[int]:
        ids = [self._tokenizer.token_to_id(text) for text in texts]
        return [i for i in ids if i is not None]

    @property
    def vocab_size(self) -> int:
        return int(self._tokenizer.get_vocab_size())

    @property
    def eos(self) -> frozenset[int]:
        return frozenset(self._known(["<|im_end|>"]))

    @property
    def special(self) -> frozenset[int]:
        return self._special

    @property
    def added_tokens(self) -> Mapping[str, int]:
        named = {text: self._tokenizer.token_to_id(text) for text in (*CONTROL, *MARKUP)}
        return {text: id for text, id in named.items() if id is not None}

    @property
    def max_token_chars(self) -> int:
        return max(map(len, self._tokenizer.get_vocab()))

    @property
    def chat_template(self) -> str | None:
        return self._chat_template

    @cached_property
    def _plain(self) -> PlainText:
        return PlainText(self._tokenizer.to_str(), self.added_tokens)

    @cached_property
    def _compiled(self) -> jinja2.Template:
        assert self._chat_template is not None
        return jinja2.Environment().from_string(self._chat_template)

    def with_template(self, source: str | None) -> TrainedTokenizer:
        return TrainedTokenizer(self._tokenizer, byte_level=self._byte_level, chat_template=source)

    def encode(
        self, text: str, *, add_special: bool, typed: Sequence[tuple[int, int]] = ()
    ) -> list[int]:
        if typed:
            return self._plain.encode(text, typed)
        return list(self._tokenizer.encode(text, add_special_tokens=add_special).ids)

    def decode(self, ids: Sequence[int]) -> str:
        self.longest_decode = max(self.longest_decode, len(ids))
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def token_bytes(self, token: int) -> bytes:
        text = self._tokenizer.id_to_token(token)
        if text in CONTROL or text in MARKUP:
            return str(text).encode()
        if self._byte_level:
            return bytes(_BYTE_OF[c] for c in text)
        if text.startswith("<0x"):
            return bytes([int(text[3:5], 16)])
        return str(text).replace("▁", " ").encode()

    def token_id(self, text: str) -> int | None:
        token = self._tokenizer.token_to_id(text)
        return None if token is None else int(token)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        kwargs: Mapping[str, Any],
    ) -> str:
        options = {"add_generation_prompt": True, "tools": tools, **kwargs}
        return self._compiled.render(messages=messages, **options)


@cache
def byte_level() -> TrainedTokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[*CONTROL, *MARKUP],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    return TrainedTokenizer(tokenizer, byte_level=True)


@cache
def fallback(*, strips: bool) -> TrainedTokenizer:
    """Unigram with marks for spaces, and bytes where it has no piece.

    strips: decodes like Llama 2, without the first space; otherwise with the Metaspace decoder.
    """
    trainer = trainers.UnigramTrainer(
        vocab_size=300,
        special_tokens=["<unk>", *CONTROL, *MARKUP],
        unk_token="<unk>",
        show_progress=False,
    )
    raw = Tokenizer(models.Unigram())
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.train_from_iterator(CORPUS[:3], trainer)
    byte_pieces = [(f"<0x{b:02X}>", -20.0) for b in range(256)]
    pieces = [(p, s) for p, s in _unigram_pieces(raw) if p not in CONTROL and p not in MARKUP]
    model = models.Unigram([*pieces, *byte_pieces], unk_id=0, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = (
        decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
        if strips
        else decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    )
    tokenizer.add_special_tokens([*CONTROL, *MARKUP])
    return TrainedTokenizer(tokenizer, byte_level=False)


def _unigram_pieces(tokenizer: Tokenizer) -> list[tuple[str, float]]:

    return [(p, s) for p, s in json.loads(tokenizer.to_str())["model"]["vocab"]]


def _byte_alphabet() -> dict[str, int]:
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF = _byte_alphabet()
