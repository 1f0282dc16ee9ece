"""Write a tiny model as a folder that `mlx_lm.load` reads like a downloaded one.

The tokenizer is byte-level BPE, trained on a fixed text, with ChatML and tool-call tokens.
"""

import functools
import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from .base import VOCAB_SIZE, Config

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
)

# Only these are hidden from decoded text; the others are markup that a parser must see.
CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

# Rich enough that training fills the vocabulary.
CORPUS = """
Snow that outlives its season becomes firn: grains packed by their own weight, older than snow and
not yet ice. Each winter lays a new sheet over the last, and a traveller who reads the layers from
the top can tell the years apart. The server keeps what it has read in the same way. A prompt that
arrives a second time finds its beginning already there, and only the end has to be computed.
{"name": "read_file", "arguments": {"path": "src/main.py", "limit": 200}}
def answer(question: str) -> str:
    return "forty-two" if question else ""
system user assistant You are a helpful assistant. What is the weather in Paris and in Oslo today?
The quick brown fox jumps over the lazy dog; pack my box with five dozen liquor jugs. 0123456789
"""

CHAT_TEMPLATE = """{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{% endif %}
{{- '# Tools\\n' }}
{%- for tool in tools %}{{- tool | tojson + '\\n' }}{% endfor %}
{{- 'Call a tool as <tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if not (tools and loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content %}{{- message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n' + (call.function or call) | tojson + '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""


@functools.cache
def tokenizer_json() -> str:
    """The tokenizer, trained once per process; training is deterministic."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([CORPUS], trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(f"the corpus fills {tokenizer.get_vocab_size()} of {VOCAB_SIZE} ids")
    content = json.loads(tokenizer.to_str())
    for token in content["added_tokens"]:
        token["special"] = token["content"] in CONTROL_TOKENS
    return json.dumps(content)


def write(model: nn.Module, config: Config, path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)
    eos = SPECIAL_TOKENS.index("<|im_end|>")
    (path / "config.json").write_text(json.dumps({"eos_token_id": eos, **config}, indent=1))
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})
    (path / "tokenizer.json").write_text(tokenizer_json())
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
