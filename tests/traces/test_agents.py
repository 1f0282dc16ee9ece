"""The synthetic traffic looks like that of agents, and is the same for the same seed."""

from __future__ import annotations

from itertools import pairwise

from benchmarks.agent_trace import DAY_S, USUAL, agent_trace

from firn.traces.trace import Trace

ENTRIES = agent_trace(3000, seed=1)


def test_it_depends_on_the_seed_alone() -> None:
    assert agent_trace(200, seed=1) == ENTRIES[:200]
    assert agent_trace(200, seed=2) != ENTRIES[:200]


def test_requests_come_in_order_on_working_days() -> None:
    assert all(a.at_s <= b.at_s for a, b in pairwise(ENTRIES))
    longer = agent_trace(4000, seed=1, sessions_per_day=1.0)
    days = {int(e.at_s // DAY_S) % 7 for e in longer}
    assert days >= {0, 1, 2, 3, 4}, "some sessions go on into the night, and no more"
    assert sum(int(e.at_s // DAY_S) % 7 >= 5 for e in longer) < 0.05 * len(longer)


def test_requests_for_summaries_come_in_order_too() -> None:
    """With little context there are many, and some come while sub-agents are at work."""
    entries = agent_trace(3000, seed=1, context=30_000)
    assert all(a.at_s <= b.at_s for a, b in pairwise(entries))


def test_a_chain_of_blocks_is_as_long_as_its_prompt() -> None:
    assert all(len(e.blocks) == e.n_prompt // 256 for e in ENTRIES)
    whole = (
        len(e.blocks) + len(e.reply_blocks) == (e.n_prompt + e.n_reply) // 256 for e in ENTRIES
    )
    assert all(whole)
    assert max(e.n_prompt for e in ENTRIES) < USUAL.context + 20_000, "longer ones are compacted"


def test_most_of_it_was_there_before() -> None:
    """Chats grow, branch, are compacted and forgotten; still, most of each prompt is known."""
    trace = Trace.of(ENTRIES, block=256)
    known = trace.known * 256 / trace.n_prompt
    assert 0.9 < float(known.mean()) < 0.99
    followers: dict[int, set[int]] = {}
    for e in ENTRIES:
        for a, b in pairwise((*e.blocks, *e.reply_blocks)):
            followers.setdefault(a, set()).add(b)
    assert max(map(len, followers.values())) > 20, "many sessions share a beginning"
    assert sum(len(after) == 2 for after in followers.values()) > 20, "people step back"
