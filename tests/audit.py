"""Compares every record that a cache holds with a fresh computation of the same tokens."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx

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
from firn.models.speculation.mtp import MtpModel

ROUNDING = 2e-3
"""Largest difference, relative to an array's largest value, that other chunks and batches may make."""
LEAST_EQUAL = 0.7
"""Least share of quantised values that stay in their step then."""
MakeLayers = Callable[[], list[Any]]


def wrong_records(
    cache: PrefixCache,
    layout: Layout,
    model: Any,
    make_layers: MakeLayers,
    *,
    rounding: float = ROUNDING,
    tier: Tier | None = None,
) -> tuple[int, list[str]]:
    """How many records there are, and which of them hold something else than their tokens' state.

    Call it on the engine's thread. rounding: 0 compares bit for bit. tier: where records are read that
    memory does not hold. What a prediction head keeps is left out: it is only as good as the hidden
    state that the head began with, and costs drafts, not answers.
    """
    has_head = isinstance(model, MtpModel)
    n_compared, wrong = 0, []
    for root in cache.records.tree.roots():
        for node, fresh in _nodes(root, layout, model, make_layers()):
            for part, record in node.records.items():
                skipped = 1 if has_head and part is Part.PAGES else 0
                for payload in _payloads(record, tier):
                    n_compared += 1
                    far = _distance(payload, fresh(part), skipped=skipped, is_exact=not rounding)
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
    parent: Node, layout: Layout, model: Any, layers: list[Any]
) -> Iterator[tuple[Node, Callable[[Part], Payload]]]:
    """Each node below this one, and what its records must hold; `layers` end where it begins."""
    for node in list(parent.children):
        own = copy.deepcopy(layers)
        model(mx.array([node.tokens.astype("int32").tolist()]), cache=own)
        mx.eval([layer.state for layer in own])

        def fresh(part: Part, node: Node = node, own: Sequence[Any] = own) -> Payload:
            return layout.cut(part, own, At(0, node.end), node.start, node.end)

        yield node, fresh
        yield from _nodes(node, layout, model, own)


def _distance(got: Payload, want: Payload, *, skipped: int = 0, is_exact: bool = False) -> float:
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
