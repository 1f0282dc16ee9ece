"""A cursor is a request and three values, and each value has one writer."""

from __future__ import annotations

import ast
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import pytest

from firn.cache import cursor as values
from firn.cache.ledger import Ledger
from firn.cache.parts import Part
from firn.cache.planning.estimates import Estimates
from firn.cache.planning.estimates_file import SAVE_EVERY_S, EstimatesFile
from firn.cache.prefix import PrefixCache, PrefixCursor
from firn.cache.storage.worker import TierWorker
from firn.cache.tiers import TierOptions
from firn.cache.tiers.ssd import SsdTier
from firn.cache.tree import CheckpointKind, Tree
from firn.core.keys import Key
from firn.core.ports import EngineLoad
from firn.core.reuse import Cause, Reason
from firn.core.values import CacheControl, KeyTokens, Namespace, PackedTokens
from tests.cache.lab import (
    DENSE,
    HYBRID,
    IN_ROWS,
    WINDOWED,
    LabLayer,
    LabRow,
    Shape,
    n_leases,
    prompt_of,
    records_of,
    tree,
)
from tests.clocks import SetClock
from tests.hash_runner import prompt_of as words
from tests.test_imports import SOURCES
from tests.waiting import POLL_S

WRITERS = {
    values.Committed: "cache/commit.py",
    values.Loads: "cache/loading.py",
    values.Loading: "cache/loading.py",
    values.PendingQuestion: "cache/loading.py",
    values.Reuse: "cache/restore.py",
}
MAX_FIELDS = 12
MAX_METHODS = 20
MUTATORS = frozenset({
    "add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popleft",
    "remove", "setdefault", "update",
})  # fmt: skip


def names_of(value: type) -> set[str]:
    return {field.name for field in fields(value)}


def sources() -> dict[str, ast.Module]:
    return {
        path.relative_to(SOURCES).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in SOURCES.rglob("*.py")
    }


def written(tree: ast.Module, *, through: str) -> set[str]:
    """Fields of the value `cursor.<through>` that are assigned, deleted or changed in place, also by way
    of a local name for it."""
    aliases, fields_of = {through}, dict[str, str]()
    for node in ast.walk(tree):
        for target, value in _pairs(node) if isinstance(node, ast.Assign) else ():
            if isinstance(target, ast.Name) and is_value(value, aliases):
                aliases.add(target.id)
            elif isinstance(target, ast.Name) and is_field(value, aliases):
                fields_of[target.id] = value.attr
    found = set()
    for node in ast.walk(tree):
        for place in places(node):
            is_inside = isinstance(node, ast.Call) or isinstance(place, ast.Subscript)
            while isinstance(place, ast.Subscript):
                place = place.value
            if isinstance(place, ast.Attribute) and is_value(place.value, aliases):
                found.add(place.attr)
            elif isinstance(place, ast.Name) and is_inside and place.id in fields_of:
                found.add(fields_of[place.id])
    return found


def _pairs(node: ast.Assign) -> list[tuple[ast.expr, ast.expr]]:
    pairs = []
    for target in node.targets:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            pairs += list(zip(target.elts, node.value.elts, strict=False))
        else:
            pairs.append((target, node.value))
    return pairs


def is_value(node: ast.expr, aliases: set[str]) -> bool:
    """Whether this is the value: `x.committed`, or a local name for it."""
    if isinstance(node, ast.Attribute):
        return node.attr in aliases
    return isinstance(node, ast.Name) and node.id in aliases


def is_field(node: ast.expr, aliases: set[str]) -> TypeGuard[ast.Attribute]:
    return isinstance(node, ast.Attribute) and is_value(node.value, aliases)


def places(node: ast.AST) -> list[ast.expr]:
    """What a statement or a call changes."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign | ast.Delete):
        targets = node.targets
    elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.For):
        targets = [node.target]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        targets = [node.func.value] if node.func.attr in MUTATORS else []
    flat: list[ast.expr] = []
    for target in targets:
        flat += target.elts if isinstance(target, ast.Tuple) else [target]
    return flat


THROUGH = {
    "committed": values.Committed,
    "loads": values.Loads,
    "loading": values.Loading,
    "asking": values.PendingQuestion,
    "reuse": values.Reuse,
}
"""By which names the values are reached."""


@pytest.mark.parametrize("name", THROUGH)
def test_each_value_has_one_writer(name: str) -> None:
    value = THROUGH[name]
    writers = {
        path
        for path, tree in sources().items()
        if path.startswith("cache/") and written(tree, through=name) & names_of(value)
    }
    assert writers == {WRITERS[value]}


@pytest.mark.parametrize("value", WRITERS)
def test_a_value_is_small_enough_to_be_read(value: Any) -> None:
    if value is not values.Loading:  # one load, from its order to its end
        assert len(fields(value)) <= MAX_FIELDS
    assert value.__doc__


def test_the_request_never_changes() -> None:
    assert values.CacheRequest.__dataclass_params__.frozen  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "source",
    [
        "cursor.committed.node = node",
        "x.cursor.committed.n_saved += 1",
        "committed = cursor.committed\ncommitted.due = {}",
        "a, b = cursor.committed, 1\na.writes = False",
        "cursor.committed.pieces.append(piece)",
        "cursor.committed.due.pop(3, None)",
        "cursor.committed.due[3] = mark",
        "del cursor.committed.due[3]",
        "cursor.committed.node, x = node, 1",
        "for cursor.committed.node in nodes: pass",
        "due = cursor.committed.due\ndue[3] = mark",
        "committed = cursor.committed\npieces = committed.pieces\npieces.clear()",
    ],
)
def test_a_writer_is_seen(source: str) -> None:
    assert written(ast.parse(source), through="committed")


def test_a_reader_is_none() -> None:
    source = (
        "node = cursor.committed.node\nx = cursor.committed.due.get(3)\nx = 1\nself.node = node"
    )
    assert written(ast.parse(source), through="committed") == set()


def test_the_prefix_cache_has_few_methods() -> None:
    methods = [n for n, value in vars(PrefixCache).items() if callable(value) or is_property(value)]
    own = [name for name in methods if name not in ("__class_getitem__",)]
    assert len(own) <= MAX_METHODS, own


def is_property(value: Any) -> bool:
    return isinstance(value, property)


# --- what is held for a request ends with it -----------------------------------------------


EVERYONE = Namespace("")
DEADLINE_S = 30.0


@contextmanager
def server_over(folder: Path, shape: Shape = DENSE) -> Iterator[PrefixCache]:
    cache = tree(shape, block=8, clock=time.monotonic)
    tier = SsdTier(TierOptions(str(folder), limit_nbytes=1 << 30))
    cache.add_tier("ssd", TierWorker(tier), namespaces=[EVERYONE])
    try:
        yield cache
    finally:
        cache.close()


def tick_until(cache: PrefixCache, is_done: Callable[[], bool]) -> None:
    until = time.monotonic() + DEADLINE_S
    while not is_done():
        cache.tick(EngineLoad.NONE)
        assert time.monotonic() < until
        time.sleep(POLL_S)


def test_an_ended_cursor_waits_for_nothing_and_holds_nothing(tmp_path: Path) -> None:
    """It is closed while its load is under way; then another one resumes from what was loaded."""
    ids = words(1, 81)
    with server_over(tmp_path) as cache:
        row = LabRow(LabLayer([[]], DENSE))
        first = cache.open(prompt_of(ids), EVERYONE, CacheControl())
        row.consume(ids[:-1])
        first.commit(row)
        first.close(row)
        tick_until(cache, lambda: all(r.stored for r in records_of(cache)))
        cache.set_room(0)
        cache.set_room(1 << 40)
        left = cache.open(prompt_of(ids), EVERYONE, CacheControl())
        assert left.racing
        assert list(cache.loader.racing) == [left]
        left.close(None)
        assert list(cache.loader.racing) == []
        assert n_leases(cache) == 0
        taken = cache.open(prompt_of(ids), EVERYONE, CacheControl())
        assert isinstance(taken, PrefixCursor)
        tick_until(cache, lambda: not taken.racing)
        assert taken.restore() is not None
        assert taken.admission.n_cached == 80
        taken.close(None)
        assert taken.loads.loaded == {}
        assert n_leases(cache) == 0


def test_nothing_is_due_before_the_end_of_a_jump() -> None:
    """Prompts that stop nowhere are computed together: what was jumped over must not keep one apart."""
    ids = words(1, 97)
    cache = tree(HYBRID, block=8)
    prompt = replace(prompt_of(ids), boundaries=(20, 60))
    first, late = (cache.open(prompt, EVERYONE, CacheControl()) for _ in range(2))
    assert first.restore() is None
    assert late.restore() is None
    assert list(late.stops()) == [20, 60, 96]
    row = LabRow(LabLayer([[]], HYBRID))
    for stop in sorted({*range(8, 65, 8), 20, 60}):
        row.consume(ids[row.n_tokens : stop])
        first.commit(row)
    ahead = late.advance(0)
    assert ahead is not None
    assert ahead.n_tokens == 60
    assert list(late.stops()) == [96]
    for cursor in (first, late):
        cursor.close(None)
    assert n_leases(cache) == 0


def test_a_row_that_resumes_inside_a_block_keeps_the_window_it_was_given() -> None:
    """A ring overwrites these tokens before the block is whole: they cannot be cut out of it later."""
    ids = words(1, 45)
    cache = tree(WINDOWED, block=8)
    row = LabRow(LabLayer([[]], WINDOWED))
    first = cache.open(prompt_of(ids), EVERYONE, CacheControl())
    row.consume(ids[:-1])
    first.commit(row)
    first.close(row)
    later = cache.open(prompt_of([*ids, *words(2, 20)]), EVERYONE, CacheControl())
    assert isinstance(later, PrefixCursor)
    restored = later.restore()
    assert restored is not None
    assert restored.n_tokens == 44
    (piece,) = later.committed.pieces
    assert (piece.start, piece.end) == (40, later.committed.n_saved) == (40, 44)
    later.close(None)


def stored_on(cache: PrefixCache, ids: list[int], shape: Shape) -> None:
    """Have a prompt stored in the tier, and nothing of it in memory."""
    row = LabRow(LabLayer([[]], shape))
    cursor = cache.open(prompt_of(ids), EVERYONE, CacheControl())
    row.consume(ids[:-1])
    cursor.commit(row)
    cursor.close(row)
    tick_until(cache, lambda: all(r.stored for r in records_of(cache)))
    cache.set_room(0)
    cache.set_room(1 << 40)


def test_what_is_computed_but_not_committed_is_still_loaded(tmp_path: Path) -> None:
    ids = words(1, 81)
    with server_over(tmp_path) as cache:
        stored_on(cache, ids, DENSE)
        cursor = cache.open(prompt_of(ids), EVERYONE, CacheControl())
        assert isinstance(cursor, PrefixCursor)
        loading = cursor.loads.loading
        assert loading is not None
        cursor.advance(40)
        assert loading.front == 0
        assert len(loading.missing) == 10
        cursor.close(None)


def test_what_moved_into_the_row_is_held_there_alone(tmp_path: Path) -> None:
    ids = words(1, 81)
    with server_over(tmp_path, IN_ROWS) as cache:
        stored_on(cache, ids, IN_ROWS)
        cursor = cache.open(prompt_of(ids), EVERYONE, CacheControl())
        assert isinstance(cursor, PrefixCursor)
        tick_until(cache, lambda: not cursor.racing)
        restored = cursor.restore()
        assert restored is not None
        assert len(cursor.loads.loaded) == 10
        layer = LabLayer([[]], IN_ROWS)
        restored.fill([layer])
        cursor.filled(LabRow(layer, restored.n_tokens))
        assert cursor.loads.loaded == {}
        cursor.close(None)
        assert n_leases(cache) == 0


def test_what_was_cleared_meanwhile_is_not_committed() -> None:
    cache, ids = tree(DENSE, block=8), words(1, 41)
    cursor = cache.open(prompt_of(ids), EVERYONE, CacheControl())
    assert isinstance(cursor, PrefixCursor)
    row = LabRow(LabLayer([[]], DENSE))
    row.consume(ids[:16])
    cursor.commit(row)
    cache.records.clear(EVERYONE)
    row.consume(ids[16:40])
    cursor.commit(row)
    assert cursor.committed.node.end == 16
    cursor.close(row)
    assert records_of(cache) == []


def test_a_reason_is_corrected_by_what_happens_after_it_was_given() -> None:
    cache = tree(DENSE, block=8)
    cursor = cache.open(prompt_of(words(1, 41)), EVERYONE, CacheControl())
    assert isinstance(cursor, PrefixCursor)
    cursor.loads.news = values.LoadNews(Cause.DAMAGED)
    assert cursor.restore() is None
    cache.restorer.correct_reason(cursor)
    assert cursor.admission.reason == Reason(Cause.COLD), "it was given with all that is known"
    cursor.loads.news = values.LoadNews(Cause.DAMAGED)
    cache.restorer.correct_reason(cursor)
    assert cursor.admission.reason == Reason(Cause.DAMAGED)
    cursor.close(None)


def test_a_record_is_read_from_the_fastest_tier_that_has_it() -> None:
    inner = Tree(8)
    ledger = Ledger(inner)
    for name in ("ssd", "s3", "redis"):
        ledger.add_tier(name)
    node = inner.child(inner.root(Key(b"r" * 32), EVERYONE), PackedTokens(tokens_of(8)), 0, 8)
    record = inner.add(node, Part.PAGES, nbytes=1, kind=CheckpointKind.TURN)
    with pytest.raises(LookupError):
        assert record.fastest_tier
    for tier in (2, 1, 0):
        ledger.found(record, tier)
        assert record.fastest_tier == tier


def test_estimates_are_saved_now_and_then_and_at_the_end(tmp_path: Path) -> None:
    now = [0.0]
    path = tmp_path / "estimates"
    known = Estimates()
    known.prefill.observe(0, 256, 0.1)
    file = EstimatesFile(path, known, SetClock(lambda: now[0]))
    for now[0], is_saved in ((SAVE_EVERY_S - 1, False), (SAVE_EVERY_S, True)):
        file.tick()
        assert path.exists() == is_saved
    path.unlink()
    file.save()
    assert path.exists()


def tokens_of(n_tokens: int) -> KeyTokens:
    return np.arange(n_tokens, dtype=np.uint64)
