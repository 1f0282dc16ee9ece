"""What every prefix cache owes the engine."""

from __future__ import annotations

import numpy as np
import pytest

from firn.core import ports
from firn.core.ports import EngineLoad, NullCursor
from firn.core.values import CacheControl, Namespace, Prompt
from tests.contracts.stands import (
    CACHES,
    EVERYTHING,
    Stand,
    assert_fits,
    job_of,
    prompt_of,
    read,
    stand,
    step,
)


@pytest.mark.parametrize("kind", CACHES)
def test_caches_and_cursors_have_the_ports_shape(kind: str) -> None:
    at = stand(kind)
    assert_fits(ports.EngineCache, at.cache)
    cursor = at.cache.open(prompt_of(5), Namespace(""), EVERYTHING)
    for found in (cursor, cursor.fork([]), NullCursor()):
        assert_fits(ports.Cursor, found)


every_cache = pytest.mark.parametrize("kind", CACHES)


def visit(
    at: Stand,
    prompt: Prompt,
    n_reply: int = 6,
    *,
    namespace: str = "",
    control: CacheControl = EVERYTHING,
) -> tuple[int, list[int]]:
    """Run one request as the engine would: how many tokens were cached, and what was said."""
    cache, runner = at.cache, at.runner
    cursor = cache.open(prompt, Namespace(namespace), control)
    assert not cursor.racing
    assert not cursor.should_wait(busy=False)
    restored = cursor.restore()
    row = runner.start(restored)
    if restored is not None:
        cursor.filled(row)
        cache.observe_restore(restored, 0.001)
    n_cached = row.n_tokens
    assert cursor.admission.n_cached == n_cached
    assert n_cached < len(prompt), "a token is left to make the logits"
    cursor.commit(row)
    while row.n_tokens < len(prompt) - 1:
        stops = list(cursor.stops())
        assert stops == sorted(set(stops))
        assert all(0 < stop < len(prompt) for stop in stops)
        end = min([row.n_tokens + 8, len(prompt) - 1, *(s for s in stops if s > row.n_tokens)])
        start = row.n_tokens
        runner.prefill(row, prompt, end)
        runner.finish_chunk(row)
        cache.prefill.observe(start, end, 0.001)
        cursor.commit(row)
        cache.tick(EngineLoad.DECODING)
    (row,) = runner.choices(row, job_of(prompt), [0])
    said: list[int] = []
    mine = cursor.fork(said)
    cursor.close(None)
    runner.join(row, int(prompt.ids[-1]))
    for _ in range(n_reply):
        said += [token for taken in step(runner) for token in taken.tokens]
        if mine.commit_due(row.n_tokens):
            mine.commit(row)
    mine.close(row)
    mine.close(None)
    runner.leave([row])
    return n_cached, said


@every_cache
def test_a_second_visit_finds_the_first_and_says_the_same(kind: str) -> None:
    at = stand(kind)
    prompt = prompt_of(40)
    cold = visit(at, prompt)
    warm = visit(at, prompt)
    assert cold[0] == 0
    assert (warm[0] > 0) == at.keeps
    assert warm[1] == cold[1]


@every_cache
def test_a_conversation_grows_on_what_was_said(kind: str) -> None:
    at = stand(kind)
    prompt = prompt_of(30)
    _, said = visit(at, prompt, 20)
    more = np.array([*said, 17, 18, 19], dtype=np.int64)
    turn = Prompt(np.concatenate([prompt.ids, more]))
    n_cached, warm = visit(at, turn)
    assert (n_cached > 30) == at.keeps
    assert warm == visit(stand(kind), turn)[1]


@every_cache
def test_namespaces_share_nothing(kind: str) -> None:
    at = stand(kind)
    prompt = prompt_of(40)
    visit(at, prompt, namespace="a")
    assert visit(at, prompt, namespace="b")[0] == 0
    assert (visit(at, prompt, namespace="a")[0] > 0) == at.keeps


@every_cache
def test_a_request_may_switch_reading_and_writing_off(kind: str) -> None:
    at = stand(kind)
    prompt = prompt_of(40)
    visit(at, prompt, control=CacheControl(write=False))
    assert visit(at, prompt)[0] == 0
    assert visit(at, prompt, control=CacheControl(read=False))[0] == 0


@every_cache
def test_a_blank_cursor_neither_reads_nor_writes(kind: str) -> None:
    at = stand(kind)
    prompt = prompt_of(40)
    visit(at, prompt)
    cursor = NullCursor()
    assert not cursor.racing
    assert not cursor.should_wait(busy=False)
    assert cursor.restore() is None
    assert cursor.advance(0) is None
    assert list(cursor.stops()) == []
    row = at.runner.start(None)
    read(at.runner, row, prompt_of(40, salt=3))
    assert not cursor.commit_due(1 << 20)
    cursor.commit(row)
    forked = cursor.fork([])
    assert not forked.commit_due(1 << 20)
    forked.close(row)
    cursor.close(row)
    assert visit(at, prompt_of(40, salt=3))[0] == 0


@every_cache
def test_a_cache_without_room_forgets_and_still_answers(kind: str) -> None:
    at = stand(kind)
    prompt = prompt_of(40)
    want = visit(at, prompt)[1]
    for _ in range(2):
        at.cache.set_room(0)
        assert visit(at, prompt) == (0, want)
    at.cache.set_room(1 << 30)
    visit(at, prompt)
    n_cached, said = visit(at, prompt)
    assert (n_cached > 0, said) == (at.keeps, want)
    at.cache.close()


@every_cache
def test_a_cache_without_requests_soon_has_nothing_left_to_do(kind: str) -> None:
    """An engine without work would otherwise call it again and again."""
    at = stand(kind)
    visit(at, prompt_of(40))
    for _ in range(100):
        at.cache.tick(EngineLoad.NONE)
    assert at.cache.settled


@every_cache
def test_a_cursor_given_up_half_way_leaves_what_was_done(kind: str) -> None:
    at = stand(kind)
    prompt = prompt_of(60)
    cursor = at.cache.open(prompt, Namespace(""), EVERYTHING)
    row = at.runner.start(cursor.restore())
    at.runner.prefill(row, prompt, 32)
    at.runner.finish_chunk(row)
    cursor.commit(row)
    cursor.close(row)
    at.runner.leave([row])
    n_cached, said = visit(at, prompt)
    assert (n_cached == 32) == at.keeps
    assert said == visit(stand(kind), prompt)[1]
