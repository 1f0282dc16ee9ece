"""What a server finds in a store that others wrote to, by names alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from firn.cache.parts import Needs, Part
from firn.cache.prefix import PrefixCursor
from firn.cache.storage.container import Header, Name, TierEntry, unpack
from firn.cache.storage.seal import Seal
from firn.cache.storage.spill_policy import spill_policy
from firn.cache.storage.store_search import N_ROUND, StoreQuestion, search
from firn.cache.storage.worker import TierWorker
from firn.cache.tiers import FoundRecord
from firn.core.errors import SetupError
from firn.core.events import Admitted
from firn.core.keys import Key, block_keys
from firn.core.ports import EngineLoad
from firn.core.reuse import Cause
from firn.core.values import CacheControl, Namespace, PackedTokens, Prompt
from firn.sparse.thinned import Thinned
from tests.cache.lab import ALL_KINDS, DENSE, HYBRID, SHAPES, LabEngine, Shape, nodes_of, tree
from tests.cache.lab import prompt_of as lab_prompt
from tests.clocks import SetClock
from tests.dict_store import DictStore
from tests.harness import Eager
from tests.hash_engine import Outcome
from tests.waiting import wait_until

BLOCK = 8
WAIT_S = 60.0
PROMPT = [(7 * i) % 89 + 1 for i in range(101)]
ENDS = (13, 40, 77, 90)
"""Where messages end."""


# --- the search ----------------------------------------------------------------------------


def question(n_tokens: int, *, n_known: int = 0) -> StoreQuestion:
    prompt = PackedTokens(np.arange(n_tokens, dtype=np.uint64))
    root = Key(b"r" * 32)
    return StoreQuestion(
        root=root,
        fingerprint=b"f",
        layout=f"lab;block{BLOCK}",
        namespace=Namespace(""),
        block=BLOCK,
        needs=Needs(True, 0, False),
        prompt=prompt,
        known=block_keys(root, prompt.tokens, BLOCK)[:n_known],
        limit=n_tokens - 1,
        states=(),
        now=1e9,
    )


class Searched:
    """A search over these names, to its end."""

    def __init__(self, asked: StoreQuestion, there: set[Name]) -> None:
        self.rounds: list[int] = []
        self.entries: list[TierEntry] = []
        under_way = search(asked)
        try:
            names = next(under_way)
            while True:
                self.rounds.append(len(names))
                found = {n: FoundRecord(str(n), 100, 1e9) for n in names if n in there}
                names = under_way.send(found)
        except StopIteration as end:
            self.entries = end.value


def chain_names(asked: StoreQuestion) -> list[Name]:
    return [Name(key, Part.PAGES) for key in asked.keys]


@pytest.mark.parametrize("n_blocks", [1, 2, 3, 17, 100])
def test_a_chain_of_any_length_is_found_to_its_end(n_blocks: int) -> None:
    asked = question(n_blocks * BLOCK + 1)
    names = chain_names(asked)
    for n_there in range(n_blocks + 1):
        entries = Searched(asked, set(names[:n_there])).entries
        assert [entry.name for entry in entries] == names[:n_there]
        assert [entry.label.start for entry in entries] == [i * BLOCK for i in range(n_there)]


def test_a_long_prompt_costs_a_few_dozen_names() -> None:
    """100,000 tokens in blocks of 256 are 390 blocks."""
    asked = question(390 * BLOCK + 1)
    names = chain_names(asked)
    most_names = most_rounds = 0
    for n_there in range(0, 391, 7):
        find = Searched(asked, set(names[:n_there]))
        assert len(find.entries) == n_there
        most_names, most_rounds = (
            max(most_names, sum(find.rounds)),
            max(most_rounds, len(find.rounds)),
        )
    assert most_rounds <= 4
    assert most_names <= 11 + 2 * N_ROUND + 1
    cold = Searched(asked, set())
    assert cold.entries == []
    assert cold.rounds == [11], "a prompt that nobody knows costs one round"


def test_what_lies_behind_a_hole_is_not_reached() -> None:
    asked = question(30 * BLOCK + 1)
    names = chain_names(asked)
    assert Searched(asked, set(names[1:])).entries == []
    entries = Searched(asked, set(names) - {names[16]}).entries
    assert len(entries) == 16


def test_only_what_is_not_known_is_asked_for() -> None:
    asked = question(30 * BLOCK + 1, n_known=10)
    assert asked.keys == block_keys(asked.root, asked.prompt.tokens, BLOCK)[10:]
    entries = Searched(asked, set(chain_names(asked)[:4])).entries
    assert [entry.label.start for entry in entries] == [80, 88, 96, 104]
    assert question(30 * BLOCK, n_known=29).is_empty


# --- servers on one store ------------------------------------------------------------------


@contextmanager
def server(
    shape: Shape,
    store: DictStore,
    *,
    spill: str = "all",
    clock: Callable[[], float] = lambda: 0.0,
    seal: Seal | None = None,
    **options: Any,
) -> Iterator[LabEngine]:
    """clock: while it stands still, requests wait for whatever is being loaded."""
    cache = tree(shape, block=BLOCK, clock=clock, **options)
    cache.records.estimates = Eager()
    with LabEngine(shape, cache=cache) as lab:
        worker = TierWorker(store, seal=seal, wake=lab.engine.wake, clock=SetClock(clock))
        policy = spill_policy(spill, BLOCK)
        lab.between_steps(
            lambda: cache.add_tier("store", worker, namespaces=[Namespace("")], policy=policy)
        )
        lab.worker = worker  # type: ignore[attr-defined]
        yield lab


def settle(lab: LabEngine) -> None:
    """Wait until everything has been read and written."""
    (tier,) = lab.tree.records.tiers

    def is_busy() -> bool:
        writing = any(
            r.writing for n in nodes_of(lab.tree.records.tree) for r in n.records.values()
        )
        return bool(tier._to_spill or tier._reading or writing or tier._worker.n_results)

    wait_until(lambda: not lab.between_steps(is_busy))


def ask(lab: LabEngine, prompt: Sequence[int], **options: Any) -> Any:
    outcome = lab.submit(prompt, 4, boundaries=ENDS, **options).wait()
    assert outcome.error is None
    assert outcome.tokens() == outcome.expected()
    return outcome


@pytest.mark.parametrize("kind", sorted(SHAPES))
def test_what_one_server_computed_another_resumes(kind: str) -> None:
    shape, shared = SHAPES[kind], dict[str, bytes]()
    with server(shape, DictStore(shared)) as first:
        ask(first, PROMPT)
        settle(first)
        first.check()
    store = DictStore(shared)
    with server(shape, store) as second:
        outcome = ask(second, PROMPT)
        least = ENDS[2] if shape.state else len(PROMPT) - 1 - BLOCK
        assert least <= outcome.n_cached < len(PROMPT)
        assert second.runner.n_prefilled <= len(PROMPT) - outcome.n_cached
        settle(second)
        second.check()
        assert ask(second, [*PROMPT, 5, 6, 7]).n_cached >= outcome.n_cached, (
            "by then it is in memory"
        )
    assert sum(map(len, store.rounds)) <= 64


def test_what_one_server_computed_of_a_thinned_prompt_another_resumes() -> None:
    shared = dict[str, bytes]()
    whole = Prompt(np.array(PROMPT * 2))
    kept = np.concatenate([np.arange(60), np.arange(100, 140)])
    thin = Prompt(whole.ids[kept], positions=Thinned(kept, whole, "every other page"))

    def read(lab: LabEngine) -> int:
        outcome = Outcome(replace(lab.job([1], 4), prompt=thin))
        lab.outcomes[outcome.job.id] = outcome
        lab.engine.submit(outcome.job)
        assert outcome.wait().error is None
        return outcome.n_cached

    with server(DENSE, DictStore(shared)) as first:
        assert read(first) == 0
        settle(first)
    with server(DENSE, DictStore(shared)) as second:
        assert read(second) >= len(thin) - 1 - BLOCK
        assert ask(second, PROMPT).n_cached == 0, "no exact request finds it"


def test_what_another_key_has_sealed_was_not_evicted() -> None:
    shared, keys = dict[str, bytes](), [Seal(b"1" * 32), Seal(b"2" * 32)]
    with server(DENSE, DictStore(shared), seal=keys[0]) as first:
        ask(first, PROMPT)
        settle(first)
    for seal in (keys[1], None):
        with server(DENSE, DictStore(shared), seal=seal) as second:
            assert ask(second, PROMPT).n_cached == 0
            assert dict(second.tree.stats.misses) == {"read failed": 1}


def test_others_tokens_are_nobodys_hit() -> None:
    """Another tenant, another model, another prompt: each has other names."""
    shared = dict[str, bytes]()
    with server(DENSE, DictStore(shared)) as first:
        ask(first, PROMPT)
        settle(first)
    with server(DENSE, DictStore(shared)) as second:
        assert ask(second, PROMPT, namespace="somebody else").n_cached == 0
        assert ask(second, [99, *PROMPT]).n_cached == 0
    with server(DENSE, DictStore(shared), fingerprint=b"other") as third:
        assert ask(third, PROMPT).n_cached == 0


def test_only_what_was_used_again_goes_to_the_store() -> None:
    store = DictStore()
    with server(DENSE, store, spill="proved") as lab:
        ask(lab, PROMPT)
        settle(lab)
        assert store.written == [], "it may never be asked for again"
        ask(lab, [*PROMPT[:64], *range(200, 240)])
        settle(lab)
        keys = block_keys(lab.tree.records.identity.root(Namespace("")), _tokens(PROMPT), BLOCK)
        assert sorted(store.written) == sorted(f"{key.hex()}.pages" for key in keys[:8])
        ask(lab, [*PROMPT, 3, 4])
        settle(lab)
        assert len(store.written) == len(set(store.written)) == 13, "whole blocks, each once"


def _tokens(ids: Sequence[int]) -> Any:
    return np.array(ids, dtype=np.uint64)


def test_a_policy_has_one_of_two_names() -> None:
    with pytest.raises(SetupError, match="spill=some must be proved or all"):
        spill_policy("some", BLOCK)


def is_needed(record: Header, point: int, shape: Shape) -> bool:
    """Whether a prompt that resumes at `point` needs this record of it."""
    end = record.start + len(record.tokens)
    if record.part is Part.STATE or end % BLOCK:
        return end == point
    return end <= point and (record.part is Part.PAGES or end > point - shape.window)


@pytest.mark.parametrize("shape", [DENSE, HYBRID, ALL_KINDS])
def test_a_store_with_a_hole_gives_what_it_has_before_it(shape: Shape) -> None:
    """A store short of memory evicts as it likes, even the head of a chain before its end."""
    # States are kept where the first and the last but one message end.
    points = [0, ENDS[0], ENDS[2]] if shape.state else range(0, len(PROMPT), BLOCK)
    shared = dict[str, bytes]()
    with server(shape, DictStore(shared)) as first:
        ask(first, PROMPT)
        settle(first)
    for hole in shared:
        lost = unpack(shared[hole]).header
        less = {name: raw for name, raw in shared.items() if name != hole}
        with server(shape, DictStore(less)) as second:
            outcome = ask(second, PROMPT)
            assert outcome.n_cached == max(p for p in points if not is_needed(lost, p, shape))
            settle(second)
            second.check()


def test_damaged_and_exchanged_records_are_misses() -> None:
    shared = dict[str, bytes]()
    with server(DENSE, DictStore(shared)) as first:
        ask(first, PROMPT)
        settle(first)
    names = sorted(shared)
    spoilt = dict(shared)
    spoilt[names[0]] = spoilt[names[0]][:-1] + b"\xff"
    spoilt[names[1]], spoilt[names[2]] = spoilt[names[2]], spoilt[names[1]]
    spoilt[names[3]] = b""
    with server(DENSE, DictStore(spoilt)) as second:
        ask(second, PROMPT)
        settle(second)
        second.check()
        assert second.worker.usage().counts["damaged"] >= 1  # type: ignore[attr-defined]


def test_a_store_that_does_not_answer_keeps_nobody_waiting() -> None:
    store = DictStore()
    store.gate = threading.Event()
    with server(DENSE, store, clock=time.monotonic) as lab:
        assert ask(lab, PROMPT).n_cached == 0
        assert store.rounds, "it was asked"
        store.gate.set()
        settle(lab)
        lab.check()


def test_a_store_that_is_down_costs_nothing_and_comes_back() -> None:
    store = DictStore()
    store.is_down = True
    with server(DENSE, store) as lab:
        assert ask(lab, PROMPT).n_cached == 0
        store.is_down = False
        ask(lab, [5, *PROMPT])
        settle(lab)
        assert len(store.written) >= len(PROMPT) // BLOCK
    with server(DENSE, store) as other:
        assert ask(other, [5, *PROMPT]).n_cached > 90
        store.is_down = True
        assert ask(other, [6, *PROMPT]).n_cached == 0


def test_a_prompt_says_that_its_store_did_not_answer() -> None:
    """What the store has of it is unknown: it would be wrong to say that it was never stored."""
    store = DictStore()
    with server(DENSE, store) as lab:
        assert ask(lab, PROMPT).of(Admitted)[0].why == Cause.COLD.value
        settle(lab)
        again = [*PROMPT[:50], *PROMPT]
        assert ask(lab, again).of(Admitted)[0].why == "diverged at token 50"
        store.is_down = True
        assert ask(lab, [5, *PROMPT]).of(Admitted)[0].why == Cause.NO_ANSWER.value
        assert ask(lab, [*PROMPT[:60], *PROMPT]).of(Admitted)[0].why == Cause.NO_ANSWER.value
        assert ask(lab, PROMPT).of(Admitted)[0].why == "", "nothing more could be reused"
    assert (
        lab.tree.stats.shortfalls[Cause.NO_ANSWER.value]
        + lab.tree.stats.misses[Cause.NO_ANSWER.value]
        == 2
    )


def test_a_store_that_answers_late_and_has_nothing_changes_the_reason() -> None:
    store = DictStore()
    store.gate = threading.Event()
    cache = tree(DENSE, block=BLOCK, clock=lambda: 0.0)
    worker = TierWorker(store, clock=SetClock(lambda: 0.0))
    cache.add_tier("store", worker, namespaces=[Namespace("")])
    cursor = cache.open(lab_prompt(PROMPT), Namespace(""), CacheControl())
    assert isinstance(cursor, PrefixCursor)
    cursor.restore()
    assert cursor.admission.why == Cause.NO_ANSWER.value
    store.gate.set()

    def has_answered() -> bool:
        cache.tick(EngineLoad.NONE)
        return cursor.loads.asking is None

    wait_until(has_answered)
    assert cursor.admission.why == Cause.COLD.value
    cursor.close(None)


def test_what_only_a_store_has_is_not_kept_in_mind_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("firn.cache.storage.index.N_ONLY_IN_STORES", 20)
    store = DictStore()
    with server(DENSE, store, limit_nbytes=1 << 12) as lab:
        for i in range(12):
            ask(lab, [i + 200, *PROMPT])
            settle(lab)
        nodes = lab.between_steps(lambda: sum(1 for _ in nodes_of(lab.tree.records.tree)))
        assert nodes < 100 < len(store.written)
        assert ask(lab, [200, *PROMPT]).n_cached > 90, "the store still has it"
        lab.check()


def test_what_turns_out_damaged_while_it_is_computed_is_written_anew() -> None:
    """The records seemed to be there, so nobody wrote them; then reading them failed. How many are
    read before the prompt is computed depends on timing."""
    shared = dict[str, bytes]()
    with server(DENSE, DictStore(shared)) as first:
        ask(first, PROMPT)
        settle(first)
    bad = b"?" * 100
    damaged = set(shared)
    shared |= dict.fromkeys(damaged, bad)

    def n_bad() -> int:
        return sum(shared[name] == bad for name in damaged)

    until = time.monotonic() + WAIT_S
    while n_bad() > 1:  # the last one has part of the reply, and nobody asks for it
        assert time.monotonic() < until
        with server(DENSE, DictStore(shared), clock=time.monotonic) as other:
            n_before = n_bad()
            ask(other, PROMPT)
            settle(other)
            n_found = other.tree.stats.faults["read: unreadable header"]
            assert n_before - n_bad() == n_found
    with server(DENSE, DictStore(shared)) as last:
        assert ask(last, PROMPT).n_cached == 96
