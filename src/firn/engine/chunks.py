"""How many prompt tokens the next chunk reads: by depth, by load, by how long earlier chunks took.

A large chunk uses the device better, but it holds up other requests: those that decode wait for
their next token, new ones for their first. While no request waits, a chunk may take a second;
otherwise little more than a usual chunk takes at the start of a prompt, or what the user has set.
The time per token is learned from every chunk, as a line over depth. Sizes are the largest one
halved repeatedly, so that chunks still end at common positions.

Owner: the engine thread.
"""

from __future__ import annotations

from dataclasses import dataclass

from firn.core.memory_plan import MIN_CHUNK
from firn.engine.limits import EngineLimits

ALONE_S = 1.0
"""The longest a chunk may take while no request waits: Metal kills commands after seconds."""
MAX_SLOWDOWN = 1.25
"""While others wait, a chunk may take this many times what one takes at the start of a prompt."""
DECAY = 0.95
"""Weight of a chunk in the averages, relative to the one after it."""
MIN_TEACHING_TOKENS = 32
"""Shorter chunks say little about the time per token: most of theirs is overhead."""


@dataclass(slots=True)
class TimeByDepth:
    """Seconds per token as a line over depth, fitted to recent chunks. The line never falls."""

    weight: float = 0.0
    depth: float = 0.0
    seconds: float = 0.0
    depth_squared: float = 0.0
    depth_seconds: float = 0.0
    """Weighted means of depth, seconds, depth squared, and depth times seconds."""

    def add(self, depth: float, seconds: float) -> None:
        """Update the weighted means; older chunks count less."""
        self.weight = self.weight * DECAY + 1.0
        share = 1.0 / self.weight
        self.depth += share * (depth - self.depth)
        self.seconds += share * (seconds - self.seconds)
        self.depth_squared += share * (depth * depth - self.depth_squared)
        self.depth_seconds += share * (depth * seconds - self.depth_seconds)

    def at(self, depth: float) -> float:
        variance = self.depth_squared - self.depth * self.depth
        slope = 0.0
        if variance > 1e-6 * self.depth_squared:
            slope = max((self.depth_seconds - self.depth * self.seconds) / variance, 0.0)
        slope = min(slope, self.seconds / self.depth if self.depth else 0.0)
        return self.seconds + slope * (depth - self.depth)


class ChunkSizes:
    @classmethod
    def of(cls, limits: EngineLimits, *, scale: int = 1) -> ChunkSizes:
        """scale: of the largest size, for a model that reads faster."""
        largest = scale * limits.largest_chunk
        return cls(limits.prefill_chunk, largest=largest, max_step_s=limits.max_step_s)

    def __init__(self, usual: int, *, largest: int = 0, max_step_s: float = 0.0) -> None:
        """largest: 0 if all have the usual size. max_step_s: 0 if the user has set no bound."""
        self._usual = usual
        self._largest = max(largest, usual) if largest else 0
        self._max_step_s = max_step_s
        self._allowed = max(self._largest, usual)
        self._line = TimeByDepth()

    def shrink(self) -> None:
        """The device failed, probably out of memory or on a long command: halve the largest chunk."""
        self._allowed = max(self._allowed // 2, min(MIN_CHUNK, self._allowed))

    def choose(self, depth: int, *, alone: bool) -> int:
        """The next chunk's size, after `depth` tokens of a prompt. alone: no other request waits."""
        return min(self._choose(depth, alone=alone), self._allowed)

    def _choose(self, depth: int, *, alone: bool) -> int:
        if not self._largest or not self._line.weight:
            return self._usual
        bound, chunk = MAX_SLOWDOWN * self._usual * self._line.at(0), self._usual
        if alone:
            bound, chunk = max(ALONE_S, self._max_step_s, bound), self._largest
        elif self._max_step_s:
            bound, chunk = self._max_step_s, self._largest
        while chunk > MIN_CHUNK and chunk * self._line.at(depth + chunk / 2) > bound:
            chunk //= 2
        return chunk

    def saw(self, start: int, end: int, seconds: float) -> None:
        """Reading [start, end) took `seconds`."""
        if end - start >= MIN_TEACHING_TOKENS:
            self._line.add((start + end) / 2, seconds / (end - start))
