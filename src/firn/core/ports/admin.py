"""Queries and commands for the prefix cache, from any thread. Each future holds a JSON object."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Protocol

from firn.core.values import Namespace, Prompt


class SlicedQuery(Protocol):
    """A query that is answered in slices, so that no step of the engine waits for it."""

    def step(self) -> Future[bool]:
        """Compute the next slice; True: it was the last. Raises NotFound."""
        ...

    def answer(self) -> dict[str, Any]:
        """The answer, after the last slice. Takes a while: not for the asyncio thread."""
        ...


class CacheAdmin(Protocol):
    """The cache for people: as a whole, by prompt, and node by node.

    node: a block's key in hexadecimal digits, as `browse` reports it. namespace: if given, the
    nodes of others are not found, so a caller cannot tell whether they exist.
    """

    def stats(self, namespace: Namespace | None) -> Future[dict[str, Any]]:
        """Statistics of the whole cache, or of one namespace."""
        ...

    def probe(self, prompt: Prompt, namespace: Namespace) -> Future[dict[str, Any]]:
        """What a request with this prompt would reuse."""
        ...

    def pin(self, prompt: Prompt, namespace: Namespace) -> Future[dict[str, Any]]: ...

    def unpin(self, prompt: Prompt, namespace: Namespace) -> Future[dict[str, Any]]: ...

    def clear(self, namespace: Namespace | None) -> Future[dict[str, Any]]: ...

    def browse(
        self, namespace: Namespace | None, node: str | None, *, limit: int, with_tokens: bool
    ) -> SlicedQuery:
        """The tree in at most `limit` runs of blocks, starting at the top or at a node."""
        ...

    def node(self, namespace: Namespace | None, node: str) -> Future[dict[str, Any]]:
        """The cost and the savings of the prefix that ends at this node."""
        ...

    def pin_node(self, namespace: Namespace | None, node: str) -> Future[dict[str, Any]]: ...

    def unpin_node(self, namespace: Namespace | None, node: str) -> Future[dict[str, Any]]:
        """Unpins the node and everything below it."""
        ...

    def forget_node(self, namespace: Namespace | None, node: str) -> SlicedQuery:
        """Deletes this node's run and everything below, except what is pinned or leased."""
        ...
