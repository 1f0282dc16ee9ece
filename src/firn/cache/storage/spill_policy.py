"""Which records are written to a shared store. Pure.

Most prompts are never continued, and a store is paid for by the byte. So by default a record is
written only once a request has resumed from it (a later turn, another chat with the same
beginning), and only if another server can find it by name: a whole block, or a position where a
message ends.
"""

from __future__ import annotations

from collections.abc import Callable

from firn.cache.parts import Part
from firn.cache.tree import Mark, Record
from firn.core.errors import SetupError

SpillPolicy = Callable[[Record], bool]


def spill_policy(name: str, block: int) -> SpillPolicy:
    """proved: records that were reused. all: all that other servers can find. Raises SetupError."""
    if name == "all":
        return lambda record: is_findable(record, block)
    if name == "proved":
        return lambda record: record.node.reused and is_findable(record, block)
    raise SetupError(f"--tier: spill={name} must be proved or all")


def is_findable(record: Record, block: int) -> bool:
    """Whether a server that has only the prompt can know the record's name."""
    if record.node.n_tokens == block and record.part is not Part.STATE:
        return True
    state = record.node.records.get(Part.STATE)
    return state is not None and state.mark >= Mark.TURN
