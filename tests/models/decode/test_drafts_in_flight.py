"""A step with drafts is computed while the engine passes on the tokens of the previous one."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from firn.backends import named
from firn.core.measure import N_SURE
from firn.core.values import RequestId
from firn.models.decode.batch import Group, Row, TakenTokens
from firn.models.decode.steps import PlainInFlight
from firn.models.decode.verify import Verification
from firn.models.speculation.drafters import NO_DRAFT
from firn.models.speculation.drafters.lookup import Lookup
from firn.models.speculation.gate import CREDIT
from firn.models.speculation.speculator import Speculation
from tests.harness import GREEDY, Harness, Result, running
from tests.models.alone import assert_same, plain, prompt_of, said_alone
from tests.models.speculation.drafting import AnyWidth, KnownReplies
from tests.models.speculation.simulated import NO_PICKS, a_job
from tests.zoo import VOCAB_SIZE

IN_FLIGHT = {"qwen3": True, "gemma3_text": True, "qwen3_next": False, "falcon_h1": False}
"""Recurrent layers can only be cut at their newest token, so their steps are read immediately."""
FORCED = [20, 21, 22, 23]
PROMPTS = [prompt_of(random.Random(n), 40) for n in range(3)]
"""Used by all tests, so that the replies are computed once."""
N_REPLY = 48
Moment = Callable[[Harness, Result], None]


def drafted(name: str) -> AnyWidth:
    """Drafts of two or more tokens, nine in ten of which are right."""
    said = said_alone(name, PROMPTS, N_REPLY)
    replies = {(tuple(p), 0): r.reply for p, r in zip(PROMPTS, said, strict=True)}
    return AnyWidth(KnownReplies(replies, right=0.9, vocab_size=VOCAB_SIZE), least=3)


def at_token(harness: Harness, prompt: list[int], n_reply: int, n: int, then: Moment) -> Result:
    """Ask, and call `then` between two steps once the reply has `n` tokens."""

    def submit() -> Result:
        asked = harness.submit(prompt, n_reply)
        asked.waiting[n] = lambda: then(harness, asked)
        return asked

    return harness.between_steps(submit).wait()


def request_of(harness: Harness) -> RequestId:
    return RequestId(str(len(harness.results) - 1))


@pytest.mark.parametrize("name", IN_FLIGHT)
def test_a_step_with_drafts_stays_in_flight_where_rows_can_be_cut_meanwhile(name: str) -> None:
    speculation = drafted(name)
    seen: list[bool] = []

    def look() -> None:
        for group in harness.runner._groups:
            wide = [s for s in group.unread if isinstance(s, Verification)]
            seen.extend(not step.is_settled for step in wide)

    with running(plain(name), speculation=lambda: speculation) as harness:
        results = harness.between_steps(lambda: [harness.submit(p, 40) for p in PROMPTS])
        while not all(result.finished.is_set() for result in results):
            harness.between_steps(look)
    assert any(seen) == IN_FLIGHT[name]
    assert speculation.totals.n_accepted > 20


@pytest.mark.parametrize("name", IN_FLIGHT)
def test_tokens_that_are_forced_meanwhile_come_behind_it(name: str) -> None:
    for n, prompt in zip((5, 6, 9), PROMPTS, strict=True):
        speculation = drafted(name)

        def force(harness: Harness, result: Result) -> None:
            harness.engine.force(request_of(harness), 0, FORCED, at=0)

        with running(plain(name), speculation=lambda s=speculation: s) as harness:
            said = at_token(harness, prompt, 40, n, force).reply
        at = next(i for i in range(n, 40) if said[i : i + len(FORCED)] == FORCED)
        assert assert_same(name, prompt, said[:at]) > 2
        assert assert_same(name, [*prompt, *said[: at + 4]], said[at + 4 :]) > 2


@pytest.mark.parametrize("name", [name for name, stays in IN_FLIGHT.items() if stays])
def test_a_reply_that_is_stopped_meanwhile_is_stored_as_far_as_it_is_known(name: str) -> None:
    for n, prompt in zip((5, 8, 13), PROMPTS, strict=True):
        speculation = drafted(name)

        def stop(harness: Harness, result: Result) -> None:
            harness.engine.stop_choice(request_of(harness), 0)

        with running(plain(name), speculation=lambda s=speculation: s, block=16) as harness:
            result = at_token(harness, prompt, N_REPLY, n, stop)
            said = [*prompt, *result.reply]
            assert n <= len(result.reply) < N_REPLY
            again = harness.ask([*said, 50, 51, 52], 8, sampling=GREEDY)
            assert len(said) - 1 <= again.n_cached <= len(said)
            assert_same(name, [*said, 50, 51, 52], again.reply)


# --- drafts that are not tried -------------------------------------------------------------


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Heard(Lookup):
    """Each draft takes the host a while."""

    def __init__(self) -> None:
        super().__init__()
        self.clock, self.draft_s = Clock(), 0.0
        self.tokens: list[int] = []
        self.n_drafts = 0

    def extend(self, row: Any, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        super().extend(row, tokens)

    def draft(self, rows: Sequence[Any], n_most: int) -> Any:
        self.n_drafts += 1
        self.clock.now += self.draft_s
        return super().draft(rows, n_most) if n_most else [NO_DRAFT]


def said_plainly(
    heard: Heard, *, draft_s: float, step_s: float, n_steps: int, n_rows: int = 1
) -> list[int]:
    """Rows take steps of one token, one of them always in flight. Returns what they take in turn."""
    clock, heard.draft_s = heard.clock, draft_s
    speculation = Speculation(heard, profile=named("cuda").profile.steps, clock=clock)
    rows = [Row([], 100, limit=1 << 30, pending=[1]) for _ in range(n_rows)]
    group = Group(rows, [], NO_PICKS.tokens)
    for row in rows:
        row.group = group
        speculation.open(row, a_job())
    rng, said = random.Random(6), []
    for _ in range(n_steps):
        assert speculation.propose(group, lambda: None) is None
        group.unread.append(PlainInFlight(tuple(rows), NO_PICKS, is_pipelined=True))
        if len(group.unread) > 1:
            clock.now += step_s
            step = group.unread.pop(0)
            step.is_counted = True
            taken = [TakenTokens(row, (rng.randrange(1 << 30),), (None,)) for row in rows]
            said += [t.tokens[0] for t in taken]
            speculation.observe(group, taken, step)
    for row in rows:
        speculation.close(row)
    return said


def test_a_row_that_rests_tells_its_drafter_everything_in_the_end() -> None:
    heard = Heard()
    said = said_plainly(heard, draft_s=1e-3, step_s=1e-3, n_steps=50)
    assert heard.tokens == said
    assert heard.n_drafts < len(said) / 4


def test_a_row_rests_longer_where_drafting_takes_a_larger_share_of_a_step() -> None:
    n_drafts = []
    for draft_s in (1e-6, 1e-3):
        heard = Heard()
        said_plainly(heard, draft_s=draft_s, step_s=5e-3, n_steps=400)
        n_drafts.append(heard.n_drafts)
    assert n_drafts[0] > 390, "it takes next to nothing"
    assert n_drafts[1] < n_drafts[0] / 10


@pytest.mark.parametrize("n_rows", [1, 8, 32])
def test_drafts_in_vain_of_all_rows_together_take_little_of_a_step(n_rows: int) -> None:
    """Both to make them and to decide that they are not worth trying. The first steps are not measured
    yet."""
    heard = Heard()
    said_plainly(heard, draft_s=1e-4, step_s=5e-3, n_steps=2000, n_rows=n_rows)
    assert heard.n_drafts > 20, "every row is tried again"
    n_drafts = heard.n_drafts - (N_SURE + 2) * n_rows
    assert 1e-4 * n_drafts < (0.005 * 2000 + 2 * CREDIT) * 5e-3
