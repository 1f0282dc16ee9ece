"""Which records are written to a tier. Pure.

Most prompts are never continued, and a store is paid for by the byte. So by default a record is
written to a store only once a request has resumed from it (a later turn, another chat with the same
beginning), and only if another server can find it by name: a whole block, or a position where a
message ends.
"""

from __future__ import annotations

from dataclasses import dataclass

from firn.cache.parts import Part
from firn.cache.tree import CheckpointKind, Record
from firn.core.errors import SetupError


@dataclass(frozen=True, slots=True)
class SpillPolicy:
    block: int
    """0: everything is written, as to a tier that only this server uses."""
    only_reused: bool = False

    def accepts(self, record: Record) -> bool:
        if self.only_reused and not record.node.reused:
            return False
        return not self.block or is_findable(record, self.block)


EVERYTHING = SpillPolicy(0)


def spill_policy(name: str, block: int) -> SpillPolicy:
    """proved: records that were reused. all: all that other servers can find. Raises SetupError."""
    if name not in ("all", "proved"):
        raise SetupError(f"--tier: spill={name} must be proved or all")
    return SpillPolicy(block, only_reused=name == "proved")


def is_findable(record: Record, block: int) -> bool:
    """Whether a server that has only the prompt can know the record's name."""
    if record.node.n_tokens == block and record.part is not Part.STATE:
        return True
    state = record.node.records.get(Part.STATE)
    return state is not None and state.kind >= CheckpointKind.TURN
