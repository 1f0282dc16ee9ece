"""What a record says of itself in a tier, and where in the tree one belongs that is found there.

A record names its parent by key, so it can take its place once the parent has one. Until then it is a
stray: scans need not tell of parents first, and a parent may be gone, to be computed again some day.

Owner: the engine thread, through the prefix cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from firn.cache.parts import Needs
from firn.cache.storage.container import Header, Label, TensorSpec
from firn.cache.storage.io import Entry
from firn.cache.storage.places import Places
from firn.cache.tree import Node, PackedTokens, Record, Root, Tree
from firn.core.keys import Key, KeyTokens, root_key
from firn.core.values import Namespace

N_STRAYS, N_ORPHANS = 1 << 17, 1 << 12
"""Strays that are remembered during a scan, and after it: then their parents are gone."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose state this is: the root of every key."""

    fingerprint: bytes
    layout: str
    block: int

    def root(self, namespace: Namespace, recipe: str = "") -> Key:
        """recipe: how prompts were thinned, where they were."""
        layout = self.layout_of(recipe)
        return root_key(fingerprint=self.fingerprint, layout=layout, namespace=namespace)

    def layout_of(self, recipe: str) -> str:
        return f"{self.layout};{recipe}" if recipe else self.layout


@dataclass(frozen=True, slots=True)
class Whose:
    """Of one root: whose records lie below it, and of which layout they are."""

    namespace: Namespace
    layout: str


@dataclass(frozen=True, slots=True)
class Stray:
    tier: int
    entry: Entry


class Catalogue:
    def __init__(
        self, identity: Identity, needs: Needs, tree: Tree, *, wall: Callable[[], float]
    ) -> None:
        self._identity = identity
        self._alone = not needs.by_block
        """A model without pages and windows stores nothing of the blocks above a state: the record
        must bring its path along."""
        self._tree = tree
        self._wall = wall
        self._whose: dict[Key, Whose] = {}
        self._recipes: tuple[str, ...] = ("",)
        self._strays: dict[Key, list[Stray]] = {}
        """By the key of the parent that is missing."""
        self._n_strays = 0

    # --- whose -----------------------------------------------------------------------------

    def know(self, namespaces: Iterable[Namespace]) -> None:
        """Whose records are looked for in tiers."""
        for namespace in namespaces:
            for recipe in self._recipes:
                whose = Whose(namespace, self._identity.layout_of(recipe))
                self._whose[self._identity.root(namespace, recipe)] = whose

    def expect(self, recipes: Iterable[str]) -> None:
        """Prompts may be thinned in these ways: their records have roots of their own."""
        self._recipes = tuple(dict.fromkeys([*self._recipes, *recipes]))
        self.know(self.namespaces)

    @property
    def namespaces(self) -> list[Namespace]:
        return list(dict.fromkeys(whose.namespace for whose in self._whose.values()))

    def root(self, namespace: Namespace, recipe: str = "") -> Root:
        key = self._identity.root(namespace, recipe)
        if key not in self._whose:
            self.expect([recipe])
            self.know([namespace])
        return self._tree.root(key, namespace)

    def roots(self, namespace: Namespace) -> list[Root]:
        """All of a namespace, those of thinned prompts included."""
        return [self.root(namespace, recipe) for recipe in self._recipes]

    def root_of(self, label: Label) -> Root | None:
        """None: another model's, another layout's, or of nobody who was ever here."""
        whose = self._whose.get(label.root)
        if whose is None or label.layout != whose.layout:
            return None
        return self._tree.root(label.root, whose.namespace)

    # --- to a tier -------------------------------------------------------------------------

    def tokens(self, record: Record) -> KeyTokens:
        """The tokens that a stored record names: those of its node, or of its whole path."""
        if not self._alone:
            return record.node.tokens
        return np.concatenate([n.tokens for n in record.node.path()][::-1])

    def header(self, record: Record, tensors: tuple[TensorSpec, ...], places: Places) -> Header:
        node, root = record.node, record.node.root
        parent = root if self._alone else node.parent
        assert parent is not None
        whose = self._whose[root.key]
        return Header(
            key=node.key,
            parent=parent.key,
            root=root.key,
            part=record.part,
            start=0 if self._alone else node.start,
            tokens=self.tokens(record),
            fingerprint=self._identity.fingerprint,
            namespace=whose.namespace,
            layout=whose.layout,
            tensors=tensors,
            places=places,
            created=self._wall(),
            mark=int(record.mark),
        )

    # --- from a tier -----------------------------------------------------------------------

    def place(self, root: Root, entry: Entry) -> Node | None:
        """The node of a stored record; None if its parent is not there, or it is not what it says."""
        label, tokens = entry.label, entry.tokens
        if label.start == 0:
            return self._path(root, tokens, label.key)
        parent = self._tree.find(label.parent)
        if parent is None or parent.root is not root or parent.end != label.start:
            return None
        return self._tree.child(parent, tokens, 0, len(tokens), key=label.key)

    def _path(self, root: Root, tokens: PackedTokens, key: Key) -> Node | None:
        """The node at the end of tokens that begin at 0, through whole blocks."""
        node: Node = root
        for start in range(0, len(tokens), self._identity.block):
            node = self._tree.child(
                node, tokens, start, min(start + self._identity.block, len(tokens))
            )
        if node.key == key:
            return node
        self._tree.prune(node)
        return None

    # --- strays ----------------------------------------------------------------------------

    def add_stray(self, tier: int, entry: Entry) -> None:
        if entry.label.start and self._n_strays < N_STRAYS:
            self._strays.setdefault(entry.label.parent, []).append(Stray(tier, entry))
            self._n_strays += 1

    def take_strays(self, parent: Key) -> list[Stray]:
        """Those that waited for this parent."""
        strays = self._strays.pop(parent, [])
        self._n_strays -= len(strays)
        return strays

    def drop_strays(self, root: Key) -> Iterator[Stray]:
        """All of a namespace."""
        for parent, some in list(self._strays.items()):
            if some[0].entry.label.root == root:
                yield from self.take_strays(parent)

    def forget_most_strays(self) -> None:
        """Nobody will come for them soon."""
        for parent in list(self._strays):
            if self._n_strays <= N_ORPHANS:
                return
            self.take_strays(parent)
