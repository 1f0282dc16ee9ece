"""Which records go to a store: those that were used again, and that another server could ask for."""

from __future__ import annotations

from firn.cache.parts import Part
from firn.cache.storage.spill_policy import is_findable, spill_policy
from firn.cache.tree import CheckpointKind
from tests.cache.lab import HYBRID, LabEngine, records_of, tree
from tests.hash_runner import prompt_of as words

BLOCK = 8


def test_a_state_that_no_message_ends_at_cannot_be_asked_for() -> None:
    cache, ids = tree(HYBRID, block=BLOCK), words(1, 61)
    takes = spill_policy("all", BLOCK)
    with LabEngine(HYBRID, cache=cache) as lab:
        lab.submit(ids, 4, boundaries=[30]).wait().check()
        states = [r for r in records_of(cache) if r.part is Part.STATE]
        assert {r.kind >= CheckpointKind.TURN for r in states} == {True, False}
        for record in states:
            assert is_findable(record, BLOCK) == (record.kind >= CheckpointKind.TURN)
            assert takes.accepts(record) == (record.kind >= CheckpointKind.TURN)
        pages = [r for r in records_of(cache) if r.part is Part.PAGES]
        assert all(is_findable(r, BLOCK) for r in pages if r.node.n_tokens == BLOCK)
