"""What computing and what loading cost here, learned while it happens. Owner: the engine thread.

Prefill is slower the deeper in the prompt it is, so its speed is kept by depth, in powers of two.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

RATE = 0.2
FIRST_SECONDS_PER_TOKEN = 1e-3
FIRST_LOAD_NBYTES_PER_S = 400e6
LOAD_OVERHEAD_S = 0.002
"""What a load costs whatever its size: queueing, a thread's wake-up, a step of the engine."""
MIN_CHUNK_TOKENS = 8


@dataclass(eq=False)
class Estimates:
    _seconds_per_token: dict[int, float] = field(default_factory=dict)
    load_nbytes_per_s: float = FIRST_LOAD_NBYTES_PER_S
    n_loads: int = 0
    load_error: float = 0.0
    """Mean of |predicted - took| / took."""

    def saw_prefill(self, start: int, end: int, seconds: float) -> None:
        if end - start < MIN_CHUNK_TOKENS:
            return
        bucket, value = _bucket(start), seconds / (end - start)
        known = self._seconds_per_token.get(bucket, value)
        self._seconds_per_token[bucket] = known + RATE * (value - known)

    def saw_load(self, nbytes: int, seconds: float) -> None:
        took = max(seconds - LOAD_OVERHEAD_S, 1e-6)
        predicted = self.load_s(nbytes)
        self.n_loads += 1
        error = abs(predicted - seconds) / max(seconds, 1e-6)
        self.load_error += (error - self.load_error) / min(self.n_loads, 20)
        speed = nbytes / took
        weight = RATE if self.n_loads > 1 else 1.0
        self.load_nbytes_per_s += weight * (speed - self.load_nbytes_per_s)

    def seconds_per_token(self, depth: int) -> float:
        if not self._seconds_per_token:
            return FIRST_SECONDS_PER_TOKEN
        bucket = _bucket(depth)
        nearest = min(self._seconds_per_token, key=lambda b: (abs(b - bucket), b))
        return self._seconds_per_token[nearest]

    def prefill_s(self, start: int, end: int) -> float:
        """Computing tokens [start, end) of a prompt."""
        total, position = 0.0, start
        while position < end:
            edge = min(end, 1 << (_bucket(position) + 1))
            total += (edge - position) * self.seconds_per_token(position)
            position = edge
        return total

    def load_s(self, nbytes: int) -> float:
        return LOAD_OVERHEAD_S + nbytes / self.load_nbytes_per_s if nbytes else 0.0

    def view(self) -> dict[str, Any]:
        depths = sorted(self._seconds_per_token.items())
        return {
            "prefill_tokens_per_s": {str(1 << b): round(1 / max(s, 1e-9)) for b, s in depths},
            "load_bytes_per_s": round(self.load_nbytes_per_s),
            "loads": self.n_loads,
            "load_error": round(self.load_error, 3),
        }


def _bucket(depth: int) -> int:
    return max(depth, 1).bit_length() - 1
