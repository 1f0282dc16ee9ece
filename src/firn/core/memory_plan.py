"""How a machine's memory is divided before anything is allocated. Pure: values in, a plan out.

    limit      the device's memory, less headroom and what other firn servers have reserved; or what
               the machine has available, if that is less
    - weights - one prefill chunk - MLX's buffer cache - the write queues - a draft model's prefixes
    = capacity, which live requests and stored prefixes share

Invariant: the parts of a plan that fits never exceed its limit, and it has room for one request of
`LEAST_TOKENS` tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from firn.core.units import GIB, MIB

LEAST_TOKENS = 8192
"""The shortest context that is worth serving."""
DEEP_TOKENS = 32768
"""Chunks keep their full size up to this depth, if memory allows."""
MIN_CHUNK = 64
"""Smaller chunks cost more time than the memory they save is worth."""
REST = 1.5
"""A prompt's last chunk may be longer than the others by this factor."""
CHUNK_SHARE = 0.25
"""Upper limit for a prefill chunk, as a share of what the weights leave."""
BUFFER_CACHE_SHARE = 0.05
"""MLX keeps freed buffers for reuse; this share of the limit is enough for that."""
MIN_BUFFER_CACHE_NBYTES = 32 * MIB
MAX_WRITE_QUEUE_NBYTES, MIN_WRITE_QUEUE_NBYTES = 1 * GIB, 32 * MIB
WRITE_QUEUE_SHARE = 0.05
"""Evicted records waiting to be written, as a share of what the weights leave."""
STORE_QUEUE_NBYTES = 64 * MIB
"""Records waiting to be sent to one shared store. A longer queue would only mean a longer wait."""
DRAFT_DIVISOR = 9
"""A draft model's prefixes get at most this fraction (1 / N) of what is left for rows and prefixes."""
SYSTEM_SHARE = 0.125
MIN_SYSTEM_NBYTES, MAX_SYSTEM_NBYTES = 1 * GIB, 8 * GIB
"""Share of physical memory left to the system and other programs, and its bounds."""
AVAILABLE_SLACK = 0.25
"""Share of the system's part that stays available while a server uses everything else."""
MAX_OWN_HEADROOM_NBYTES = 2 * GIB
"""Left free on a device with memory of its own, or an eighth of it if that is less."""
MIN_CAPACITY_NBYTES = 256 * MIB
"""The capacity of a model that does not fit but is served anyway."""


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """What the machine reports before the model is loaded."""

    device: str
    """Its name: other servers on it share its memory."""
    device_nbytes: int
    """What the driver recommends for one process, or the device's memory."""
    physical_nbytes: int
    available_nbytes: int | None = None
    """What could be allocated without swapping; None: unknown."""
    reserved_nbytes: int = 0
    """Reserved by other firn servers of this user on this device."""
    unclaimed_nbytes: int = 0
    """The part of that which they have not allocated yet, so it still looks available."""
    has_own_memory: bool = False
    """The device's memory is not the machine's."""


@dataclass(frozen=True, slots=True)
class Transient:
    """Memory of a prefill chunk while it runs: activations, and scores where attention is not fused."""

    per_token_nbytes: int
    per_score_nbytes: int = 0
    """For each pair of a query and a key that it attends to."""

    def chunk_nbytes(self, n_tokens: int, depth: int) -> int:
        """Bytes that a chunk of `n_tokens` takes after `depth` earlier tokens."""
        scores = self.per_score_nbytes * (depth + n_tokens)
        return n_tokens * (self.per_token_nbytes + scores)

    def largest_chunk(self, depth: int, nbytes: float, *, most: int) -> int:
        """The largest of `most`, `most`/2, ... that stays within `nbytes` at this depth."""
        chunk = most
        while chunk > MIN_CHUNK and self.chunk_nbytes(int(chunk * REST), depth) > nbytes:
            chunk = max(chunk // 2, MIN_CHUNK)
        return chunk

    def deepest(self, n_tokens: int, nbytes: int) -> int | None:
        """How deep a chunk of `n_tokens` may run within `nbytes`; None: at any depth."""
        if not self.per_score_nbytes:
            return None
        return max((nbytes // n_tokens - self.per_token_nbytes) // self.per_score_nbytes, 0)


@dataclass(frozen=True, slots=True)
class ModelMemory:
    weights_nbytes: int
    per_token_nbytes: int
    """In a live row."""
    fixed_nbytes: int
    transient: Transient = Transient(0)
    context_length: int | None = None
    draft_cache_nbytes: int = 0
    """Limit for a draft model's prefixes, including those waiting to be written."""

    def row_nbytes(self, n_tokens: int) -> int:
        return self.fixed_nbytes + n_tokens * self.per_token_nbytes


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """What the user has set."""

    chunk: int
    fixed_chunk: bool = False
    """Chunks must not shrink, because their size changes the bits of a result (exact reuse)."""
    headroom_nbytes: int | None = None
    device_share: float | None = None
    """Share of the device's memory to use, instead of a headroom."""
    wired_nbytes: int = 0
    n_store_queues: int = 0
    """Caches times shared stores: each pair has a write queue of its own."""

    @property
    def longest_chunk(self) -> int:
        return self.chunk if self.fixed_chunk else int(self.chunk * REST)

    @property
    def shortest_chunk(self) -> int:
        return self.chunk if self.fixed_chunk else int(min(self.chunk, MIN_CHUNK) * REST)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    limit_nbytes: int
    headroom_nbytes: int
    weights_nbytes: int
    chunk_nbytes: int
    buffer_cache_nbytes: int
    write_queue_nbytes: int
    """For the SSD."""
    store_queues_nbytes: int
    """For all shared stores."""
    draft_cache_nbytes: int
    """For a draft model's prefixes, including those waiting to be written."""
    capacity_nbytes: int
    wired_nbytes: int
    context_tokens: int
    """The most tokens, prompt and reply together, of a request that runs alone."""
    fits: bool
    limited_by: str
    """What determines the limit."""

    @property
    def total_nbytes(self) -> int:
        """Everything that the process will use, except for Python itself."""
        return (
            self.weights_nbytes
            + self.chunk_nbytes
            + self.buffer_cache_nbytes
            + self.write_queue_nbytes
            + self.store_queues_nbytes
            + self.draft_cache_nbytes
            + self.capacity_nbytes
        )


def plan_memory(machine: MachineMemory, model: ModelMemory, options: MemoryOptions) -> MemoryPlan:
    headroom = _headroom(machine, options)
    limit, limited_by = _limit(machine, headroom)
    store_queues = options.n_store_queues * STORE_QUEUE_NBYTES
    left = limit - model.weights_nbytes - store_queues
    n_least = min(LEAST_TOKENS, model.context_length or LEAST_TOKENS)
    need = model.row_nbytes(n_least)
    ample, tight = _ample(limit, left, model, options), _tightest(model, options, n_least)
    is_tight = left - sum(ample) < need or ample[0] < tight[0]
    chunk, buffers, queue = tight if is_tight else ample
    capacity = left - chunk - buffers - queue
    spare = max(capacity - need, 0)
    draft_cache = min(model.draft_cache_nbytes, spare, max(capacity, 0) // DRAFT_DIVISOR)
    capacity -= draft_cache
    fits = capacity >= need
    capacity = capacity if fits else max(capacity, MIN_CAPACITY_NBYTES)
    return MemoryPlan(
        limit_nbytes=limit,
        headroom_nbytes=headroom,
        weights_nbytes=model.weights_nbytes,
        chunk_nbytes=chunk,
        buffer_cache_nbytes=buffers,
        write_queue_nbytes=queue,
        store_queues_nbytes=store_queues,
        draft_cache_nbytes=draft_cache,
        capacity_nbytes=capacity,
        wired_nbytes=min(options.wired_nbytes, model.weights_nbytes),
        context_tokens=_context(model, options, capacity, chunk),
        fits=fits,
        limited_by=limited_by,
    )


def _headroom(machine: MachineMemory, options: MemoryOptions) -> int:
    if options.device_share is not None:
        return int((1 - options.device_share) * machine.device_nbytes)
    if options.headroom_nbytes is not None:
        return options.headroom_nbytes
    if machine.has_own_memory:
        return min(MAX_OWN_HEADROOM_NBYTES, machine.device_nbytes // 8)
    # A recommendation already leaves memory to the system, unless the user has raised it.
    left_already = machine.physical_nbytes - machine.device_nbytes
    return max(_system_nbytes(machine) - left_already, 0)


def _limit(machine: MachineMemory, headroom: int) -> tuple[int, str]:
    device = machine.device_nbytes - machine.reserved_nbytes - headroom
    why = "other firn servers" if machine.reserved_nbytes else "the device"
    if machine.available_nbytes is not None:
        available = machine.available_nbytes - machine.unclaimed_nbytes
        available -= int(_system_nbytes(machine) * AVAILABLE_SLACK)
        if available < device:
            return max(available, 0), "other programs"
    return max(device, 0), why


def _system_nbytes(machine: MachineMemory) -> int:
    share = int(machine.physical_nbytes * SYSTEM_SHARE)
    return min(max(share, MIN_SYSTEM_NBYTES), MAX_SYSTEM_NBYTES)


def _ample(
    limit: int, left: int, model: ModelMemory, options: MemoryOptions
) -> tuple[int, int, int]:
    """Chunk, buffer cache and write queue, if there is room for all of them."""
    deep = min(DEEP_TOKENS, model.context_length or DEEP_TOKENS)
    chunk = min(
        model.transient.chunk_nbytes(options.longest_chunk, deep), max(int(left * CHUNK_SHARE), 0)
    )
    buffers = max(int(limit * BUFFER_CACHE_SHARE), MIN_BUFFER_CACHE_NBYTES)
    queue = min(max(int(left * WRITE_QUEUE_SHARE), MIN_WRITE_QUEUE_NBYTES), MAX_WRITE_QUEUE_NBYTES)
    return chunk, buffers, queue


def _tightest(model: ModelMemory, options: MemoryOptions, n_least: int) -> tuple[int, int, int]:
    chunk = options.shortest_chunk
    least = model.transient.chunk_nbytes(chunk, max(n_least - chunk, 0))
    return least, MIN_BUFFER_CACHE_NBYTES, MIN_WRITE_QUEUE_NBYTES


def _context(model: ModelMemory, options: MemoryOptions, capacity: int, chunk_nbytes: int) -> int:
    """The longest context, limited by a row's memory and by how deep the smallest chunk may run."""
    bounds = [model.context_length] if model.context_length else []
    if model.per_token_nbytes:
        bounds.append(max((capacity - model.fixed_nbytes) // model.per_token_nbytes, 0))
    chunk = options.shortest_chunk
    deepest = model.transient.deepest(chunk, chunk_nbytes)
    if deepest is not None:  # a last chunk can still be read after that many tokens
        bounds.append(deepest + chunk)
    return min(bounds) if bounds else 1 << 31
