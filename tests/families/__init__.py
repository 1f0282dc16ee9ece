"""Chat templates modelled on model families: their control tokens and rules, in our own words.

Each family is a .jinja file in this folder and a tokenizer with its tokens: byte-level BPE, trained
on a fixed text and loaded like a downloaded one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from firn.models.load.loader import load_tokenizer
from firn.models.tokenizer.hf_tokenizer import HfTokenizer
from firn.text.calls.parsers.harmony import CONTROL as CHANNELS
from tests.zoo.folder import CORPUS

HERE = Path(__file__).parent
CALLS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
THINK = ("<think>", "</think>")


@dataclass(frozen=True)
class Family:
    """special: tokens that readers never see. markup: tokens that are added, but not special.

    alternates: whether its template refuses two turns in a row by the same side. thought: the start
    of a thought that is left out of the prompt once the next question is asked. moved: the start of
    what is written before the last question.
    """

    special: tuple[str, ...]
    markup: tuple[str, ...] = ()
    eos: str = "<|im_end|>"
    bos: str | None = None
    alternates: bool = False
    thought: str = ""
    moved: str = ""


_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_BARS = ("tool▁calls▁begin", "tool▁calls▁end", "tool▁call▁begin", "tool▁call▁end", "tool▁sep")
_MISTRAL = tuple(
    f"[{name}]"
    for name in [
        "INST",
        "/INST",
        "SYSTEM_PROMPT",
        "/SYSTEM_PROMPT",
        "AVAILABLE_TOOLS",
        "/AVAILABLE_TOOLS",
        "TOOL_CALLS",
        "CALL_ID",
        "ARGS",
        "TOOL_RESULTS",
        "TOOL_CONTENT",
        "/TOOL_RESULTS",
    ]
)
_ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
_OUTPUT = ("tool▁output▁begin", "tool▁output▁end", "User", "Assistant")

FAMILIES: dict[str, Family] = {
    "qwen3": Family(_CHATML, (*THINK, *CALLS, "<|fim_prefix|>"), thought="<think>"),
    "qwen35": Family(
        (*_CHATML, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"),
        (*THINK, *CALLS),
        thought="<think>",
    ),
    "llama3": Family(
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        eos="<|eot_id|>",
        bos="<|begin_of_text|>",
    ),
    "mistral": Family(
        ("<s>", "</s>", *_MISTRAL),
        eos="</s>",
        bos="<s>",
        alternates=True,
    ),
    "nemo": Family(
        ("<s>", "</s>", *_MISTRAL),
        eos="</s>",
        bos="<s>",
        alternates=True,
        moved="[AVAILABLE_TOOLS]",
    ),
    "gemma3": Family(
        ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>"),
        ("<table>", "<h1>", "\n\n"),
        eos="<end_of_turn>",
        bos="<bos>",
        alternates=True,
    ),
    "gemma2": Family(
        ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"),
        eos="<end_of_turn>",
        bos="<bos>",
        alternates=True,
    ),
    "glm": Family(
        ("<|endoftext|>", "[gMASK]", "<sop>", *_ROLES),
        (*THINK, *CALLS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        eos="<|user|>",
        thought="<think>thought",
    ),
    "deepseek": Family(
        ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
        (*THINK, *(f"<｜{name}｜>" for name in (*_BARS, *_OUTPUT))),
        eos="<｜end▁of▁sentence｜>",
        bos="<｜begin▁of▁sentence｜>",
    ),
    "gpt_oss": Family(
        ("<|startoftext|>", *CHANNELS),
        eos="<|return|>",
        thought="<|start|>assistant<|channel|>analysis",
    ),
}


def template(name: str) -> str:
    return (HERE / f"{name}.jinja").read_text(encoding="utf-8")


@cache
def tokenizer(name: str) -> HfTokenizer:
    return with_template(name, template(name))


def with_template(name: str, source: str | None) -> HfTokenizer:
    """The family's tokens with another template, or without any."""
    family = FAMILIES[name]
    with TemporaryDirectory() as path:
        write(Path(path), family, source)
        return load_tokenizer(Path(path))


def write(path: Path, family: Family, source: str | None) -> None:
    definition = _trained(family)
    (path / "tokenizer.json").write_text(definition)
    eos = Tokenizer.from_str(definition).token_to_id(family.eos)
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": eos}))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": family.eos,
        "bos_token": family.bos,
        "chat_template": source,
        "clean_up_tokenization_spaces": False,
    }
    given = {key: value for key, value in settings.items() if value is not None}
    (path / "tokenizer_config.json").write_text(json.dumps(given))


@cache
def _trained(family: Family) -> str:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=560,
        special_tokens=list(family.special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([CORPUS], trainer)
    made.add_tokens([AddedToken(text, special=False, normalized=False) for text in family.markup])
    return str(made.to_str())
