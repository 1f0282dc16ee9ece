"""Identifies callers: API keys, the cache namespace of each, and the operator."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from firn.core.errors import Unauthorized
from firn.core.values import Namespace

SHARED = Namespace("shared")
"""The only namespace if there are no keys, or if all keys share a cache."""

RawHeaders = Iterable[tuple[bytes, bytes]]


def namespace_of(key: str) -> Namespace:
    """The namespace of one API key: a digest, since it ends up in file names and logs."""
    digest = hashlib.blake2b(key.encode(), digest_size=16, person=b"firn-namespace")
    return Namespace(digest.hexdigest())


@dataclass(frozen=True, slots=True)
class Caller:
    """key_id: a digest of its key, under which its responses, quotas and counters are kept, so that
    no other key shares them. namespace: where its prefixes are cached; keys may share one.
    operator: may see every caller's numbers and clear every caller's cache. address: of its machine;
    empty: unknown."""

    key_id: Namespace
    namespace: Namespace
    operator: bool = False
    address: str = ""

    @property
    def client(self) -> str:
        """Who gets a share of what is limited: its key; without keys, its address."""
        return self.key_id if self.has_key else self.address

    @property
    def has_key(self) -> bool:
        return self.key_id != SHARED


ANYONE = Caller(SHARED, SHARED)
"""Every caller of a server without keys."""


class Keys:
    """The accepted API keys; without any, everyone may call. Immutable.

    admin: keys of the operator. Without keys of either kind, a caller on this machine is the operator.
    """

    def __init__(
        self, keys: Sequence[str] = (), *, admin: Sequence[str] = (), share: bool = False
    ) -> None:
        self._required = bool(keys)
        self._has_admin = bool(admin)
        self._share = share
        self._entries = tuple(
            (_digest(key.encode()), self._caller(key, operator=key in admin))
            for key in dict.fromkeys((*keys, *admin))
        )

    def _caller(self, key: str, *, operator: bool) -> Caller:
        private = self._required and not self._share
        return Caller(namespace_of(key), namespace_of(key) if private else SHARED, operator)

    @property
    def required(self) -> bool:
        return self._required

    @property
    def has_admin(self) -> bool:
        """Whether the operator has a key."""
        return self._has_admin

    @property
    def private(self) -> bool:
        """Whether callers have namespaces of their own."""
        return self.required and not self._share

    @property
    def namespaces(self) -> tuple[Namespace, ...]:
        """Every namespace of the cache that a caller can have."""
        namespaces = dict.fromkeys(caller.namespace for _, caller in self._entries)
        return tuple(namespaces) if self._required else (SHARED,)

    def admit(self, headers: RawHeaders, *, local: bool = False) -> Caller:
        """The caller that sent these headers. Raises Unauthorized.

        local: the caller is a program on this machine.
        """
        presented = list(_presented(headers)) if self._entries else []
        admitted: Caller | None = None
        for candidate in map(_digest, presented):
            # Compare every key, so that the time taken does not reveal which one was close.
            for digest, caller in self._entries:
                if hmac.compare_digest(candidate, digest):
                    admitted = caller
        if admitted is not None:
            return admitted
        if not self._required:
            return replace(ANYONE, operator=local and not self._has_admin)
        if not presented:
            raise Unauthorized(
                "This server needs an API key: send it as 'Authorization: Bearer KEY' "
                "or 'x-api-key: KEY'."
            )
        raise Unauthorized("This API key is not known here.")


def _digest(key: bytes) -> bytes:
    # compare_digest returns early if lengths differ, so compare digests, whose lengths are equal.
    return hashlib.sha256(key).digest()


def _presented(headers: RawHeaders) -> Iterable[bytes]:
    for name, value in headers:
        if name == b"authorization":
            scheme, _, token = value.partition(b" ")
            if scheme.lower() == b"bearer" and token.strip():
                yield token.strip()
        elif name == b"x-api-key" and value.strip():
            yield value.strip()
