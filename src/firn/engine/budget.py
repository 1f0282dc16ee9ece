"""How much device memory live requests may take. Owner: the engine thread.

    device memory - weights - headroom = capacity, shared by live caches and stored records

Records give way first (the engine tells the cache what is left for it), then new requests wait. A
request's need is an estimate from the layers' shapes, times a factor learned from what was really
used, so that it neither refuses what would fit nor admits what would not.
"""

from __future__ import annotations

from dataclasses import dataclass

from firn.core.errors import NeverFits
from firn.core.values import Job, RequestId

REPLY_RESERVE_TOKENS = 1024
"""A reply's length is unknown: this much of max_tokens is set aside at admission."""
LEARNING_RATE = 0.2
MIN_FACTOR, MAX_FACTOR = 0.5, 4.0


@dataclass(frozen=True, slots=True)
class RowCost:
    """Bytes of one live row: per token it holds, and whatever its length."""

    per_token_nbytes: int
    fixed_nbytes: int

    def of(self, n_tokens: int) -> int:
        return self.fixed_nbytes + n_tokens * self.per_token_nbytes


class Budget:
    def __init__(self, cost: RowCost, *, capacity_nbytes: int) -> None:
        self.cost = cost
        self.capacity_nbytes = capacity_nbytes
        self.factor = 1.0
        """Bytes really used for each byte estimated."""
        self._held: dict[RequestId, int] = {}

    def need_nbytes(self, job: Job) -> int:
        """What this request will take; raises NeverFits when its prompt alone is too much."""
        prompt = job.n * self.cost.of(len(job.prompt))
        if prompt * min(self.factor, 1.0) > self.capacity_nbytes:
            raise NeverFits(prompt, self.capacity_nbytes)
        reply = min(job.max_tokens, REPLY_RESERVE_TOKENS) * job.n * self.cost.per_token_nbytes
        return int((prompt + reply) * self.factor)

    def admit(self, job: Job, need_nbytes: int) -> None:
        self._held[job.id] = need_nbytes

    def release(self, job: Job) -> None:
        self._held.pop(job.id, None)

    @property
    def held_nbytes(self) -> int:
        return sum(self._held.values())

    def free_nbytes(self) -> int:
        """What new requests may take; records that fill it now will be evicted for them."""
        return self.capacity_nbytes - self.held_nbytes

    def view(self) -> dict[str, int | float]:
        """The estimate and what it rests on, for people."""
        return {
            "capacity_bytes": self.capacity_nbytes,
            "held_bytes": self.held_nbytes,
            "bytes_per_token": self.cost.per_token_nbytes,
            "bytes_per_row": self.cost.fixed_nbytes,
            "used_per_estimated": round(self.factor, 3),
        }

    def learn(self, *, estimated_nbytes: int, used_nbytes: int) -> None:
        """Compare an estimate with what live caches really took."""
        if estimated_nbytes > 0:
            seen = min(max(used_nbytes / estimated_nbytes, MIN_FACTOR), MAX_FACTOR)
            self.factor += LEARNING_RATE * (seen - self.factor)
