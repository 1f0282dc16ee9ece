"""How many prompt tokens the next chunk reads: by depth, by load, by how long earlier chunks took.

A large chunk uses the device better, and holds up other requests: those that decode wait for their
next token, new ones for their first. Alone, a chunk may take a second; otherwise little more than
the usual one takes behind a short context, or what the user has set. Time per token is learned from
every chunk, as a line over depth. Sizes are halves of the largest, so that chunks still end at
common positions.

Owner: the engine thread.
"""

from __future__ import annotations

from dataclasses import dataclass

from firn.core.memory_plan import MIN_CHUNK

ALONE_S = 1.0
"""The longest step while no other request waits. Metal's watchdog ends commands after a few seconds."""
DEEPER = 1.25
"""How much longer than behind a short context a chunk may take while others wait, by default."""
MEMORY = 0.95
"""Weight of a chunk in the average, relative to the one after it."""
MIN_TEACHING_TOKENS = 32


@dataclass(slots=True)
class TimeByDepth:
    """Seconds per token as a line over depth, fitted to the newest points. Never falls with depth."""

    weight: float = 0.0
    depth: float = 0.0
    seconds: float = 0.0
    depth2: float = 0.0
    product: float = 0.0

    def add(self, depth: float, seconds: float) -> None:
        """Update the weighted means; older points count less."""
        self.weight = self.weight * MEMORY + 1.0
        share = 1.0 / self.weight
        self.depth += share * (depth - self.depth)
        self.seconds += share * (seconds - self.seconds)
        self.depth2 += share * (depth * depth - self.depth2)
        self.product += share * (depth * seconds - self.product)

    def at(self, depth: float) -> float:
        variance = self.depth2 - self.depth * self.depth
        slope = 0.0
        if variance > 1e-6 * self.depth2:
            slope = max((self.product - self.depth * self.seconds) / variance, 0.0)
        slope = min(slope, self.seconds / self.depth if self.depth else 0.0)
        return self.seconds + slope * (depth - self.depth)


class ChunkSizes:
    def __init__(self, usual: int, *, largest: int = 0, max_step_s: float = 0.0) -> None:
        """largest: 0 for chunks of always the usual size. max_step_s: 0 for no such bound."""
        self._usual = usual
        self._largest = max(largest, usual) if largest else 0
        self._max_step_s = max_step_s
        self._most = max(self._largest, usual)
        self._line = TimeByDepth()

    def shrink(self) -> None:
        """The device failed, likely for memory or too long a command: halve the largest chunk."""
        self._most = max(self._most // 2, min(MIN_CHUNK, self._most))

    def choose(self, depth: int, *, alone: bool) -> int:
        """For a prompt of which `depth` tokens are read. alone: no other request waits for anything."""
        return min(self._choose(depth, alone=alone), self._most)

    def _choose(self, depth: int, *, alone: bool) -> int:
        if not self._largest or not self._line.weight:
            return self._usual
        bound, chunk = DEEPER * self._usual * self._line.at(0), self._usual
        if alone:
            bound, chunk = max(ALONE_S, self._max_step_s, bound), self._largest
        elif self._max_step_s:
            bound, chunk = self._max_step_s, self._largest
        while chunk > MIN_CHUNK and chunk * self._line.at(depth + chunk / 2) > bound:
            chunk //= 2
        return chunk

    def saw(self, start: int, end: int, seconds: float) -> None:
        """Reading [start, end) took this long."""
        if end - start >= MIN_TEACHING_TOKENS:
            self._line.add((start + end) / 2, seconds / (end - start))
