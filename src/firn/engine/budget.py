"""How much device memory live requests may take. Owner: the engine thread.

    capacity (core.memory_plan) is shared by live rows and stored records

Records give way first (the engine tells the cache what is left for it), then new requests wait, and
when replies outgrow all of it the youngest request goes back to its tokens. A request's need is
estimated from the layers' shapes, times a factor learned from what rows really used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from firn.core.errors import NeverFits
from firn.core.memory_plan import Transient
from firn.core.values import Job, RequestId

REPLY_RESERVE_TOKENS = 1024
"""Set aside for a reply at admission, since its length is unknown; max_tokens if that is less."""
GROW_TOKENS = 256
"""Set aside for a reply that has used up its reserve: the next step of its buffer."""
LEARN_FROM_TOKENS = 1024
"""Shorter rows teach nothing: their buffers are mostly a first step, and their windows are not full."""
LEARNING_RATE = 0.2
MIN_FACTOR, MAX_FACTOR = 0.5, 4.0
CHUNK_LEARNING_RATE = 0.25
MIN_CHUNK_FACTOR, MAX_CHUNK_FACTOR = 0.25, 4.0
TEACHING_CHUNK_NBYTES = 16 << 20
"""Smaller chunks are lost among whatever else is allocated meanwhile."""

NO_TRANSIENT = Transient(0)


@dataclass(frozen=True, slots=True)
class RowCost:
    """Bytes of one live row: for each token it holds, and fixed."""

    per_token_nbytes: int
    fixed_nbytes: int
    step_tokens: int = 1
    """Buffers grow by so many tokens."""

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
        """chunk_nbytes: what one prefill chunk may take besides the capacity; 0: no limit."""
        self.cost = cost
        self.capacity_nbytes = capacity_nbytes
        self.most_nbytes = capacity_nbytes
        """The capacity of a server that has the machine to itself."""
        self.factor = 1.0
        """Bytes really used for each byte estimated."""
        self.chunk_factor = 1.0
        """Likewise, of the memory that prefill chunks take while they run."""
        self._transient = transient
        self._chunk_nbytes = chunk_nbytes
        self._reserve_tokens = reserve_tokens
        self._grow_tokens = grow_tokens
        self._held: dict[RequestId, int] = {}

    # --- requests --------------------------------------------------------------------------

    def need_nbytes(self, job: Job) -> int:
        """What this request will take; from any thread. Raises NeverFits if its prompt alone is too
        much."""
        prompt = job.n * self.cost.of(len(job.prompt))
        most = max(self.most_nbytes, self.capacity_nbytes)
        if prompt * min(self.factor, 1.0) > most:
            raise NeverFits(prompt, most)
        return self.grown_nbytes(job, [0] * job.n)

    def grown_nbytes(self, job: Job, replies: Sequence[int]) -> int:
        """What it takes with replies of so many tokens, and what is set aside for more."""
        n_prompt = len(job.prompt)
        ahead = (max(n + self._grow_tokens, self._reserve_tokens) for n in replies)
        rows = (self.cost.of(n_prompt + min(n, job.max_tokens)) for n in ahead)
        return int(sum(rows) * self.factor)

    def outgrown(self, job: Job, replies: Sequence[int]) -> bool:
        """Whether it alone takes more than there will ever be."""
        nbytes = sum(self.cost.of(len(job.prompt) + n) for n in replies)
        most = max(self.most_nbytes, self.capacity_nbytes)
        return nbytes * min(self.factor, 1.0) > max(most, self.cost.of(len(job.prompt)) * job.n)

    def admit(self, job: Job, need_nbytes: int) -> None:
        """Reserve memory for it; again when it needs more or less."""
        self._held[job.id] = need_nbytes

    def release(self, job: Job) -> None:
        self._held.pop(job.id, None)

    def held_by(self, job: Job) -> int:
        return self._held.get(job.id, 0)

    @property
    def held_nbytes(self) -> int:
        return sum(self._held.values())

    def free_nbytes(self) -> int:
        """What new requests may take; records that fill it now are evicted for them."""
        return self.capacity_nbytes - self.held_nbytes

    def view(self) -> dict[str, int | float]:
        """The estimate and what it is based on, for people."""
        return {
            "capacity_bytes": self.capacity_nbytes,
            "held_bytes": self.held_nbytes,
            "bytes_per_token": self.cost.per_token_nbytes,
            "bytes_per_row": self.cost.fixed_nbytes,
            "used_per_estimated": round(self.factor, 3),
            "chunk_bytes": self._chunk_nbytes,
            "chunk_used_per_estimated": round(self.chunk_factor, 3),
        }

    def learn(self, lengths: Sequence[int], used_nbytes: int) -> None:
        """Compare the estimate for rows of these lengths with what they really take."""
        if not lengths or sum(lengths) < LEARN_FROM_TOKENS * len(lengths):
            return
        estimated = sum(map(self.cost.of, lengths))
        if estimated > 0:
            seen = min(max(used_nbytes / estimated, MIN_FACTOR), MAX_FACTOR)
            self.factor += LEARNING_RATE * (seen - self.factor)

    # --- prefill chunks --------------------------------------------------------------------

    def chunk_tokens(self, depth: int, *, most: int) -> int:
        """How many tokens a chunk may have behind `depth` others."""
        if not self._chunk_nbytes:
            return most
        allowed = self._chunk_nbytes / self.chunk_factor
        return self._transient.largest_chunk(depth, allowed, most=most)

    def learn_chunk(self, n_tokens: int, depth: int, used_nbytes: int) -> None:
        """A chunk raised the device's peak memory. A higher factor counts at once, a lower one
        gradually."""
        estimated = self._transient.of(n_tokens, depth)
        if used_nbytes <= 0 or estimated < TEACHING_CHUNK_NBYTES:
            return
        seen = min(max(used_nbytes / estimated, MIN_CHUNK_FACTOR), MAX_CHUNK_FACTOR)
        rate = 1.0 if seen > self.chunk_factor else CHUNK_LEARNING_RATE
        self.chunk_factor += rate * (seen - self.chunk_factor)
