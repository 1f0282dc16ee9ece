"""The tokenizer and chat template of a GGUF file, as the files of a model folder. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from firn.models.load.gguf.file import GgufFile, UnreadableGguf

BYTE_LEVEL_BPE = "gpt2"
CONTROL, USER_DEFINED = 3, 4
"""GGUF's token types that are recognised before a text is split into words."""
ROLES = {"bos": "bos", "eos": "eos", "padding": "pad", "unknown": "unk"}
"""GGUF's names of special tokens -> those of transformers."""


def files(gguf: GgufFile) -> dict[str, str]:
    """Contents by file name. Raises UnreadableGguf if the vocabulary is of another kind."""
    tokens = gguf.texts("tokenizer.ggml.tokens")
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": gguf.integer("llama.context_length"),
    }
    settings |= {f"{role}_token": tokens[i] for role, i in special_ids(gguf).items()}
    contents = {
        "tokenizer.json": _tokenizer(gguf, tokens).to_str(),
        "tokenizer_config.json": json.dumps(settings, indent=2, ensure_ascii=False),
    }
    if "tokenizer.chat_template" in gguf.metadata:
        contents["chat_template.jinja"] = gguf.text("tokenizer.chat_template")
    return contents


def special_ids(gguf: GgufFile) -> Mapping[str, int]:
    """The ids of special tokens in the file, by transformers' name of the role."""
    n_tokens = len(gguf.texts("tokenizer.ggml.tokens"))
    ids = {}
    for theirs, ours in ROLES.items():
        key = f"tokenizer.ggml.{theirs}_token_id"
        if key in gguf.metadata:
            ids[ours] = gguf.integer(key)
            if not 0 <= ids[ours] < n_tokens:
                raise UnreadableGguf(
                    f"{key} is {ids[ours]}, which is none of its {n_tokens} tokens"
                )
    return ids


def _tokenizer(gguf: GgufFile, tokens: list[str]) -> Tokenizer:
    kind, pre = gguf.text("tokenizer.ggml.model"), gguf.text("tokenizer.ggml.pre")
    if kind != BYTE_LEVEL_BPE or pre != "smollm":
        raise UnreadableGguf(
            f"its tokenizer is {kind}, {pre}; firn converts {BYTE_LEVEL_BPE}, smollm"
        )
    if gguf.metadata.get("tokenizer.ggml.add_bos_token"):
        raise UnreadableGguf(
            "its tokenizer puts a token before every text, which firn does not convert"
        )
    pairs = (pair.partition(" ") for pair in gguf.texts("tokenizer.ggml.merges"))
    merges = [(left, right) for left, _, right in pairs]
    types = gguf.integers("tokenizer.ggml.token_type")
    if len(types) != len(tokens) or len(set(tokens)) != len(tokens):
        raise UnreadableGguf("its vocabulary has tokens without a type, or the same one twice")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    except Exception as e:  # tokenizers raises nothing more specific
        raise UnreadableGguf(f"its vocabulary does not fit its merges: {e}") from e
    # Digits one by one, then GPT-2's words.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    for token, type in zip(tokens, types, strict=True):
        if type in (CONTROL, USER_DEFINED):
            special = type == CONTROL
            added = [AddedToken(token, special=special, normalized=False)]
            (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    return tokenizer
