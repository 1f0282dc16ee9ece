"""Compares every record that a cache holds with a fresh computation of the same tokens."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from firn.cache.arrays.host import from_host
from firn.cache.arrays.payload import Payload
from firn.cache.layout import Layout
from firn.cache.memory.rows import payload_of
from firn.cache.parts import Part
from firn.cache.prefix import PrefixCache
from firn.cache.storage.catalogue import name_of
from firn.cache.storage.container import load
from firn.cache.tiers import Tier
from firn.cache.tree import Node, Record
from firn.core.ports import At
from firn.core.values import KeyTokens
from firn.models.speculation.mtp import MtpModel

ROUNDING = 2e-3
"""Largest difference, relative to an array's largest value, that other chunks and batches may make."""
LEAST_EQUAL = 0.7
"""Least share of quantised values that stay in their step then."""
MakeLayers = Callable[[], list[Any]]


@dataclass(frozen=True)
class Past:
    """Layers that hold a chain's tokens, and how many those are."""

    layers: list[Any]
    n_tokens: int = 0


class Fresh(Protocol):
    """Computes what records must hold."""

    def __call__(self, chain: KeyTokens, past: Past) -> Past:
        """Layers that hold these key tokens, of which `past` has the first."""
        ...


class OfIds:
    """By a model that needs nothing but ids."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, chain: KeyTokens, past: Past) -> Past:
        own = copy.deepcopy(past.layers)
        self._model(mx.array([chain[past.n_tokens :].astype("int32").tolist()]), cache=own)
        mx.eval([layer.state for layer in own])
        return Past(own, len(chain))


def wrong_records(
    cache: PrefixCache,
    layout: Layout,
    model: Any,
    make_layers: MakeLayers,
    *,
    rounding: float = ROUNDING,
    tier: Tier | None = None,
    fresh: Fresh | None = None,
    own: Callable[[list[Any]], list[Any]] = lambda layers: layers,
) -> tuple[int, list[str]]:
    """How many records there are, and which of them hold something else than their tokens' state.

    Call it on the engine's thread. rounding: 0 compares bit for bit. tier: where records are read that
    memory does not hold. fresh: computes the tokens; by default the model does, from their ids. own:
    those of its layers that the cache has records of. What a prediction head keeps is left out: it is
    only as good as the hidden state that the head began with, and costs drafts, not answers.
    """
    has_head = isinstance(model, MtpModel)
    n_compared, wrong = 0, []
    nothing, compute = np.zeros(0, dtype=np.uint64), fresh or OfIds(model)
    for root in cache.records.tree.roots():
        for node, past in _nodes(root, nothing, Past(make_layers()), compute):
            for part, record in node.records.items():
                skipped = 1 if has_head and part is Part.PAGES else 0
                at = At(0, past.n_tokens)
                want = layout.cut(part, own(past.layers), at, node.start, node.end)
                for payload in _payloads(record, tier):
                    n_compared += 1
                    far = distance(payload, want, skipped=skipped, is_exact=not rounding)
                    if far > rounding:
                        wrong.append(f"{part.value} of [{node.start}, {node.end}): {far:.3g}")
    return n_compared, wrong


def _payloads(record: Record, tier: Tier | None) -> Iterator[Payload]:
    """What memory holds of a record, and what the tier does."""
    if record.arrays is not None:
        yield payload_of(record)
    if tier is not None and record.stored:
        loaded = load(tier, name_of(record))
        yield from_host(loaded.header.tensors, loaded.header.places, loaded.buffers)


def _nodes(
    parent: Node, before: KeyTokens, past: Past, fresh: Fresh
) -> Iterator[tuple[Node, Past]]:
    """Each node below this one, and what its records are cut from. before: the chain up to here."""
    for node in list(parent.children):
        chain = np.concatenate([before, node.tokens])
        there = fresh(chain, past)
        yield node, there
        yield from _nodes(node, chain, there, fresh)


def distance(got: Payload, want: Payload, *, skipped: int = 0, is_exact: bool = False) -> float:
    """The largest relative difference of any array, but for the last `skipped` layers; infinite for
    another shape."""
    far = 0.0
    if got.n_layers != want.n_layers:
        return float("inf")
    for i in range(got.n_layers - skipped):
        for a, b in zip(got.layer(i), want.layer(i), strict=True):
            if a is None or b is None:
                far = far if a is b else float("inf")
            elif a.shape != b.shape or a.dtype != b.dtype:
                return float("inf")
            elif a.dtype == mx.uint32:  # packed: rounding moves a value to the next step
                least = 1.0 if is_exact else LEAST_EQUAL
                far = max(far, 0.0 if _share_equal(a, b) >= least else 1.0)
            elif a.size:
                a, b = a.astype(mx.float32), b.astype(mx.float32)
                far = max(far, mx.max(mx.abs(a - b)).item() / (mx.max(mx.abs(b)).item() + 1e-9))
    return far


def _share_equal(a: mx.array, b: mx.array) -> float:
    return float(mx.mean((a == b).astype(mx.float32)).item())
