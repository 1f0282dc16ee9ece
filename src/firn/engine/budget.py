"""How much device memory live requests may take. Owner: the engine thread.

Live rows and stored records share the capacity (core.memory_plan). Records give way first: the engine
tells the cache what is left for it. Then new requests wait, and when replies outgrow the capacity the
youngest request is preempted: it goes back into the queue. A request's need is estimated from the
shapes of the layers, times a factor learned from what rows actually used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from firn.core.errors import NeverFits
from firn.core.memory_plan import Transient
from firn.core.units import MIB
from firn.core.values import Job, RequestId

REPLY_RESERVE_TOKENS = 1024
"""Reserved for a reply at admission, since its length is unknown; max_tokens if that is less."""
GROW_TOKENS = 256
"""Reserved for a reply that has used up its reserve: the next step of its buffer."""
LEARN_FROM_TOKENS = 1024
"""Shorter rows teach nothing: their buffers are mostly a first step, and their windows are not full."""
LEARNING_RATE = 0.2
MIN_FACTOR, MAX_FACTOR = 0.5, 4.0
CHUNK_LEARNING_RATE = 0.25
MIN_CHUNK_FACTOR, MAX_CHUNK_FACTOR = 0.25, 4.0
TEACHING_CHUNK_NBYTES = 16 * MIB
"""The memory of a smaller chunk cannot be told apart from other allocations at that moment."""

NO_TRANSIENT = Transient(0)


@dataclass(frozen=True, slots=True)
class RowCost:
    """Bytes of one live row: for each of its tokens, and fixed."""

    per_token_nbytes: int
    fixed_nbytes: int
    step_tokens: int = 1
    """Buffers grow by this many tokens."""

    def of(self, n_tokens: int) -> int:
        n_room = -(-n_tokens // self.step_tokens) * self.step_tokens
        return self.fixed_nbytes + n_room * self.per_token_nbytes


class Budget:
    def __init__(
        self,
        cost: RowCost,
        *,
        capacity_nbytes: int,
        transient: Transient = NO_TRANSIENT,
        chunk_nbytes: int = 0,
        reserve_tokens: int = REPLY_RESERVE_TOKENS,
        grow_tokens: int = GROW_TOKENS,
    ) -> None:
        """chunk_nbytes: memory of one prefill chunk, on top of the capacity; 0: no limit."""
        self.cost = cost
        self.capacity_nbytes = capacity_nbytes
        self._first_capacity_nbytes = capacity_nbytes
        """The capacity at the start. Other programs may give back what they took of it since."""
        self.factor = 1.0
        """Bytes actually used for each estimated byte."""
        self.chunk_factor = 1.0
        """Bytes that prefill chunks used while they ran, for each estimated byte."""
        self._transient = transient
        self._chunk_nbytes = chunk_nbytes
        self._reserve_tokens = reserve_tokens
        self._grow_tokens = grow_tokens
        self._reserved: dict[RequestId, int] = {}

    # --- requests --------------------------------------------------------------------------

    def need_nbytes(self, job: Job) -> int:
        """Memory to reserve for a new request; from any thread. Raises NeverFits if its prompt alone is
        too large."""
        prompt_nbytes = job.n * self.cost.of(len(job.prompt))
        if prompt_nbytes * min(self.factor, 1.0) > self._ceiling_nbytes:
            raise NeverFits(prompt_nbytes, self._ceiling_nbytes)
        return self.grown_nbytes(job, [0] * job.n)

    def grown_nbytes(self, job: Job, replies: Sequence[int]) -> int:
        """Memory to reserve while the replies have these lengths, including room to grow."""
        n_prompt = len(job.prompt)
        ahead = (max(n + self._grow_tokens, self._reserve_tokens) for n in replies)
        rows = (self.cost.of(n_prompt + min(n, job.max_tokens)) for n in ahead)
        return int(sum(rows) * self.factor)

    def outgrown(self, job: Job, replies: Sequence[int]) -> bool:
        """Whether this request alone takes more than there will ever be."""
        nbytes = sum(self.cost.of(len(job.prompt) + n) for n in replies)
        prompt_nbytes = job.n * self.cost.of(len(job.prompt))
        return nbytes * min(self.factor, 1.0) > max(self._ceiling_nbytes, prompt_nbytes)

    @property
    def _ceiling_nbytes(self) -> int:
        return max(self._first_capacity_nbytes, self.capacity_nbytes)

    def admit(self, job: Job, need_nbytes: int) -> None:
        """Reserve memory for it, or change what is reserved."""
        self._reserved[job.id] = need_nbytes

    def release(self, job: Job) -> None:
        self._reserved.pop(job.id, None)

    @property
    def reserved_nbytes(self) -> int:
        return sum(self._reserved.values())

    def free_nbytes(self) -> int:
        """What new requests may take: records that use it are evicted for them.

        Negative: replies have outgrown the capacity.
        """
        return self.capacity_nbytes - self.reserved_nbytes

    def view(self) -> dict[str, int | float]:
        """The budget and the factors of its estimates, for /v1/cache/stats and the dashboard."""
        return {
            "capacity_bytes": self.capacity_nbytes,
            "held_bytes": self.reserved_nbytes,
            "bytes_per_token": self.cost.per_token_nbytes,
            "bytes_per_row": self.cost.fixed_nbytes,
            "used_per_estimated": round(self.factor, 3),
            "chunk_bytes": self._chunk_nbytes,
            "chunk_used_per_estimated": round(self.chunk_factor, 3),
        }

    def learn(self, lengths: Sequence[int], used_nbytes: int) -> None:
        """Compare the estimate for rows of these lengths with what they actually take."""
        if not lengths or sum(lengths) < LEARN_FROM_TOKENS * len(lengths):
            return
        estimated = sum(map(self.cost.of, lengths))
        if estimated > 0:
            ratio = min(max(used_nbytes / estimated, MIN_FACTOR), MAX_FACTOR)
            self.factor += LEARNING_RATE * (ratio - self.factor)

    # --- prefill chunks --------------------------------------------------------------------

    def chunk_tokens(self, depth: int, *, most: int) -> int:
        """How many tokens a chunk may have after `depth` others, at most `most`."""
        if not self._chunk_nbytes:
            return most
        allowed = self._chunk_nbytes / self.chunk_factor
        return self._transient.largest_chunk(depth, allowed, most=most)

    def learn_chunk(self, n_tokens: int, depth: int, used_nbytes: int) -> None:
        """Learn a chunk's memory. A higher factor applies immediately, a lower one gradually."""
        estimated = self._transient.chunk_nbytes(n_tokens, depth)
        if used_nbytes <= 0 or estimated < TEACHING_CHUNK_NBYTES:
            return
        ratio = min(max(used_nbytes / estimated, MIN_CHUNK_FACTOR), MAX_CHUNK_FACTOR)
        rate = 1.0 if ratio > self.chunk_factor else CHUNK_LEARNING_RATE
        self.chunk_factor += rate * (ratio - self.chunk_factor)
