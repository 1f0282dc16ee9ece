"""Questions about the prefix cache, from any thread. Each future holds a plain JSON object."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Protocol

from firn.core.values import Namespace, Prompt


class SlicedQuery(Protocol):
    """A question that is answered in slices, so that no step of the engine waits for it."""

    def step(self) -> Future[bool]:
        """The next slice; True: it was the last. Raises NotFound."""
        ...

    def answer(self) -> dict[str, Any]:
        """After the last slice. Takes a while: not for the asyncio thread."""
        ...


class PrefixAdmin(Protocol):
    """The cache as a whole, and the prefix of one prompt."""

    def stats(self, namespace: Namespace | None) -> Future[dict[str, Any]]:
        """Of everything, or of one namespace alone."""
        ...

    def probe(self, prompt: Prompt, namespace: Namespace) -> Future[dict[str, Any]]:
        """What a request with this prompt would reuse."""
        ...

    def pin(self, prompt: Prompt, namespace: Namespace) -> Future[dict[str, Any]]: ...

    def unpin(self, prompt: Prompt, namespace: Namespace) -> Future[dict[str, Any]]: ...

    def clear(self, namespace: Namespace | None) -> Future[dict[str, Any]]: ...


class TreeAdmin(Protocol):
    """The tree of stored prefixes, node by node.

    `node`: a block's key in hexadecimal digits, as `browse` reports it. With a namespace, the nodes of
    others are not found: a caller cannot tell whether they exist.
    """

    def browse(
        self, namespace: Namespace | None, node: str | None, *, limit: int, with_tokens: bool
    ) -> SlicedQuery:
        """The tree, in at most `limit` runs of blocks, from the top or from a node on."""
        ...

    def node(self, namespace: Namespace | None, node: str) -> Future[dict[str, Any]]:
        """What the prefix that ends there takes and saves."""
        ...

    def pin_node(self, namespace: Namespace | None, node: str) -> Future[dict[str, Any]]: ...

    def unpin_node(self, namespace: Namespace | None, node: str) -> Future[dict[str, Any]]:
        """Unpins the node and everything below it."""
        ...

    def forget_node(self, namespace: Namespace | None, node: str) -> SlicedQuery:
        """Deletes the run with this node and everything below, except what is pinned or leased."""
        ...


class CacheAdmin(PrefixAdmin, TreeAdmin, Protocol):
    """All of it."""
