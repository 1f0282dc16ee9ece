"""A preprocessed picture, and what the vision tower makes of it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from firn.core.values import TokenArray


@dataclass(frozen=True, slots=True)
class Picture:
    """What the processor made of one picture. NumPy only: it is made in the tokenize pool.

    # ids:  markup | the picture's own tokens [first, last) | markup

    image_token: the id that a feature takes the place of; tokens between are row breaks and the like.
    tensors: pixel values and whatever else the vision tower asks for.
    """

    ids: TokenArray
    first: int
    last: int
    image_token: int
    tensors: Mapping[str, Any]

    @property
    def own_ids(self) -> TokenArray:
        return self.ids[self.first : self.last]

    @property
    def visual(self) -> npt.NDArray[np.bool_]:
        """Which of its own tokens are features."""
        return np.equal(self.own_ids, self.image_token)


@dataclass(frozen=True, slots=True)
class Features:
    """One entry a token of the picture's own in `embeds` (1, n, width) and `per_layer` (1, n, ...).

    deepstack: for each of the first layers one entry a *visual* token, (n_visual, width).
    """

    embeds: mx.array
    per_layer: mx.array | None = None
    deepstack: tuple[mx.array, ...] = ()

    @property
    def arrays(self) -> list[mx.array]:
        one = [] if self.per_layer is None else [self.per_layer]
        return [self.embeds, *one, *self.deepstack]

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.arrays)


class FeatureCache:
    """The vision tower's results by content digest, least recently used first out.

    Owner: the engine thread, through the vision model.
    """

    def __init__(self, limit_nbytes: int) -> None:
        self.limit_nbytes = limit_nbytes
        self.n_hits = self.n_misses = 0
        self._features: OrderedDict[bytes, Features] = OrderedDict()

    def get(self, digest: bytes) -> Features | None:
        found = self._features.get(digest)
        if found is None:
            self.n_misses += 1
            return None
        self.n_hits += 1
        self._features.move_to_end(digest)
        return found

    def put(self, digest: bytes, features: Features) -> None:
        """Keep evaluated features; what is larger than the limit is not kept, and pushes nothing out."""
        if features.nbytes > self.limit_nbytes:
            return
        self._features[digest] = features
        self._features.move_to_end(digest)
        while self.nbytes > self.limit_nbytes:
            self._features.popitem(last=False)

    def clear(self) -> None:
        self.n_hits = self.n_misses = 0
        self._features.clear()

    @property
    def nbytes(self) -> int:
        return sum(f.nbytes for f in self._features.values())

    def __len__(self) -> int:
        return len(self._features)
