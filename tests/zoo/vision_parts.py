"""What every tiny vision model is made of: its record, its tokenizer, its chat template."""

import functools
import json
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from .base import Config
from .folder import CORPUS

VOCAB_SIZE = 480
GRID_TOKENS = tuple(f"<row_{r}_col_{c}>" for r in range(1, 4) for c in range(1, 4))
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<bos>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<image>",
    "<start_of_image>",
    "<end_of_image>",
    "<image_soft_token>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|image|>",
    "<|image>",
    "<image|>",
    "<|video|>",
    "<|audio|>",
    "[INST]",
    "[/INST]",
    "[IMG]",
    "[IMG_BREAK]",
    "[IMG_END]",
    "<fake_token_around_image>",
    "<global-img>",
    "<end_of_utterance>",
    "<|image_start|>",
    "<|image_end|>",
    "<|img_thumbnail|>",
    *GRID_TOKENS,
    *(f"<|img_row_{r}_col_{c}|>" for r in range(1, 4) for c in range(1, 4)),
    "<|begin_of_image|>",
    "<|end_of_image|>",
    "<audio_soft_token>",
    "<start_of_audio>",
    "<end_of_audio>",
    "<img>",
    "</img>",
    "<IMG_CONTEXT>",
    "<|START_OF_IMG|>",
    "<|END_OF_IMG|>",
    "<|IMG_PATCH|>",
    "<|IMG_LINE_BREAK|>",
    "<|media_start|>",
    "<|media_content|>",
    "<|media_pad|>",
    "<|media_end|>",
)


def token_id(text: str) -> int:
    return SPECIAL_TOKENS.index(text)


@functools.cache
def tokenizer_json() -> str:
    """Byte-level BPE with the control tokens of all the families, trained once per process."""
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
    return tokenizer.to_str()


# Text and pictures in the order they come, as Qwen does it.
CHATML = """{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{- message.content }}{% else %}
{%- for part in message.content %}
{%- if part.type == 'image' %}{{- MARKUP }}{% else %}{{- part.text }}{% endif %}
{%- endfor %}{% endif %}{{- '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""

GEMMA = """{{- bos_token }}{%- for message in messages %}
{%- set role = 'model' if message.role == 'assistant' else message.role %}
{{- '<start_of_turn>' + role + '\\n' }}
{%- if message.content is string %}{{- message.content | trim }}{% else %}
{%- for part in message.content %}
{%- if part.type == 'image' %}{{- MARKUP }}{% else %}{{- part.text | trim }}{% endif %}
{%- endfor %}{% endif %}{{- '<end_of_turn>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{% endif %}"""

# All pictures of a message before its text, and no strings for content: LLaVA's own.
LLAVA = """{% for message in messages %}{{ message['role'].upper() + ': ' }}
{%- for part in message['content'] | selectattr('type', 'equalto', 'image') %}{{ MARKUP }}
{%- endfor %}
{%- for part in message['content'] | selectattr('type', 'equalto', 'text') %}
{{- part['text'] + ' ' }}{% endfor %}{% endfor %}
{%- if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"""

MISTRAL = """{{- bos_token }}{%- for message in messages %}
{%- if message.role == 'user' %}{{- '[INST]' }}
{%- if message.content is string %}{{- message.content }}{% else %}
{%- for part in message.content %}
{%- if part.type == 'image' %}{{- MARKUP }}{% else %}{{- part.text }}{% endif %}
{%- endfor %}{% endif %}{{- '[/INST]' }}{% else %}{{- message.content + '<|im_end|>' }}{% endif %}
{%- endfor %}"""

# Idefics' own: a colon without a space before a picture, parts only.
IDEFICS = """<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}
{%- if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}
{%- for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}
{%- elif line['type'] == 'image' %}{{ MARKUP }}{% endif %}{% endfor %}<end_of_utterance>
{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""

# Knows nothing of pictures.
TEXT_ONLY = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""


@dataclass(frozen=True)
class VisionEntry:
    """One tiny vision model.

    markup: what the chat template writes for a picture. preprocessor, processor: the two files.
    extra_tokens: names under which the tokenizer knows control tokens.
    """

    name: str
    config: Config
    markup: str
    template: str = CHATML
    preprocessor: Config = field(default_factory=dict)
    processor: Config = field(default_factory=dict)
    extra_tokens: dict[str, str] = field(default_factory=dict)
    gains: dict[str, float] = field(default_factory=dict)
    notes: str = ""

    @property
    def chat_template(self) -> str:
        return self.template.replace("MARKUP", json.dumps(self.markup))


def tokenizer_config(entry: VisionEntry) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
        "extra_special_tokens": entry.extra_tokens,
        "chat_template": entry.chat_template,
    }
