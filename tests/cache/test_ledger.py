"""The ledger is the only writer of a record's state, and its books are checked while nobody waits."""

from __future__ import annotations

import ast
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from firn.cache import integrity
from firn.cache.ledger import Ledger, WrongTransition
from firn.cache.parts import Part
from firn.cache.prefix import PrefixCache
from firn.cache.tree import CheckpointKind, Record, Tree
from firn.core.keys import Key
from firn.core.ports import EngineLoad
from firn.core.values import CacheControl, Namespace, PackedTokens
from tests.cache.lab import DENSE, IN_ROWS, LabLayer, LabRow, prompt_of, records_of, tree
from tests.hash_runner import prompt_of as words
from tests.test_imports import SOURCES

BLOCK = 8
STATE = {"arrays", "leaving", "stored", "writing", "reading", "verified", "kind"}
"""What a record is in. Other classes have fields of some of these names: of their own, by `self`."""


def test_only_the_ledger_writes_what_a_record_is_in() -> None:
    writers = {
        path.relative_to(SOURCES).as_posix()
        for path in (SOURCES / "cache").rglob("*.py")
        if writes_state(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert writers == {"cache/ledger.py"}


def writes_state(source: ast.Module) -> bool:
    for node in ast.walk(source):
        targets: list[ast.expr] = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        for target in targets:
            for part in ast.walk(target):
                if (
                    isinstance(part, ast.Attribute)
                    and part.attr in STATE
                    and not is_self(part.value)
                ):
                    return True
    return False


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def test_the_check_of_writers_sees_one() -> None:
    assert writes_state(ast.parse("record.stored |= 1"))
    assert writes_state(ast.parse("a, record.arrays = 1, 2"))
    assert not writes_state(ast.parse("self.arrays = 1"))


# --- transitions ---------------------------------------------------------------------------


def made() -> tuple[Ledger, Record]:
    inner = Tree(BLOCK)
    ledger = Ledger(inner)
    assert [ledger.add_tier(name) for name in ("ssd", "s3")] == [0, 1]
    root = inner.root(Key(b"root"), Namespace(""))
    node = inner.child(root, PackedTokens(np.arange(BLOCK, dtype=np.uint64)), 0, BLOCK)
    return ledger, ledger.add(node, Part.PAGES, nbytes=10, kind=CheckpointKind.TURN)


def hold(ledger: Ledger, record: Record) -> None:
    ledger.hold(record, object(), nbytes=10)


WRONG: dict[str, Callable[[Ledger, Record], Any]] = {
    "held twice": lambda b, r: (hold(b, r), hold(b, r)),
    "moved from nowhere": lambda b, r: b.move(r, object()),
    "leaves without having been there": lambda b, r: b.leave(r),
    "leaves twice": lambda b, r: (hold(b, r), b.leave(r), b.leave(r)),
    "moved while it leaves": lambda b, r: (hold(b, r), b.leave(r), b.move(r, object())),
    "stays without leaving": lambda b, r: (hold(b, r), b.stay(r)),
    "written from nowhere": lambda b, r: b.begin_write(r, 0),
    "written twice at once": lambda b, r: (hold(b, r), b.begin_write(r, 0), b.begin_write(r, 0)),
    "a write that was not begun": lambda b, r: b.end_write(r, 0, stored=True),
    "a read that was not begun": lambda b, r: b.end_read(r, 0),
    "unleased too often": lambda b, r: (b.lease(r), b.unlease(r), b.unlease(r)),
}


@pytest.mark.parametrize("steps", WRONG.values(), ids=WRONG)
def test_what_cannot_follow_is_refused(steps: Callable[[Ledger, Record], Any]) -> None:
    ledger, record = made()
    with pytest.raises(WrongTransition, match="but the record is"):
        steps(ledger, record)


def test_where_a_record_is_and_what_may_follow() -> None:
    ledger, record = made()
    assert ledger.where(record) == "nowhere; next: forgotten"
    ledger.hold(record, object(), nbytes=10)
    ledger.compute(record)
    assert ledger.where(record).startswith("held in memory, not verified; next: verified when")
    ledger.verify(record)
    assert ledger.where(record) == "held in memory; next: written, used, or evicted"
    ledger.begin_write(record, 1)
    ledger.leave(record)
    assert ledger.where(record).startswith("leaving memory, being written to s3; next: released")
    ledger.end_write(record, 1, stored=True)
    ledger.release(record)
    assert ledger.where(record) == "stored in s3; next: loaded, or evicted by the tier"
    ledger.begin_read(record, 1)
    ledger.lease(record)
    assert ledger.where(record) == "stored in s3, being read from s3; next: used by 1 requests"
    ledger.unlease(record)
    ledger.end_read(record, 1)
    ledger.forget(record)
    assert ledger.where(record) == "forgotten; next: nothing, once its writes have ended"
    assert ledger.history(record) == [
        *("held", "begins to be written (s3)", "leaving", "stored (s3)", "released"),
        *("begins to be read (s3)", "read ends (s3)", "lost (s3)", "forgotten"),
    ]
    assert (ledger.memory.total_records, ledger.tiers[1].total_nbytes, ledger.leaving_nbytes) == (
        0,
    ) * 3


def test_totals_count_one_size_wherever_a_record_is() -> None:
    """Bytes on disk and in memory differ a little."""
    ledger, record = made()
    ledger.found(record, 0)
    ledger.hold(record, object(), nbytes=12)
    assert (ledger.memory.total_nbytes, ledger.tiers[0].total_nbytes) == (12, 12)
    ledger.release(record)
    ledger.lost(record, 0)
    assert (ledger.memory.total_nbytes, ledger.tiers[0].total_nbytes) == (0, 0)


def test_a_history_is_of_one_record() -> None:
    ledger, record = made()
    other = ledger.add(record.node, Part.WINDOW, nbytes=1, kind=CheckpointKind.TURN)
    ledger.hold(other, object(), nbytes=1)
    ledger.found(record, 1)
    assert ledger.history(record) == ["stored (s3)"]


# --- the check of the books ----------------------------------------------------------------


def filled(shape: Any = DENSE) -> PrefixCache:
    cache, ids = tree(shape, block=BLOCK), words(1, 50)
    cursor = cache.open(prompt_of(ids), Namespace(""), CacheControl())
    row = LabRow(LabLayer([[]], shape))
    row.consume(ids[:49])
    cursor.commit(row)
    cursor.close(row)
    assert cache.integrity.run() == 0
    return cache


def first(cache: PrefixCache) -> Record:
    return min(records_of(cache), key=lambda r: r.node.start)


def last(cache: PrefixCache) -> Record:
    return max(records_of(cache), key=lambda r: r.node.start)


def out_of_row(cache: PrefixCache) -> None:
    record = last(cache)
    del record.arrays.records[record]


def leaves_for_ever(cache: PrefixCache) -> None:
    cache.records.ledger.leave(last(cache))


def leaves_from_nowhere(cache: PrefixCache) -> None:
    record = last(cache)
    cache.records.ledger.release(record)
    record.leaving = True


FAULTS: dict[str, tuple[Callable[[PrefixCache], Any], str]] = {
    "a write that nobody makes": (lambda c: setattr(last(c), "writing", 1), "tier that does not exist"),
    "a tier that is not there": (lambda c: setattr(last(c), "stored", 4), "tier that does not exist"),
    "leaving for ever": (leaves_for_ever, "nobody writes it"),
    "leaving from nowhere": (leaves_from_nowhere, "nothing of it"),
    "a row that does not have it": (out_of_row, "does not have it"),
    "another size": (lambda c: setattr(last(c), "nbytes", 1), "counts 1 bytes"),
    "negative leases": (lambda c: setattr(last(c), "n_leases", -1), "-1 leases"),
    "nobody has it": (lambda c: c.records.ledger.release(last(c)), "nobody has it"),
}  # fmt: skip


@pytest.mark.parametrize(("spoil", "said"), FAULTS.values(), ids=FAULTS)
def test_a_wrong_record_is_told_counted_and_forgotten(
    spoil: Callable[[PrefixCache], Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    cache = filled(IN_ROWS if spoil is out_of_row else DENSE)
    record, n_records = last(cache), len(records_of(cache))
    spoil(cache)
    caplog.set_level(logging.WARNING, "firn.cache")
    assert cache.integrity.run() >= 1
    assert said in caplog.text
    assert "before: held" in caplog.text, "the record's history"
    assert cache.stats.faults["integrity"] >= 1
    assert record not in records_of(cache)
    assert len(records_of(cache)) == n_records - 1
    caplog.clear()
    cache.integrity.run()  # the sums may have been wrong, too
    assert cache.integrity.run() == 0


def test_wrong_sums_are_counted_again(caplog: pytest.LogCaptureFixture) -> None:
    cache = filled()
    ledger, root = cache.records.ledger, cache.records.tree.roots()[0]
    want = ledger.memory.total_nbytes
    ledger.memory.count(last(cache), +1)
    ledger.leaving_nbytes = 5
    assert cache.integrity.run() == 1
    assert "not the sums" in caplog.text
    assert (ledger.memory.total_nbytes, root.memory.total_nbytes) == (want, want)
    assert ledger.leaving_nbytes == 0
    assert cache.integrity.run() == 0


def test_leases_and_pins_sum_up_along_chains() -> None:
    cache = filled()
    end = last(cache).node
    cache.records.pin(end)
    assert cache.integrity.run() == 0
    end.path().__next__().n_pins += 1
    first(cache).node.n_leases = -1
    assert cache.integrity.run() == 1, "the first finding mends the whole namespace"
    assert cache.integrity.run() == 0
    cache.records.unpin(end)
    assert all(n.n_pins == 0 for n in end.path())


def test_it_runs_in_slices_while_the_engine_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integrity, "N_AT_ONCE", 2)
    now = [0.0]
    cache, ids = tree(DENSE, block=BLOCK, clock=lambda: now[0]), words(1, 50)
    cursor = cache.open(prompt_of(ids), Namespace(""), CacheControl())
    row = LabRow(LabLayer([[]], DENSE))
    row.consume(ids[:49])
    cursor.commit(row)
    cursor.close(row)
    cache.tick(EngineLoad.NONE)
    assert cache.integrity.n_passes == 0, "it was just started"
    now[0] = integrity.EVERY_S
    cache.tick(EngineLoad.DECODING)
    assert not cache.integrity.is_running, "requests come first"
    n_ticks = 0
    while not cache.integrity.n_passes:
        cache.tick(EngineLoad.NONE)
        n_ticks += 1
        assert cache.settled == (cache.integrity.n_passes == 1), (
            "an idle engine goes on until it is over"
        )
    assert n_ticks == len(list(cache.records.tree.subtree(cache.records.tree.roots()[0]))) // 2 + 1
    now[0] *= 10
    cache.tick(EngineLoad.NONE)
    assert cache.integrity.n_passes == 1
    assert not cache.integrity.is_running, "nothing has changed"


def test_totals_that_change_during_a_pass_are_not_wrong() -> None:
    cache = filled()
    cache.integrity.step(2)
    cache.records.drop([last(cache), first(cache)])  # of which the pass has seen the second
    while cache.integrity.is_running:
        cache.integrity.step(2)
    assert cache.integrity.n_violations == 0
    assert cache.integrity.run() == 0
