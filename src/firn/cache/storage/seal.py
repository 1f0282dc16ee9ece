"""Encryption at rest: AES-256-GCM with a separate key for each record.

    record key = HMAC-SHA256(key file's key, "firn record" + the record's random salt)
    nonce      = a counter: 0 for the head, 1.. for the pieces of the body

No salt is used twice, so no (key, nonce) pair is either. Every piece carries a 16-byte tag. File
names and links between records stay readable. They are hashes: anyone who guesses a whole prompt
can tell that it is stored, and learns nothing else.

The key file contains 32 raw bytes, or 64 hex digits, or a passphrase of at least 12 characters. A
passphrase is stretched with scrypt under a fixed salt, so that a file gives the same key everywhere;
`openssl rand -hex 32` makes a better key than any passphrase.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from firn.cache.storage.faults import Damaged
from firn.cache.tiers import Buffer
from firn.core.errors import SetupError

log = logging.getLogger("firn.cache")

SALT_NBYTES = 16
TAG_NBYTES = 16
PIECE_NBYTES = 64 << 20
"""One call of AES-GCM accepts at most 2 GiB; smaller pieces also mean smaller copies."""
MIN_PASSPHRASE = 12
_HEX = re.compile(rb"\s*([0-9a-fA-F]{64})\s*")


class RecordCipher:
    """Seals and opens the pieces of one record. Owner: the caller that packs or unpacks it."""

    def __init__(self, aead: Any, tag_error: type[Exception]) -> None:
        self._aead = aead
        self._tag_error = tag_error

    def seal(self, index: int, data: Buffer, aad: bytes = b"") -> bytes:
        sealed: bytes = self._aead.encrypt(index.to_bytes(12, "little"), data, aad)
        return sealed

    def open(self, index: int, data: Buffer, aad: bytes = b"") -> bytes:
        try:
            opened: bytes = self._aead.decrypt(index.to_bytes(12, "little"), data, aad)
        except self._tag_error as e:
            raise Damaged("bad checksum", "authentication tag") from e
        return opened


class Seal:
    """A key. Frozen after construction; used by all I/O threads."""

    def __init__(self, key: bytes) -> None:
        """Raises SetupError when the `cryptography` package is missing."""
        if len(key) != 32:
            raise ValueError("a key must have 32 bytes")
        self._key = key
        self._make_cipher = _cipher_maker()
        self.id = hmac.digest(key, b"firn key id", "sha256")[:8].hex()
        """Identifies the key without revealing it."""

    def cipher(self, salt: bytes) -> RecordCipher:
        """The cipher of the record with this salt."""
        return self._make_cipher(hmac.digest(self._key, b"firn record" + salt, "sha256"))


def _cipher_maker() -> Callable[[bytes], RecordCipher]:
    try:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as e:
        raise SetupError(
            "Encrypting the cache needs the package cryptography: pip install 'firn[encryption]'."
        ) from e
    return lambda key: RecordCipher(AESGCM(key), InvalidTag)


def load_seal(path: Path) -> Seal:
    """The key of a key file. Raises SetupError."""
    try:
        raw = path.read_bytes()
        mode = path.stat().st_mode
    except OSError as e:
        raise SetupError(f"{path}: the cache key cannot be read: {e.strerror or e}") from e
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        log.warning("%s: other users may read the cache key; chmod 600 it", path)
    return Seal(_key_of(raw, path))


def _key_of(raw: bytes, path: Path) -> bytes:
    if len(raw) == 32:
        return raw
    if digits := _HEX.fullmatch(raw):
        return bytes.fromhex(digits[1].decode())
    phrase = raw.strip()
    if len(phrase) < MIN_PASSPHRASE:
        raise SetupError(
            f"{path}: a cache key is 32 bytes, 64 hex digits, or a passphrase of at least "
            f"{MIN_PASSPHRASE} characters."
        )
    return hashlib.scrypt(
        phrase, salt=b"firn cache key", n=1 << 15, r=8, p=1, maxmem=64 << 20, dklen=32
    )
