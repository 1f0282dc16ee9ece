"""Can this model take tokens back, and read unequal numbers of tokens in one step? Tried at load.

A model whose caches cannot be rewound drafts nothing. In groups, recurrent layers must honour the
lengths that they are given, and attention the masks and offsets of ragged caches. If a model does
not, its rows draft only while they are alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from firn.models.decode.batch import why_not_batchable
from firn.models.decode.padding import in_blocks
from firn.models.decode.ragged import ALL_COLUMNS, Columns
from firn.models.decode.rewind import RaggedStep, is_rewindable, ready
from firn.models.faults import first_line
from firn.models.layers import MakeLayers
from firn.models.load.selfcheck import FAR, LENGTHS, distance, prefilled

FED = (3, 1, 2)
"""Tokens fed to each row. The last row takes back some, or all if it cannot take back a part."""


def rewind_fault(model: Any, make_layers: MakeLayers) -> str | None:
    """Why a lone row cannot take tokens back; None if it can."""
    try:
        worst = _least(partial(_lone_difference, model, make_layers))
    except Exception as e:  # any model code runs here; a request would have failed instead
        return f"a step cannot be undone: {first_line(e)}"
    return f"a step cannot be undone exactly ({worst:.1f})" if worst > FAR else None


def ragged_fault(model: Any, make_layers: MakeLayers) -> str | None:
    """Why rows cannot draft in groups; None if they can."""
    try:
        worst = _least(partial(_difference, model, make_layers))
    except Exception as e:
        return f"a step of unequal rows fails: {first_line(e)}"
    return (
        f"rows come out different in a step of unequal rows ({worst:.1f})" if worst > FAR else None
    )


def blocks_fault(model: Any, make_layers: MakeLayers, columns: Columns) -> str | None:
    """Why steps of several tokens cannot see these columns; None if they can.

    Some models cut a mask to the tokens that there are, but not the keys.
    """
    tried = [_lone_difference]
    if why_not_batchable(make_layers()) is None:
        tried.append(_difference)
    try:
        worst = max(
            _least(partial(difference, model, make_layers, columns=columns)) for difference in tried
        )
    except Exception as e:
        return f"a step that sees whole blocks of columns fails: {first_line(e)}"
    return (
        f"a step that sees whole blocks of columns differs ({worst:.1f})" if worst > FAR else None
    )


def _least(difference: Callable[[int], float]) -> float:
    """A near-tie in expert routing may flip one trial; a real fault shows in all of them."""
    first = difference(0)
    return first if first <= FAR else min(first, difference(1))


def _lone_difference(
    model: Any, make_layers: MakeLayers, seed: int, columns: Columns = ALL_COLUMNS
) -> float:
    """Feed two right tokens and two wrong ones, take the wrong ones back, then feed the right ones."""
    text = [(3 * j + seed) % 50 + 1 for j in range(LENGTHS[0] + 4)]
    n = LENGTHS[0]
    cache = prefilled(model, make_layers(), text[:n])
    alone = _alone(model, copy.deepcopy(cache), text[n:])
    layers = ready(cache, columns)
    kept = 2 if is_rewindable(layers) else 0
    first = _step(model, layers, [[*text[n : n + 2], 7, 9]], [kept], columns)
    second = _step(model, layers, [text[n + kept :]], [len(text) - n - kept], columns)
    return max(distance(alone[1], first[0][1]), distance(alone[-1], second[0][-1]))


def _difference(
    model: Any, make_layers: MakeLayers, seed: int, columns: Columns = ALL_COLUMNS
) -> float:
    texts = [
        [(7 * i + 3 * j + seed) % 50 + 1 for j in range(n + fed + 1)]
        for i, (n, fed) in enumerate(zip(LENGTHS, FED, strict=True))
    ]
    caches = [
        prefilled(model, make_layers(), text[:n]) for text, n in zip(texts, LENGTHS, strict=True)
    ]
    alone = [
        _alone(model, copy.deepcopy(cache), text[n:])
        for text, n, cache in zip(texts, LENGTHS, caches, strict=True)
    ]
    merged = [type(same[0]).merge(list(same)) for same in zip(*caches, strict=True)]
    layers = ready(merged, columns)
    kept = (3, 1, 1 if is_rewindable(layers) else 0)
    fed = [t[n : n + f] for t, n, f in zip(texts, LENGTHS, FED, strict=True)]
    first = _step(model, layers, fed, kept, columns)
    rest = [t[n + k : n + f + 1] for t, n, f, k in zip(texts, LENGTHS, FED, kept, strict=True)]
    second = _step(model, layers, rest, [len(r) for r in rest], columns)
    off = [distance(a[n - 1], b[n - 1]) for a, b, n in zip(alone, first, FED, strict=True)]
    off += [distance(a[-1], b[len(r) - 1]) for a, b, r in zip(alone, second, rest, strict=True)]
    return max(off)


def _alone(model: Any, layers: list[Any], ids: Sequence[int]) -> mx.array:
    """Logits after each token, read in one pass: single steps of a large model are slow."""
    logits: mx.array = model(mx.array([list(ids)]), cache=layers)[0]
    return logits


def _step(
    model: Any,
    layers: list[Any],
    fed: Sequence[Sequence[int]],
    kept: Sequence[int],
    columns: Columns,
) -> mx.array:
    width = max(map(len, fed))
    step = RaggedStep(layers, [len(f) for f in fed])
    ids = mx.array([[*f, *[0] * (width - len(f))] for f in fed])
    logits: mx.array = model(ids, cache=in_blocks(layers, columns))
    mx.eval(logits)
    step.keep(kept)
    return logits
