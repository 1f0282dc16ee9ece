"""Who is calling: API keys, and the cache namespace each of them gets."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from firn.core.errors import Unauthorized
from firn.core.values import Namespace

SHARED = Namespace("shared")
"""The one namespace where there are no keys, or where all keys share a cache."""

RawHeaders = Iterable[tuple[bytes, bytes]]


def namespace_of(key: str) -> Namespace:
    """The namespace of one API key: a digest, since it ends up in file names and logs."""
    digest = hashlib.blake2b(key.encode(), digest_size=16, person=b"firn-namespace")
    return Namespace(digest.hexdigest())


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks. own: what it left here is under this name, and nobody else's. namespace: where its
    prefixes are cached, which it may share."""

    own: Namespace
    namespace: Namespace


ANYONE = Caller(SHARED, SHARED)
"""Every caller of a server without keys."""


class Keys:
    """The accepted API keys; none at all means that everyone may call. Never changed."""

    def __init__(self, keys: Sequence[str] = (), *, share: bool = False) -> None:
        self._share = share
        self._entries = tuple(
            (
                _digest(key.encode()),
                Caller(namespace_of(key), SHARED if share else namespace_of(key)),
            )
            for key in dict.fromkeys(keys)
        )

    @property
    def required(self) -> bool:
        return bool(self._entries)

    @property
    def private(self) -> bool:
        """Whether callers have namespaces of their own."""
        return self.required and not self._share

    @property
    def namespaces(self) -> tuple[Namespace, ...]:
        """Every namespace of the cache that a caller can have."""
        return tuple(dict.fromkeys(caller.namespace for _, caller in self._entries)) or (SHARED,)

    def admit(self, headers: RawHeaders) -> Caller:
        """Raises Unauthorized."""
        if not self._entries:
            return ANYONE
        presented = list(_presented(headers))
        if not presented:
            raise Unauthorized(
                "This server needs an API key: send it as 'Authorization: Bearer KEY' "
                "or 'x-api-key: KEY'."
            )
        admitted: Caller | None = None
        for candidate in map(_digest, presented):
            # Every key is compared, so the time taken tells nothing about which one was close.
            for digest, caller in self._entries:
                if hmac.compare_digest(candidate, digest):
                    admitted = caller
        if admitted is None:
            raise Unauthorized("This API key is not known here.")
        return admitted


def _digest(key: bytes) -> bytes:
    # compare_digest takes no time to find that two lengths differ; digests all have one length.
    return hashlib.sha256(key).digest()


def _presented(headers: RawHeaders) -> Iterable[bytes]:
    for name, value in headers:
        if name == b"authorization":
            scheme, _, token = value.partition(b" ")
            if scheme.lower() == b"bearer" and token.strip():
                yield token.strip()
        elif name == b"x-api-key" and value.strip():
            yield value.strip()
