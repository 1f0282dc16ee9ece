"""Compares every record that a cache holds with a fresh computation of the same tokens."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx

from firn.cache.arrays.payload import Payload
from firn.cache.layout import Layout
from firn.cache.memory.rows import payload_of
from firn.cache.parts import Part
from firn.cache.prefix import PrefixTree
from firn.cache.tree import Node
from firn.core.ports import At
from firn.models.mtp import MtpModel

ROUNDING = 2e-3
"""Largest difference, relative to an array's largest value, that other chunks and batches may make."""
MakeLayers = Callable[[], list[Any]]


def wrong_records(
    cache: PrefixTree, layout: Layout, model: Any, make_layers: MakeLayers
) -> tuple[int, list[str]]:
    """How many records memory holds, and which of them hold something else than their tokens' state.

    Call it on the engine's thread. What a prediction head keeps is left out: it is only as good as the
    hidden state that the head began with, and costs drafts, not answers.
    """
    has_head = isinstance(model, MtpModel)
    n_compared, wrong = 0, []
    for root in cache.records.tree.roots():
        for node, fresh in _nodes(root, layout, model, make_layers()):
            for part, record in node.records.items():
                if record.arrays is None:
                    continue
                n_compared += 1
                skipped = 1 if has_head and part is Part.PAGES else 0
                far = _distance(payload_of(record), fresh(part), skipped=skipped)
                if far > ROUNDING:
                    wrong.append(f"{part.value} of [{node.start}, {node.end}): {far:.3g}")
    return n_compared, wrong


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


def _distance(got: Payload, want: Payload, *, skipped: int = 0) -> float:
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
                far = max(far, 0.0 if _share_equal(a, b) > 0.7 else 1.0)
            elif a.size:
                a, b = a.astype(mx.float32), b.astype(mx.float32)
                far = max(far, mx.max(mx.abs(a - b)).item() / (mx.max(mx.abs(b)).item() + 1e-9))
    return far


def _share_equal(a: mx.array, b: mx.array) -> float:
    return float(mx.mean((a == b).astype(mx.float32)).item())
