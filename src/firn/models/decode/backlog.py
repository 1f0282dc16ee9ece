"""Tokens that a group has consumed and its prediction head has not read yet.

Only the head's own drafts and the records need its keys. So the head skips steps without drafts: their
tokens are kept, with the hidden states before them, and read in one pass when the keys are needed.

    the model's caches   # [0, n_tokens)
    the head's KV        # [0, n_tokens - number of steps kept)

Owner: the engine thread, through a group.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from firn.models.speculation.mtp import MtpModel, split

MAX_STEPS = 64
"""Steps kept at most. Each keeps a hidden state per row."""


class HeadBacklog:
    def __init__(self, model: MtpModel) -> None:
        self._model = model
        self._steps: list[tuple[mx.array, mx.array]] = []

    @property
    def is_full(self) -> bool:
        return len(self._steps) >= MAX_STEPS

    def add(self, ids: mx.array, before: mx.array) -> None:
        """One step of a group: (rows,) tokens and (rows, width) hidden states before them."""
        self._steps.append((ids, before))

    def read(self, layers: list[Any]) -> None:
        """Let the head's KV, one of the group's layers, catch up with the others."""
        if not self._steps:
            return
        ids, before = (mx.stack(list(x), axis=1) for x in zip(*self._steps, strict=True))
        self._steps.clear()
        head = split(layers)[1]
        self._model.feed_head(ids, before, head)
        mx.async_eval(head.keys, head.values)
