"""How many prompt tokens the next chunk reads: by depth, by load, by how long earlier chunks took.

A large chunk uses the device better, but it holds up other requests: those that decode wait for
their next token, new ones for their first. While no request waits, a chunk may take a second;
otherwise little more than a usual chunk takes at the start of a prompt, or what the user has set.
How long a chunk takes is learned from every chunk. Sizes are the largest one
halved repeatedly, so that chunks still end at common positions.

Owner: the engine thread.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter

from firn.core.errors import ContextTooLong
from firn.core.memory_plan import MIN_CHUNK
from firn.core.prefill_speed import PrefillSpeed
from firn.engine.limits import EngineLimits

log = logging.getLogger("firn.engine")

ALONE_S = 1.0
"""The longest a chunk may take while no request waits: Metal kills commands after seconds."""
MAX_SLOWDOWN = 1.25
"""While others wait, a chunk may take this many times what one takes at the start of a prompt."""

FAULTS_TOO_DEEP = 2
"""So many faults of chunks that begin at one depth mean that the device cannot compute them."""


class ChunkSizes:
    @classmethod
    def of(cls, limits: EngineLimits, speed: PrefillSpeed, *, scale: int = 1) -> ChunkSizes:
        """scale: of the largest size, for a model that reads faster."""
        largest = scale * limits.largest_chunk
        return cls(limits.prefill_chunk, speed, largest=largest, max_step_s=limits.max_step_s)

    def __init__(
        self, usual: int, speed: PrefillSpeed, *, largest: int = 0, max_step_s: float = 0.0
    ) -> None:
        """largest: 0 if all have the usual size. max_step_s: 0 if the user has set no bound."""
        self._usual = usual
        self._largest = max(largest, usual) if largest else 0
        self._max_step_s = max_step_s
        self._allowed = max(self._largest, usual)
        self._speed = speed

    def shrink(self) -> None:
        """The device failed, probably out of memory or on a long command: halve the largest chunk."""
        self._allowed = max(self._allowed // 2, min(MIN_CHUNK, self._allowed))

    def choose(self, depth: int, *, alone: bool) -> int:
        """The next chunk's size, after `depth` tokens of a prompt. alone: no other request waits."""
        return min(self._choose(depth, alone=alone), self._allowed)

    def _choose(self, depth: int, *, alone: bool) -> int:
        if not self._largest or not self._speed.is_known:
            return self._usual
        bound, chunk = MAX_SLOWDOWN * self._speed.seconds(0, self._usual), self._usual
        if alone:
            bound, chunk = max(ALONE_S, self._max_step_s, bound), self._largest
        elif self._max_step_s:
            bound, chunk = self._max_step_s, self._largest
        while chunk > MIN_CHUNK and self._speed.seconds(depth, depth + chunk) > bound:
            chunk //= 2
        return chunk


class DepthLimit:
    """How long a prompt may be where chunks cannot shrink, since records are named by their size.

    A chunk takes longer the deeper it begins, and a device may end work that takes too long. It would
    fail again each time that all requests are put back, until the process ends.
    """

    def __init__(self) -> None:
        self._n_tokens = sys.maxsize
        self._n_faults = Counter[int]()

    def failed(self, start: int, end: int) -> None:
        """The device failed while it computed tokens [start, end) of a prompt."""
        self._n_faults[start] += 1
        if self._n_faults[start] >= FAULTS_TOO_DEEP and start and end < self._n_tokens:
            self._n_tokens = end
            log.error(
                "the device fails on a chunk of %d tokens after %d: prompts over %d tokens are "
                "refused. Start again with a smaller --prefill-chunk",
                end - start,
                start,
                end,
            )

    def check(self, n_prompt: int) -> None:
        """Raises ContextTooLong."""
        if n_prompt > self._n_tokens:
            raise ContextTooLong(n_prompt, self._n_tokens)
