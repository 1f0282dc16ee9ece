"""How a record of the tree is described in a tier, and where in the tree a described record belongs.

Owner: the engine thread, through `Records`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from firn.cache.parts import Needs
from firn.cache.storage.container import Header, Label, Name, TensorSpec, TierEntry
from firn.cache.storage.places import Places
from firn.cache.tree import Node, Record, Root, Tree
from firn.core.clock import Clock
from firn.core.keys import Key, root_key
from firn.core.values import KeyTokens, Namespace, PackedTokens


def name_of(record: Record) -> Name:
    return Name(record.node.key, record.part)


@dataclass(frozen=True, slots=True)
class CacheIdentity:
    """Which model's state this is, and how it is cut: a part of every root key."""

    fingerprint: bytes
    layout: str
    block: int

    def root(self, namespace: Namespace, recipe: str = "") -> Key:
        """recipe: see `Positions`."""
        layout = self.layout_of(recipe)
        return root_key(fingerprint=self.fingerprint, layout=layout, namespace=namespace)

    def layout_of(self, recipe: str) -> str:
        return f"{self.layout};{recipe}" if recipe else self.layout


@dataclass(frozen=True, slots=True)
class RootInfo:
    """What a root key was made from, other than the model."""

    namespace: Namespace
    layout: str


class RecordCatalogue:
    def __init__(self, identity: CacheIdentity, needs: Needs, tree: Tree, *, clock: Clock) -> None:
        self._identity = identity
        self._names_path = not needs.by_block
        """A model without pages and windows stores nothing for the blocks before a state, so the
        state's record has to name the tokens of its whole path."""
        self._tree = tree
        self._clock = clock
        self._roots: dict[Key, RootInfo] = {}
        self._recipes: tuple[str, ...] = ("",)

    # --- roots -----------------------------------------------------------------------------

    def expect_namespaces(self, namespaces: Iterable[Namespace]) -> None:
        """Records of these namespaces are recognised in tiers."""
        for namespace in namespaces:
            for recipe in self._recipes:
                info = RootInfo(namespace, self._identity.layout_of(recipe))
                self._roots[self._identity.root(namespace, recipe)] = info

    def expect_recipes(self, recipes: Iterable[str]) -> None:
        """Prompts may be prepared in these ways: their records have separate roots."""
        self._recipes = tuple(dict.fromkeys([*self._recipes, *recipes]))
        self.expect_namespaces(self.namespaces)

    @property
    def namespaces(self) -> list[Namespace]:
        return list(dict.fromkeys(info.namespace for info in self._roots.values()))

    def root(self, namespace: Namespace, recipe: str = "") -> Root:
        key = self._identity.root(namespace, recipe)
        if key not in self._roots:
            self.expect_recipes([recipe])
            self.expect_namespaces([namespace])
        return self._tree.root(key, namespace)

    def known_root(self, key: Key) -> Root | None:
        """None: another model's, another layout's, or of an unknown namespace."""
        info = self._roots.get(key)
        return None if info is None else self._tree.root(key, info.namespace)

    def roots(self, namespace: Namespace) -> list[Root]:
        """All roots of a namespace, those of prepared prompts included."""
        return [self.root(namespace, recipe) for recipe in self._recipes]

    def layout_of(self, root: Root) -> str:
        """As the labels of its records name it."""
        return self._roots[root.key].layout

    def root_of(self, label: Label) -> Root | None:
        """None: the record belongs to another model, another layout or an unknown namespace."""
        info = self._roots.get(label.root)
        if info is None or label.layout != info.layout:
            return None
        return self._tree.root(label.root, info.namespace)

    # --- to a tier -------------------------------------------------------------------------

    def tokens(self, record: Record) -> KeyTokens:
        """The tokens that the stored record names: its node's, or those of its whole path."""
        if not self._names_path:
            return record.node.tokens
        return np.concatenate([n.tokens for n in record.node.path()][::-1])

    def header(self, record: Record, tensors: tuple[TensorSpec, ...], places: Places) -> Header:
        node, root = record.node, record.node.root
        created = max(self._clock.wall(), root.cleared_at)  # even if a clock was set back since
        self._tree.note_written(root, created)
        parent = root if self._names_path else node.parent
        assert parent is not None
        info = self._roots[root.key]
        return Header(
            key=node.key,
            parent=parent.key,
            root=root.key,
            part=record.part,
            start=0 if self._names_path else node.start,
            tokens=self.tokens(record),
            fingerprint=self._identity.fingerprint,
            namespace=info.namespace,
            layout=info.layout,
            tensors=tensors,
            places=places,
            created=created,
            mark=int(record.kind),
        )

    # --- from a tier -----------------------------------------------------------------------

    def place(self, root: Root, entry: TierEntry) -> Node | None:
        """The node of a stored record; None if its parent is missing, or its key is wrong."""
        label, tokens = entry.label, entry.tokens
        if label.start == 0:
            return self._path(root, tokens, label.key)
        parent = self._tree.find(label.parent)
        if parent is None or parent.root is not root or parent.end != label.start:
            return None
        return self._tree.child(parent, tokens, 0, len(tokens), key=label.key)

    def _path(self, root: Root, tokens: PackedTokens, key: Key) -> Node | None:
        """The node at the end of tokens that begin at 0, reached through whole blocks."""
        node: Node = root
        block = self._identity.block
        for start in range(0, len(tokens), block):
            node = self._tree.child(node, tokens, start, min(start + block, len(tokens)))
        if node.key == key:
            return node
        self._tree.prune(node)
        return None
