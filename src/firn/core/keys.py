"""Content addresses: one chained hash for every tier.

    root  = H(format, model fingerprint, layout, namespace)
    key_i = H(key_{i-1}, the block's key tokens)

Key tokens have 64 bits: for text, the token id; for a position inside a picture, a hash of the picture's
content digest and of that position, with the top bit set. If a prompt has gaps, the upper half holds the
token's position. If the prompt has a salt, its first key token is a hash of the salt and of that token:
every key of its chain then depends on both the namespace and the salt. Each field is prefixed with its
length, so that different lists of fields never hash the same bytes. Keys are the same in every process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import NewType

import numpy as np

from firn.core.values import KeyTokens, Namespace, PackedTokens, PictureSpan, Prompt, TokenArray

FORMAT_VERSION = 1
Key = NewType("Key", bytes)

_DIGEST_BIT = np.uint64(1 << 63)


def prompt_tokens(prompt: Prompt) -> KeyTokens:
    """The key tokens of a prompt: what its chain of keys, and every comparison, is made from."""
    values = key_tokens(prompt.ids, prompt.picture_spans)
    values |= prompt.positions.marks(0, len(values))
    if prompt.salt:
        values[0] = _digest_token(b"salt", [prompt.salt.encode(), values[0].tobytes()])
    return values


def packed_tokens(prompt: Prompt) -> PackedTokens:
    """The prompt's key tokens for comparisons. Computed once, by the first thread that asks; it should
    not be the engine's: a million tokens take up to 20 ms, mostly page faults."""
    made = prompt.made
    if made.key_tokens is None:
        made.key_tokens = PackedTokens(prompt_tokens(prompt))
    return made.key_tokens


def reply_tokens(prompt: Prompt, reply: Sequence[int], first: int) -> KeyTokens:
    """The key tokens of a part of the reply to this prompt, from its token `first` on."""
    start = len(prompt) + first
    tokens: KeyTokens = np.array(reply, dtype=np.uint64)
    tokens |= prompt.positions.marks(start, start + len(reply))
    return tokens


def key_tokens(ids: TokenArray, picture_spans: Sequence[PictureSpan] = ()) -> KeyTokens:
    values = ids.astype(np.uint64)
    for span in picture_spans:
        values[span.start : span.end] = _picture_tokens(span.digest, span.end - span.start)
    return values


@lru_cache(maxsize=1024)
def _picture_tokens(digest: bytes, n: int) -> KeyTokens:
    """Remembered: a chat's pictures come again with every turn, and each has a thousand tokens."""
    tokens = (_digest_token(b"image", [digest, i.to_bytes(8, "little")]) for i in range(n))
    return np.fromiter(tokens, np.uint64, n)


def _digest_token(kind: bytes, fields: Sequence[bytes]) -> np.uint64:
    """A key token that no token of text equals."""
    return np.uint64(np.frombuffer(_hash(kind, fields)[:8], dtype="<u8")[0] | _DIGEST_BIT)


def root_key(*, fingerprint: bytes, layout: str, namespace: Namespace) -> Key:
    fields = [fingerprint, layout.encode(), namespace.encode()]
    return Key(_hash(b"root", [FORMAT_VERSION.to_bytes(4, "little"), *fields]))


def child_key(parent: Key, values: KeyTokens) -> Key:
    return Key(_hash(b"node", [parent, values.astype("<u8", copy=False).tobytes()]))


def block_keys(parent: Key, values: KeyTokens, block: int) -> list[Key]:
    """The keys of a chain: one for each whole block of these tokens, starting below `parent`."""
    keys: list[Key] = []
    for start in range(0, len(values) - block + 1, block):
        parent = child_key(parent, values[start : start + block])
        keys.append(parent)
    return keys


def _hash(kind: bytes, fields: Sequence[bytes]) -> bytes:
    digest = hashlib.blake2b(digest_size=32, person=b"firn-" + kind)
    for field in fields:
        digest.update(len(field).to_bytes(8, "little"))
        digest.update(field)
    return digest.digest()
