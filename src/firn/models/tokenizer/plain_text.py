"""A copy of a tokenizer that treats the names of added tokens as plain text.

In the copy each added token has a secret name. Where a text means the token, its secret name is
written instead; a name that a user has typed is no longer special. The rest of the tokenizer is
unchanged, so the surrounding tokens are the same, even where text and token meet.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from firn.models.tokenizer.piecewise import PiecewiseEncoder


class PlainText:
    """Thread-safe."""

    def __init__(self, definition: str, added: Mapping[str, int]) -> None:
        """`definition`: the original's tokenizer.json. Raises ValueError if it cannot be copied."""
        nonce = secrets.token_hex(8)
        self._secret = {text: f"\ue000{nonce}k{i}\ue001" for i, text in enumerate(added)}
        names = sorted(filter(None, added), key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, names)) or "(?!)")
        try:
            copy = Tokenizer.from_str(_renamed(definition, self._secret))
        except Exception as e:  # tokenizers raises bare ones
            raise ValueError(str(e)) from e
        self._encoder = PiecewiseEncoder(copy, copy.get_vocab())
        ids = {copy.token_to_id(self._secret[text]): id for text, id in added.items()}
        self._ids = {theirs: ours for theirs, ours in ids.items() if theirs != ours}

    def encode(self, text: str, typed: Sequence[tuple[int, int]]) -> list[int]:
        """Tokens of the text alone; within the spans `typed`, names of added tokens are plain text."""
        pieces, at = [], 0
        for start, end in [*typed, (len(text), len(text))]:
            pieces += [self._added.sub(self._hide, text[at:start]), text[start:end]]
            at = end
        ids = self._encoder.encode("".join(pieces))
        return [self._ids.get(i, i) for i in ids] if self._ids else ids

    def _hide(self, name: re.Match[str]) -> str:
        return self._secret[name[0]]


def _renamed(definition: str, secret: Mapping[str, str]) -> str:
    content: dict[str, Any] = json.loads(definition)
    for token in content["added_tokens"]:
        # Only firn writes the secret names, so they need no normalisation.
        token["content"] = secret.get(token["content"], token["content"])
        token["normalized"] = False
    model = content["model"]
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {secret.get(text, text): id for text, id in vocabulary.items()}
    else:
        model["vocab"] = [[secret.get(text, text), score] for text, score in vocabulary]
    if model.get("unk_token") in secret:
        model["unk_token"] = secret[model["unk_token"]]
    return json.dumps(content, ensure_ascii=False)
