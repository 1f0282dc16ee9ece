"""A preprocessed picture, and the features that the vision tower computes for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from firn.core.lru import Lru
from firn.core.values import TokenArray


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture as the processor returns it. NumPy only: it is made in the tokenize pool.

    # ids:  markup | the picture's own tokens [first, last) | markup

    image_token: the id that stands for a feature; the others in [first, last) are row breaks etc.
    tensors: pixel values and whatever else the vision tower needs.
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
    """embeds (1, n, width) and per_layer (1, n, ...): one entry for each of the picture's own tokens.

    deepstack: for each of the first layers one entry per *visual* token, (n_visual, width).
    """

    embeds: mx.array
    per_layer: mx.array | None = None
    deepstack: tuple[mx.array, ...] = ()

    @property
    def arrays(self) -> list[mx.array]:
        per_layer = [] if self.per_layer is None else [self.per_layer]
        return [self.embeds, *per_layer, *self.deepstack]

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.arrays)


class FeatureCache:
    """The vision tower's results by the picture's digest; the least recently used is dropped first.

    Owner: the engine thread, through the vision model.
    """

    def __init__(self, limit_nbytes: int) -> None:
        self.limit_nbytes = limit_nbytes
        self.n_hits = self.n_misses = 0
        self._features: Lru[bytes, Features] = Lru(limit_nbytes)

    def get(self, digest: bytes) -> Features | None:
        features = self._features.get(digest)
        if features is None:
            self.n_misses += 1
        else:
            self.n_hits += 1
        return features

    def put(self, digest: bytes, features: Features) -> None:
        """Keep evaluated features. Those larger than the limit are not kept, and evict nothing."""
        self._features.put(digest, features, features.nbytes)

    def clear(self) -> None:
        self.n_hits = self.n_misses = 0
        self._features.clear()

    @property
    def nbytes(self) -> int:
        return self._features.size

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._features

    def __len__(self) -> int:
        return len(self._features)
