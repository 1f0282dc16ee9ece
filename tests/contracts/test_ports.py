"""What every implementation of a port owes the other side. Each port has two or more of them.

A port is one only if a second implementation can take the place of the first: the shape of each is
compared with the Protocol, and the same demands are made of all.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from firn.cache.layout import Layout
from firn.cache.off import CacheOff
from firn.cache.prefix import CacheSettings, PrefixTree
from firn.core import ports
from firn.core.events import Admitted, ChoiceDone, EngineEvent, JobDone, Token
from firn.core.ports import Delivery, EngineLoad, Restored
from firn.core.values import CacheControl, Job, Namespace, Prompt, RequestId, Sampling
from firn.models.loader import load_tokenizer
from firn.models.runner import Runner
from tests.fakes import FakeEngine, FakeTokenizer
from tests.harness import model_info
from tests.hash_runner import WAIT_S, DictCache, HashEngine, HashRunner
from tests.models.alone import with_caches
from tests.text import trained
from tests.zoo import build, folder

GREEDY = Sampling(temperature=0.0)
EVERYTHING = CacheControl()


def prompt_of(n: int, *, salt: int = 0) -> Prompt:
    return Prompt(np.array([16 + (7 * i * i + salt) % 200 for i in range(n)], dtype=np.int64))


def job_of(prompt: Prompt, *, n: int = 1, max_tokens: int = 8, name: str = "job") -> Job:
    return Job(RequestId(name), prompt, max_tokens, sampling=GREEDY, n=n)


# --- implementations -----------------------------------------------------------------------


def model_runner(name: str) -> Runner:
    model, make_layers = with_caches(build(name))
    info = model_info(model, make_layers)
    return Runner(model, info, make_layers=make_layers, max_rows=8)


RUNNERS: dict[str, Callable[[], Any]] = {
    "dense": lambda: model_runner("qwen3"),
    "hybrid": lambda: model_runner("qwen3_next"),
    "row by row": lambda: model_runner("llama4"),
    "hash": HashRunner,
}


def tree_over(runner: Any) -> PrefixTree:
    settings = CacheSettings(1 << 30, block=8)
    layout = Layout.of(runner.start(None).live_layers)
    return PrefixTree(layout, settings, fingerprint=b"model", dtype="float32")


@dataclass(frozen=True)
class Stand:
    """A cache, and a runner whose rows it can keep."""

    cache: Any
    runner: Any
    keeps: bool


def stand(kind: str) -> Stand:
    if kind == "dict":
        return Stand(DictCache(), HashRunner(), True)
    if kind == "off":
        return Stand(CacheOff(), HashRunner(), False)
    runner = RUNNERS[kind]()
    return Stand(tree_over(runner), runner, True)


CACHES = ("dense", "hybrid", "dict", "off")


@contextmanager
def fake_engine(publish: Callable[[Sequence[Delivery]], None]) -> Iterator[Any]:
    engine = FakeEngine(publish, lambda job, choice: [5 + choice] * 50, vocab_size=256)
    engine.hold("decode", after=10)  # it would run to its end before anyone can stop it
    try:
        yield engine
    finally:
        engine.stop()


@contextmanager
def real_engine(publish: Callable[[Sequence[Delivery]], None]) -> Iterator[Any]:
    class Quiet(HashEngine):
        def _publish(self, batch: Sequence[Delivery]) -> None:
            publish(batch)

    with Quiet() as lab:
        yield lab.engine


ENGINES = {"real": real_engine, "fake": fake_engine}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path: Path = tmp_path_factory.mktemp("tokenizer") / "model"
    folder.write(build("qwen3"), {"model_type": "qwen3"}, path)
    return {
        "loaded": load_tokenizer(path),
        "fake": FakeTokenizer(),
        "trained": trained.byte_level(),
    }


# --- the shape of each ---------------------------------------------------------------------


def members(port: type) -> dict[str, Any]:
    return {n: m for n, m in vars(port).items() if not n.startswith("_")}


def shape(function: Any) -> list[tuple[str, Any]]:
    """Names and kinds of the parameters a caller must know; those with defaults are its own."""
    return [
        (p.name, p.kind)
        for p in inspect.signature(function).parameters.values()
        if p.default is p.empty and p.name != "self"
    ]


def assert_fits(port: type, thing: Any) -> None:
    for name, member in members(port).items():
        found = getattr(thing, name)  # an attribute or property that is missing raises
        if inspect.isfunction(member):
            assert shape(found) == shape(member), f"{type(thing).__name__}.{name}"


@pytest.mark.parametrize("kind", RUNNERS)
def test_runners_rows_and_picks_have_the_ports_shape(kind: str) -> None:
    runner = RUNNERS[kind]()
    assert_fits(ports.Runner, runner)
    row = started(runner, prompt_of(5))
    assert_fits(ports.LiveRow, row)
    (picked,) = step(runner)
    assert_fits(ports.PickedToken, picked)


@pytest.mark.parametrize("kind", CACHES)
def test_caches_and_cursors_have_the_ports_shape(kind: str) -> None:
    at = stand(kind)
    assert_fits(ports.PrefixCache, at.cache)
    cursor = at.cache.open(prompt_of(5), Namespace(""), EVERYTHING)
    for found in (cursor, at.cache.fork(cursor, []), at.cache.blank()):
        assert_fits(ports.Cursor, found)


@pytest.mark.parametrize("kind", ENGINES)
def test_engines_have_the_ports_shape(kind: str) -> None:
    with ENGINES[kind](lambda batch: None) as engine:
        assert_fits(ports.Engine, engine)


@pytest.mark.parametrize("kind", ["loaded", "fake", "trained"])
def test_tokenizers_have_the_ports_shape(tokenizers: dict[str, Any], kind: str) -> None:
    assert_fits(ports.Tokenizer, tokenizers[kind])


# --- runners -------------------------------------------------------------------------------


def started(runner: Any, prompt: Prompt, *, chunk: int = 4) -> Any:
    """A row that has read all but the last token and takes part in decode steps."""
    row = runner.start(None)
    read(runner, row, prompt, chunk=chunk)
    (row,) = runner.choices(row, job_of(prompt), [0])
    runner.join(row, int(prompt.ids[-1]))
    return row


def read(runner: Any, row: Any, prompt: Prompt, *, chunk: int = 4) -> None:
    while row.n_tokens < len(prompt) - 1:
        runner.prefill(row, prompt, min(row.n_tokens + chunk, len(prompt) - 1))
        runner.settle(row)


def step(runner: Any, *, keep_in_flight: int = 0) -> list[Any]:
    for rows in runner.groups():
        runner.launch(rows)
    return [
        picked
        for rows in runner.groups()
        for picked in runner.collect(rows, keep_in_flight=keep_in_flight)
    ]


def reply(runner: Any, row: Any, n: int) -> list[int]:
    return [p.token for _ in range(n) for p in step(runner) if p.row is row]


every_runner = pytest.mark.parametrize("kind", RUNNERS)


@every_runner
def test_a_row_counts_what_it_has_consumed(kind: str) -> None:
    runner, prompt = RUNNERS[kind](), prompt_of(11)
    row = runner.start(None)
    assert row.n_tokens == 0
    runner.prefill(row, prompt, 4)
    runner.settle(row)
    assert row.n_tokens == 4
    read(runner, row, prompt)
    assert row.n_tokens == 10
    (row,) = runner.choices(row, job_of(prompt), [0])
    runner.join(row, int(prompt.ids[-1]))
    assert step(runner, keep_in_flight=1) == []
    assert row.n_tokens == 11, "the step in flight counts"
    assert len(step(runner, keep_in_flight=1)) == 1
    assert len(step(runner)) == 2
    assert row.n_tokens == 13


@every_runner
def test_a_joined_row_is_in_one_group(kind: str) -> None:
    runner = RUNNERS[kind]()
    assert runner.groups() == []
    rows = [started(runner, prompt_of(5 + i, salt=i)) for i in range(4)]
    found = [row for group in runner.groups() for row in group]
    assert sorted(map(id, found)) == sorted(map(id, rows))
    for group in runner.groups():
        assert [row.index for row in group] == list(range(len(group)))
    assert {id(p.row) for p in step(runner)} == set(map(id, rows))


@every_runner
def test_rows_that_leave_do_not_change_the_others(kind: str) -> None:
    want = reply(alone := RUNNERS[kind](), started(alone, prompt_of(20)), 12)
    runner = RUNNERS[kind]()
    others = [started(runner, prompt_of(5 + i, salt=i)) for i in range(2)]
    row = started(runner, prompt_of(20))
    said = reply(runner, row, 4)
    runner.leave(others[:1])
    said += reply(runner, row, 4)
    runner.leave(others[1:])
    said += reply(runner, row, 4)
    assert said == want
    runner.leave([row])
    assert runner.groups() == []


@every_runner
def test_a_row_may_leave_wherever_it_is(kind: str) -> None:
    runner = RUNNERS[kind]()
    unread = runner.start(None)
    half = runner.start(None)
    runner.prefill(half, prompt_of(9), 5)
    runner.leave([unread, half])
    row = started(runner, prompt_of(5))
    step(runner, keep_in_flight=1)  # one step is in flight
    runner.leave([row])
    assert runner.groups() == []


@every_runner
def test_choices_have_the_same_past(kind: str) -> None:
    runner, prompt = RUNNERS[kind](), prompt_of(14)
    row = runner.start(None)
    read(runner, row, prompt)
    rows = runner.choices(row, job_of(prompt, n=3), [0, 1, 2])
    assert len(rows) == 3
    assert len(set(map(id, rows))) == 3
    assert [r.n_tokens for r in rows] == [13] * 3
    for r in rows:
        runner.join(r, int(prompt.ids[-1]))
    said: dict[int, list[int]] = {id(r): [] for r in rows}
    for _ in range(6):
        for picked in step(runner):
            said[id(picked.row)].append(picked.token)
    first = said[id(rows[0])]
    assert len(first) == 6
    assert all(tokens == first for tokens in said.values())


@every_runner
def test_a_restored_row_starts_where_it_was_filled_to(kind: str) -> None:
    runner = RUNNERS[kind]()
    filled: list[list[Any]] = []
    row = runner.start(Restored(7, filled.append))
    assert row.n_tokens == 7
    assert len(filled) == 1
    assert len(filled[0]) == len(runner.start(None).live_layers)


@every_runner
def test_a_forced_token_is_taken_for_picked(kind: str) -> None:
    prompt = prompt_of(9)
    runner = RUNNERS[kind]()
    row = started(runner, prompt)
    runner.force(row, [33, 44], at=len(prompt) + 2)
    said = reply(runner, row, 6)
    assert said[2:4] == [33, 44]
    again = RUNNERS[kind]()
    longer = Prompt(np.concatenate([prompt.ids, np.array(said[:4], dtype=np.int64)]))
    assert reply(again, started(again, longer), 2) == said[4:]


def resumed(runner: Any, prompt: Prompt, reply: Sequence[int], *, alone: bool, job: Job) -> Any:
    """A row that has read a prompt and a part of its reply again, and goes on from there."""
    grown = prompt.grown(reply)
    row = runner.start(None)
    read(runner, row, grown)
    (row,) = runner.choices(row, job, [0])
    runner.resume(row, reply, alone=alone)
    runner.join(row, int(grown.ids[-1]))
    return row


@every_runner
def test_a_row_that_resumes_alone_has_a_group_of_its_own(kind: str) -> None:
    """Before and after: it joins nobody, and nobody joins it."""
    runner, prompt = RUNNERS[kind](), prompt_of(9)
    started(runner, prompt_of(5, salt=1))
    row = resumed(runner, prompt, [17], alone=True, job=job_of(prompt))
    started(runner, prompt_of(5, salt=2))
    assert [row] in runner.groups()
    assert reply(runner, row, 3) == reply_behind(kind, prompt, [17], 3)


@every_runner
def test_a_row_that_resumes_in_company_may_share_a_group(kind: str) -> None:
    runner, prompt = RUNNERS[kind](), prompt_of(9)
    first = started(runner, prompt_of(5, salt=1))
    row = resumed(runner, prompt, [17], alone=False, job=job_of(prompt))
    if kind == "row by row":
        assert runner.groups() == [[first], [row]]
    else:
        assert runner.groups() == [[first, row]]


def reply_behind(kind: str, prompt: Prompt, begun: Sequence[int], n: int) -> list[int]:
    runner = RUNNERS[kind]()
    return reply(runner, started(runner, prompt.grown(begun)), n)


@every_runner
def test_a_resumed_row_samples_as_if_nothing_had_happened(kind: str) -> None:
    prompt = prompt_of(9)
    sampling = Sampling(temperature=1.0, seed=5, frequency_penalty=1.5)
    job = Job(RequestId("job"), prompt, 12, sampling=sampling)
    runner = RUNNERS[kind]()
    row = runner.start(None)
    read(runner, row, prompt)
    (row,) = runner.choices(row, job, [0])
    runner.join(row, int(prompt.ids[-1]))
    said = reply(runner, row, 10)
    for alone in (True, False):
        again = RUNNERS[kind]()
        assert reply(again, resumed(again, prompt, said[:4], alone=alone, job=job), 6) == said[4:]


# --- caches --------------------------------------------------------------------------------

every_cache = pytest.mark.parametrize("kind", CACHES)


def visit(
    at: Stand,
    prompt: Prompt,
    n_reply: int = 6,
    *,
    namespace: str = "",
    control: CacheControl = EVERYTHING,
) -> tuple[int, list[int]]:
    """One request, as the engine would lead it: how much was cached, and what was said."""
    cache, runner = at.cache, at.runner
    cursor = cache.open(prompt, Namespace(namespace), control)
    assert not cursor.racing
    assert not cursor.should_wait(busy=False)
    restored = cache.restore(cursor)
    row = runner.start(restored)
    if restored is not None:
        cache.saw_restore(restored, 0.001)
    n_cached = row.n_tokens
    assert cursor.admission.n_cached == n_cached
    assert n_cached < len(prompt), "a token is left to make the logits"
    cache.commit(cursor, row)
    while row.n_tokens < len(prompt) - 1:
        stops = list(cache.stops(cursor))
        assert stops == sorted(set(stops))
        assert all(0 < stop < len(prompt) for stop in stops)
        end = min([row.n_tokens + 8, len(prompt) - 1, *(s for s in stops if s > row.n_tokens)])
        start = row.n_tokens
        runner.prefill(row, prompt, end)
        runner.settle(row)
        cache.saw_prefill(start, end, 0.001)
        cache.commit(cursor, row)
        cache.tick(EngineLoad.DECODING)
    (row,) = runner.choices(row, job_of(prompt), [0])
    said: list[int] = []
    mine = cache.fork(cursor, said)
    cache.close_cursor(cursor, None)
    runner.join(row, int(prompt.ids[-1]))
    for _ in range(n_reply):
        said += [p.token for p in step(runner)]
        if mine.commit_due(row.n_tokens):
            cache.commit(mine, row)
    cache.close_cursor(mine, row)
    cache.close_cursor(mine, None)
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
    cursor = at.cache.blank()
    assert not cursor.racing
    assert not cursor.should_wait(busy=False)
    assert at.cache.restore(cursor) is None
    assert at.cache.advance(cursor, 0) is None
    assert list(at.cache.stops(cursor)) == []
    row = at.runner.start(None)
    read(at.runner, row, prompt_of(40, salt=3))
    assert not cursor.commit_due(1 << 20)
    at.cache.commit(cursor, row)
    forked = at.cache.fork(cursor, [])
    assert not forked.commit_due(1 << 20)
    at.cache.close_cursor(forked, row)
    at.cache.close_cursor(cursor, row)
    assert visit(at, prompt_of(40, salt=3))[0] == 0


@every_cache
def test_a_cache_without_room_still_answers(kind: str) -> None:
    at = stand(kind)
    prompt = prompt_of(40)
    want = visit(at, prompt)[1]
    at.cache.set_room(0)
    assert visit(at, prompt)[1] == want
    at.cache.tick(EngineLoad.NONE)
    assert at.cache.settled in (True, False)
    at.cache.set_room(1 << 30)
    assert visit(at, prompt)[1] == want
    at.cache.close()


@every_cache
def test_a_cursor_given_up_half_way_leaves_what_was_done(kind: str) -> None:
    at = stand(kind)
    prompt = prompt_of(60)
    cursor = at.cache.open(prompt, Namespace(""), EVERYTHING)
    row = at.runner.start(at.cache.restore(cursor))
    at.runner.prefill(row, prompt, 32)
    at.runner.settle(row)
    at.cache.commit(cursor, row)
    at.cache.close_cursor(cursor, row)
    at.runner.leave([row])
    n_cached, said = visit(at, prompt)
    assert (n_cached == 32) == at.keeps
    assert said == visit(stand(kind), prompt)[1]


# --- engines -------------------------------------------------------------------------------

every_engine = pytest.mark.parametrize("kind", ENGINES)


class Listener:
    """Keeps what an engine publishes; tests wait for it."""

    def __init__(self) -> None:
        self.events: dict[RequestId, list[EngineEvent]] = {}
        self._heard = threading.Condition()

    def __call__(self, batch: Sequence[Delivery]) -> None:
        with self._heard:
            for request, event in batch:
                self.events.setdefault(request, []).append(event)
            self._heard.notify_all()

    def wait(self, name: str, kind: type = JobDone) -> list[Any]:
        def has_come() -> bool:
            return any(isinstance(e, kind) for e in self.events.get(RequestId(name), []))

        with self._heard:
            assert self._heard.wait_for(has_come, WAIT_S), f"{name} was left waiting"
            return list(self.events[RequestId(name)])


@every_engine
def test_a_job_is_told_from_admission_to_end(kind: str) -> None:
    heard = Listener()
    with ENGINES[kind](heard) as engine:
        engine.submit(job_of(prompt_of(30), n=2, name="a"))
        events = heard.wait("a")
    assert isinstance(events[0], Admitted)
    assert events.count(JobDone()) == 1
    assert events[-1] == JobDone()
    for choice in range(2):
        own = [e for e in events if getattr(e, "choice", None) == choice]
        assert [type(e) for e in own] == [Token] * 8 + [ChoiceDone]
        assert own[-1].reason == "length"


@every_engine
def test_ids_nobody_knows_are_ignored(kind: str) -> None:
    heard = Listener()
    with ENGINES[kind](heard) as engine:
        engine.cancel(RequestId("nobody"))
        engine.stop_choice(RequestId("nobody"), 0)
        engine.submit(job_of(prompt_of(3), name="a"))
        heard.wait("a")
        engine.cancel(RequestId("a"))
        engine.submit(job_of(prompt_of(3), name="b"))
        heard.wait("b")
    assert set(heard.events) == {"a", "b"}


@every_engine
def test_a_stopped_choice_is_not_announced_as_done(kind: str) -> None:
    heard = Listener()
    with ENGINES[kind](heard) as engine:
        engine.submit(job_of(prompt_of(3), n=2, max_tokens=1 << 30, name="a"))
        heard.wait("a", Token)
        engine.stop_choice(RequestId("a"), 0)
        engine.stop_choice(RequestId("a"), 1)
        events = heard.wait("a")
    assert events[-1] == JobDone()
    assert [e for e in events if isinstance(e, ChoiceDone)] == []


@every_engine
def test_health_is_told_at_any_time(kind: str) -> None:
    heard = Listener()
    with ENGINES[kind](heard) as engine:
        health = engine.health()
        assert health.alive
        assert health.last_step_age_s >= 0.0
        assert (health.n_waiting, health.n_prefilling, health.n_decoding) == (0, 0, 0)
        assert engine.model.vocab_size > 0


# --- tokenizers ----------------------------------------------------------------------------

every_tokenizer = pytest.mark.parametrize("kind", ["loaded", "fake", "trained"])


@every_tokenizer
@pytest.mark.parametrize("text", ["", "a", "Hello  world\n", "naïve — 日本語 🙂"])
def test_text_comes_back_as_it_was(tokenizers: dict[str, Any], kind: str, text: str) -> None:
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode(text, add_special=False)
    assert all(isinstance(t, int) for t in ids)
    assert tokenizer.decode(ids) == text
    assert b"".join(tokenizer.token_bytes(t) for t in ids) == text.encode()


@every_tokenizer
def test_special_tokens_are_kept_and_known(tokenizers: dict[str, Any], kind: str) -> None:
    tokenizer = tokenizers[kind]
    end = tokenizer.token_id("<|im_end|>")
    assert tokenizer.eos == {end}
    assert tokenizer.eos <= tokenizer.special
    assert tokenizer.encode("<|im_end|>", add_special=False) == [end]
    assert tokenizer.decode([end]) == "<|im_end|>"
    assert tokenizer.token_id("no token is this long") is None


@every_tokenizer
def test_half_a_character_is_shown_as_such(tokenizers: dict[str, Any], kind: str) -> None:
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode("🙃", add_special=False)
    if len(ids) > 1:
        assert "\ufffd" in tokenizer.decode(ids[:-1])


@every_tokenizer
def test_a_template_shows_the_messages(tokenizers: dict[str, Any], kind: str) -> None:
    tokenizer = tokenizers[kind]
    assert tokenizer.chat_template is not None
    messages = [{"role": "user", "content": "Where is it?"}]
    text = tokenizer.render(messages, tools=None, kwargs={})
    assert "Where is it?" in text
    assert text.endswith("<|im_start|>assistant\n")


@every_tokenizer
def test_a_typed_token_is_text(tokenizers: dict[str, Any], kind: str) -> None:
    tokenizer = tokenizers[kind]
    end = tokenizer.token_id("<|im_end|>")
    assert tokenizer.added_tokens["<|im_end|>"] == end
    text = "a <|im_end|> b<|im_end|>"
    ids = tokenizer.encode(text, add_special=False, typed=[(2, 12)])
    assert ids.count(end) == 1
    assert ids[-1] == end
    assert tokenizer.decode(ids) == text
    same = [tokenizer.encode("a  b", add_special=False, **more) for more in ({}, {"typed": []})]
    assert same[0] == same[1]
    assert tokenizer.max_token_chars >= len("<|im_end|>")
