"""A runner without a model, a cache without blocks, and an engine on the two of them.

The next token is a hash of everything in the row's cache: one wrong, missing or doubled token changes
all that follow, and a test sees it. After a fault the state is garbage, as it may be on a device, so
whoever goes on using it is found out.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from firn.cache.off import BlankCursor, CacheOff
from firn.core.errors import FirnError
from firn.core.events import (
    Admitted,
    ChoiceDone,
    EngineEvent,
    JobDone,
    JobFailed,
    PromptLogprobs,
    Token,
    TokenLogprob,
)
from firn.core.ports import Delivery, EngineLoad, LiveRow, PrefixCache, Restored, Scorer
from firn.core.sparse import Sparse
from firn.core.values import (
    CacheControl,
    Job,
    ModelInfo,
    Namespace,
    Prompt,
    RequestId,
    Sampling,
)
from firn.engine import EngineLimits, EngineParts
from firn.engine.budget import Budget, RowCost
from firn.engine.engine import Engine

VOCAB_SIZE = 251
GARBAGE = -1
WORTH_A_RESTORE = 8
GREEDY = Sampling(temperature=0.0)
WAIT_S = 60.0
"""No wait of a test is unbounded; none of them takes long unless something hangs."""


def prompt_of(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=length)


def next_token(tokens: Sequence[int], draw: tuple[int | None, int, int] | None = None) -> int:
    """What follows these tokens. draw: seed, choice and number of the draw of a row that samples."""
    digest = hashlib.blake2b(np.array(tokens, dtype=np.int64).tobytes(), digest_size=8)
    digest.update(repr(draw).encode())
    return int.from_bytes(digest.digest(), "little") % VOCAB_SIZE


def reply_to(
    prompt: Sequence[int],
    n_reply: int,
    *,
    sampling: Sampling = GREEDY,
    choice: int = 0,
    eos: frozenset[int] = frozenset(),
) -> list[int]:
    """What the model says to a prompt, alone and undisturbed."""
    tokens = list(prompt)
    for i in range(n_reply):
        draw = (sampling.seed, choice, i) if sampling.temperature else None
        tokens.append(next_token(tokens, draw))
        if tokens[-1] in eos:
            break
    return tokens[len(prompt) :]


def scores_of(tokens: Sequence[int], start: int, end: int, top: int = 0) -> list[TokenLogprob]:
    """How likely tokens [start + 1, end + 1) are: a number that all before them have a part in."""
    found = []
    for i in range(start, end):
        likeliest = next_token(tokens[: i + 1])
        logprob = -next_token([*tokens[: i + 1], tokens[i + 1]]) / VOCAB_SIZE
        best = tuple(((likeliest + k) % VOCAB_SIZE, -0.1 * k) for k in range(top))
        found.append(TokenLogprob(tokens[i + 1], logprob, best))
    return found


# --- runner --------------------------------------------------------------------------------


@dataclass(eq=False)
class HashLayer:
    """The one layer of the model: every row's tokens."""

    rows: list[list[int]]


@dataclass(eq=False)
class HashGroup:
    layer: HashLayer
    rows: list[HashRow] = field(default_factory=list)
    unread: list[list[HashPicked]] = field(default_factory=list)


@dataclass(eq=False)
class HashRow:
    """One sequence. `next` is the token it will consume; `n_drawn` its sampler's memory."""

    layer: HashLayer | None
    n_tokens: int = 0
    group: HashGroup | None = None
    job: Job | None = None
    choice: int = 0
    n_drawn: int = 0
    next: int = GARBAGE
    alone: bool = False
    forced: dict[int, int] = field(default_factory=dict)
    scores: list[TokenLogprob] = field(default_factory=list)

    @property
    def live_layers(self) -> list[HashLayer]:
        assert self.layer is not None, "this row has left"
        return [self.group.layer if self.group else self.layer]

    @property
    def index(self) -> int:
        return self.group.rows.index(self) if self.group else 0

    @property
    def is_live(self) -> bool:
        return self.layer is not None

    @property
    def tokens(self) -> list[int]:
        return self.live_layers[0].rows[self.index]

    def draw(self) -> int:
        assert self.job is not None
        sampling = self.job.sampling
        key = (sampling.seed, self.choice, self.n_drawn) if sampling.temperature else None
        self.n_drawn += 1
        return next_token(self.tokens, key)


@dataclass(frozen=True, slots=True)
class HashPicked:
    row: HashRow
    token: int
    logprob: TokenLogprob | None = None
    fault: FirnError | None = None
    n_drafted: int = 0
    n_accepted: int = 0


def _nothing(*_: Any) -> None:
    pass


@dataclass
class Faults:
    """Called at each stage; what they raise happens there. They may also wait for the test."""

    start: Callable[[Restored | None], None] = _nothing
    prefill: Callable[[HashRow, Sequence[int]], None] = _nothing
    settle: Callable[[HashRow], None] = _nothing
    choices: Callable[[Job], None] = _nothing
    join: Callable[[HashRow], None] = _nothing
    launch: Callable[[Sequence[HashRow]], None] = _nothing
    collect: Callable[[Sequence[HashRow]], None] = _nothing
    leave: Callable[[Sequence[HashRow]], None] = _nothing
    confirm: Callable[[], None] = _nothing


class HashRunner:
    """Implements core.ports.Runner. Counts what it does; keeps the order of the chunks."""

    def __init__(self, faults: Faults | None = None, *, group_rows: int = 1 << 30) -> None:
        self.faults = faults or Faults()
        self.group_rows = group_rows
        self.prefills: list[tuple[int, int]] = []
        """Chunks [start, end) in the order they ran."""
        self.largest_group = 0
        self.n_launched = 0
        self.reads_together = True
        self.n_together = 0
        self.closed = False
        self.chunk_peak_nbytes = 0
        self._groups: list[HashGroup] = []
        self.info = ModelInfo(
            name="hash",
            path="",
            architecture="hash",
            fingerprint=b"hash",
            context_length=1 << 20,
            vocab_size=VOCAB_SIZE,
            dtype="none",
            weights_nbytes=0,
            layer_kinds=("HashLayer",),
            batchable=True,
            unbatchable_why=None,
        )

    def start(self, restored: Restored | None) -> HashRow:
        self.faults.start(restored)
        layer = HashLayer([[]])
        if restored is None:
            return HashRow(layer)
        restored.fill([layer])
        row = HashRow(layer, restored.n_tokens)
        restored.filled(row)
        return row

    def prefill(
        self, row: HashRow, prompt: Prompt, end: int, *, top_logprobs: int | None = None
    ) -> None:
        if top_logprobs is not None:
            row.scores = scores_of(prompt.ids.tolist(), row.n_tokens, end, top_logprobs)
        chunk = [int(t) for t in prompt.ids[row.n_tokens : end]]
        assert chunk, "an empty chunk"
        row.tokens.insert(0, GARBAGE)
        self.faults.prefill(row, chunk)
        row.tokens[:] = row.tokens[1:] + chunk
        self.prefills.append((row.n_tokens, end))
        row.n_tokens = end

    def prefill_together(
        self, rows: Sequence[HashRow], prompts: Sequence[Prompt], ends: Sequence[int]
    ) -> None:
        self.n_together += 1
        for row, prompt, end in zip(rows, prompts, ends, strict=True):
            self.prefill(row, prompt, end)

    def settle(self, row: HashRow) -> list[TokenLogprob]:
        self.faults.settle(row)
        scores, row.scores = row.scores, []
        return scores

    def choices(self, row: HashRow, job: Job, indices: Sequence[int]) -> list[HashRow]:
        self.faults.choices(job)
        assert indices
        rows = [row]
        rows += [HashRow(HashLayer([list(row.tokens)]), row.n_tokens) for _ in indices[1:]]
        for choice, r in zip(indices, rows, strict=True):
            r.job, r.choice = job, choice
        return rows

    def join(self, row: HashRow, token: int, *, n_coming: int = 0) -> None:
        self.faults.join(row)
        tokens = row.tokens
        row.next = token
        row.group = self._room_for(row)
        row.group.rows.append(row)
        row.group.layer.rows.append(tokens)
        self.largest_group = max(self.largest_group, len(row.group.rows))

    def _room_for(self, row: HashRow) -> HashGroup:
        for group in self._groups:
            shared = not row.alone and not any(r.alone for r in group.rows)
            if shared and len(group.rows) < self.group_rows:
                return group
        self._groups.append(HashGroup(HashLayer([])))
        return self._groups[-1]

    def resume(self, row: HashRow, reply: Sequence[int], *, alone: bool = True) -> None:
        row.n_drawn = len(reply)
        row.alone = alone

    def force(self, row: HashRow, tokens: Sequence[int], *, at: int) -> None:
        assert at > row.n_tokens, "picked already"
        row.forced = dict(enumerate(tokens, start=at))

    def leave(self, rows: Sequence[HashRow]) -> None:
        self.faults.leave(rows)
        for row in rows:
            if row.group is not None:
                del row.group.layer.rows[row.index]
                row.group.rows.remove(row)
            row.group = row.layer = None
        self._groups = [g for g in self._groups if g.rows]

    def groups(self) -> list[list[HashRow]]:
        return [list(g.rows) for g in self._groups]

    def launch(self, rows: Sequence[HashRow]) -> None:
        group = rows[0].group
        assert group is not None
        assert list(rows) == group.rows
        for row in rows:
            row.tokens.insert(0, GARBAGE)
        self.faults.launch(rows)
        self.n_launched += 1
        step = []
        for row in rows:
            row.tokens[:] = [*row.tokens[1:], row.next]
            row.n_tokens += 1
            picked = row.draw()
            row.next = row.forced.pop(row.n_tokens, picked)
            step.append(HashPicked(row, row.next))
        group.unread.append(step)

    def collect(self, rows: Sequence[HashRow], *, keep_in_flight: int) -> list[HashPicked]:
        group = rows[0].group
        assert group is not None
        self.faults.collect(rows)
        out: list[HashPicked] = []
        while len(group.unread) > keep_in_flight:
            out += [p for p in group.unread.pop(0) if p.row.group is group]
        return out

    def confirm(self) -> None:
        self.faults.confirm()

    def live_nbytes(self) -> int:
        """One byte a token."""
        return sum(row.n_tokens for group in self._groups for row in group.rows)

    def close(self) -> None:
        self.closed = True


# --- cache ---------------------------------------------------------------------------------


@dataclass(eq=False)
class DictCursor:
    namespace: str
    prompt: tuple[int, ...]
    control: CacheControl
    reply: Sequence[int] = ()
    admission: Admitted = Admitted(0)
    racing: bool = False
    n_expected: int = 0
    patient: bool = False
    closed: bool = False
    n_stored: int = 0

    def should_wait(self, *, busy: bool) -> bool:
        return self.patient

    def commit_due(self, n_tokens: int) -> bool:
        return n_tokens - self.n_stored >= WORTH_A_RESTORE

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.prompt, *self.reply)


class DictCache:
    """Implements core.ports.PrefixCache: whole prefixes in a dictionary.

    `corrupt`: restoring raises half-way, as a damaged record might.
    """

    def __init__(
        self, *, corrupt: bool = False, racing: bool = False, patient: bool = False
    ) -> None:
        self.store: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        self.corrupt = corrupt
        self.racing = racing
        self.patient = patient
        """What `open` says of new cursors: something is on its way, and worth waiting for."""
        self.cursors: list[DictCursor] = []
        """Those still open: what would be leases."""
        self.room_nbytes: int | None = None
        self.closed = False
        self._in_doubt: list[tuple[str, tuple[int, ...]]] = []
        self.n_doubted = 0

    def open(self, prompt: Prompt, namespace: Namespace, control: CacheControl) -> DictCursor:
        owner = namespace if prompt.thinned is None else f"{namespace}/{prompt.thinned.recipe}"
        cursor = DictCursor(owner, tuple(int(t) for t in prompt.ids), control)
        cursor.racing, cursor.patient = self.racing, self.patient
        self.cursors.append(cursor)
        return cursor

    def restore(self, cursor: DictCursor | BlankCursor) -> Restored | None:
        return self._longest(cursor, 1)

    def advance(self, cursor: DictCursor | BlankCursor, n_tokens: int) -> Restored | None:
        return self._longest(cursor, n_tokens + WORTH_A_RESTORE)

    def _longest(self, cursor: DictCursor | BlankCursor, n_least: int) -> Restored | None:
        if isinstance(cursor, BlankCursor) or not cursor.control.read:
            return None
        for n in range(len(cursor.prompt) - 1, n_least - 1, -1):
            state = self.store.get((cursor.namespace, cursor.prompt[:n]))
            if state is not None:
                cursor.admission = Admitted(n, (("dict", n),))
                cursor.n_stored = n
                return Restored(n, partial(self._fill, state))
        return None

    def _fill(self, state: list[int], layers: list[HashLayer]) -> None:
        if self.corrupt:
            layers[0].rows[0] = [GARBAGE]
            raise ValueError("a damaged record")
        layers[0].rows[0] = list(state)

    def stops(self, cursor: DictCursor | BlankCursor) -> Sequence[int]:
        return ()

    def commit(self, cursor: DictCursor | BlankCursor, row: LiveRow) -> None:
        if isinstance(cursor, BlankCursor):
            return
        assert not cursor.closed, "a commit after the end"
        n = row.n_tokens
        if cursor.control.write and 0 < n <= len(cursor.tokens):
            state = row.live_layers[0].rows[row.index]
            key = cursor.namespace, cursor.tokens[:n]
            if key not in self.store:
                self._in_doubt.append(key)
            self.store[key] = list(state[:n])
            cursor.n_stored = n

    def fork(
        self, cursor: DictCursor | BlankCursor, reply: Sequence[int]
    ) -> DictCursor | BlankCursor:
        if isinstance(cursor, BlankCursor):
            return cursor
        forked = DictCursor(cursor.namespace, cursor.prompt, cursor.control, reply)
        forked.n_stored = cursor.n_stored
        self.cursors.append(forked)
        return forked

    def close_cursor(self, cursor: DictCursor | BlankCursor, row: LiveRow | None) -> None:
        if isinstance(cursor, BlankCursor) or cursor.closed:
            return
        if row is not None:
            self.commit(cursor, row)
        cursor.closed = True
        self.cursors.remove(cursor)

    def blank(self) -> BlankCursor:
        return BlankCursor()

    def confirm(self) -> None:
        self._in_doubt.clear()

    def doubt(self) -> None:
        self.n_doubted += 1
        for key in self._in_doubt:
            self.store.pop(key, None)
        self._in_doubt.clear()

    def set_room(self, nbytes: int) -> None:
        self.room_nbytes = nbytes

    def tick(self, load: EngineLoad) -> None:
        pass

    @property
    def settled(self) -> bool:
        return True

    def saw_prefill(self, start: int, end: int, seconds: float) -> None:
        assert start < end
        assert seconds >= 0.0

    def saw_restore(self, restored: Restored, seconds: float) -> None:
        assert restored.n_tokens > 0
        assert seconds >= 0.0

    def close(self) -> None:
        self.closed = True


# --- an engine on them ---------------------------------------------------------------------


@dataclass(eq=False)
class Outcome:
    """What one job's client has heard."""

    job: Job
    events: list[EngineEvent] = field(default_factory=list)
    finished: threading.Event = field(default_factory=threading.Event)
    n_ends: int = 0

    def put(self, event: EngineEvent) -> None:
        self.events.append(event)
        if isinstance(event, JobDone | JobFailed):
            self.n_ends += 1
            self.finished.set()

    def wait(self) -> Outcome:
        assert self.finished.wait(WAIT_S), f"job {self.job.id} was left waiting"
        return self

    def of(self, kind: type[EngineEvent]) -> list[Any]:
        return [e for e in self.events if isinstance(e, kind)]

    def tokens(self, choice: int = 0) -> list[int]:
        return [e.id for e in self.of(Token) if e.choice == choice]

    def reason(self, choice: int = 0) -> str | None:
        found = [e.reason for e in self.of(ChoiceDone) if e.choice == choice]
        assert len(found) <= 1
        return found[0] if found else None

    @property
    def error(self) -> FirnError | None:
        found = self.of(JobFailed)
        return found[0].error if found else None

    @property
    def n_cached(self) -> int:
        return int(self.of(Admitted)[0].n_cached)

    def expected(self, choice: int = 0) -> list[int]:
        job = self.job
        return reply_to(
            job.prompt.ids.tolist(),
            job.max_tokens,
            sampling=job.sampling,
            choice=choice,
            eos=job.eos,
        )

    def check(self) -> None:
        """It ran to its end, said each thing once and in order, and said the right thing."""
        assert self.error is None, repr(self.error)
        assert self.n_ends == 1
        assert isinstance(self.events[0], Admitted)
        assert isinstance(self.events[-1], JobDone)
        for choice in range(self.job.n):
            want = self.expected(choice)
            assert self.tokens(choice) == want
            ended = bool(want) and want[-1] in self.job.eos
            assert self.reason(choice) == ("stop" if ended else "length")
        if self.job.prompt_logprobs:
            ids = self.job.prompt.ids.tolist()
            found = [score for event in self.of(PromptLogprobs) for score in event.logprobs]
            assert found == scores_of(ids, 0, len(ids) - 1, self.job.top_logprobs or 0)


class HashEngine:
    """The real engine thread over a HashRunner. Use as a context manager."""

    def __init__(
        self,
        faults: Faults | None = None,
        *,
        cache: PrefixCache | None = None,
        max_rows: int = 8,
        max_queue: int = 10_000,
        chunk: int = 8,
        aligned: bool = False,
        group_rows: int = 1 << 30,
        capacity_nbytes: int = 1 << 40,
        scored_nbytes: int = 1 << 30,
        publish: Callable[[Sequence[Delivery]], None] = _nothing,
        budget: Budget | None = None,
        largest_chunk: int = 0,
        common_chunk: int = 0,
        scorer: Scorer | None = None,
    ) -> None:
        self.runner = HashRunner(faults, group_rows=group_rows)
        self.cache = cache if cache is not None else CacheOff()
        self.budget = budget or Budget(RowCost(1, 1), capacity_nbytes=capacity_nbytes)
        self.outcomes: dict[RequestId, Outcome] = {}
        self.n_deaths = 0
        self.died = threading.Event()
        self._also_publish = publish
        self._ids = itertools.count()
        limits = EngineLimits(
            max_rows,
            max_queue,
            chunk,
            aligned,
            largest_chunk=largest_chunk,
            common_chunk=common_chunk,
            scored_nbytes=scored_nbytes,
        )
        self.engine = Engine(
            lambda: EngineParts(self.runner, self.cache, self.budget, limits, scorer=scorer),
            self._publish,
            on_death=self._on_death,
        )
        self.engine.start()

    def _publish(self, batch: Sequence[Delivery]) -> None:
        assert batch, "an empty publication"
        self._also_publish(batch)
        for request, event in batch:
            self.outcomes[request].put(event)

    def _on_death(self) -> None:
        self.n_deaths += 1
        self.died.set()

    def __enter__(self) -> HashEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.stop(timeout_s=WAIT_S)
        assert not self.engine._thread.is_alive(), "the engine thread hangs"

    def job(
        self,
        prompt: Sequence[int],
        n_reply: int = 8,
        *,
        sampling: Sampling = GREEDY,
        n: int = 1,
        eos: Sequence[int] = (),
        namespace: str = "",
        control: CacheControl = CacheControl(),
        scored: int | None = None,
        sparse: Sparse | None = None,
    ) -> Job:
        return Job(
            id=RequestId(f"job{next(self._ids)}"),
            prompt=Prompt(np.array(prompt, dtype=np.int64)),
            max_tokens=n_reply,
            sampling=sampling,
            n=n,
            eos=frozenset(eos),
            namespace=Namespace(namespace),
            cache=control,
            top_logprobs=scored,
            prompt_logprobs=scored is not None,
            sparse=sparse,
        )

    def submit(self, prompt: Sequence[int], n_reply: int = 8, **options: Any) -> Outcome:
        outcome = Outcome(self.job(prompt, n_reply, **options))
        self.outcomes[outcome.job.id] = outcome
        self.engine.submit(outcome.job)
        return outcome

    def cancel(self, outcome: Outcome) -> None:
        self.engine.cancel(outcome.job.id)

    def hold(self) -> threading.Event:
        """The engine waits between two steps until this is set, so that jobs arrive together."""
        reached, gate = threading.Event(), threading.Event()

        def wait() -> None:
            reached.set()
            assert gate.wait(WAIT_S), "held for ever"

        self.engine.call(lambda _: wait())
        assert reached.wait(WAIT_S)
        return gate

    def between_steps(self, function: Callable[[], Any] = lambda: None) -> Any:
        """Run on the engine thread and wait: what was sent before has been heard."""
        return self.engine.call(lambda _: function()).result(WAIT_S)

    def leftovers(self) -> dict[str, int]:
        """All that a request could have left behind, by name; empty when nothing has."""

        def count() -> dict[str, int]:
            engine = self.engine
            counts = {
                "sequences": len(engine._loop.inflight.sequences),
                "waiting": len(engine._loop.inflight.waiting),
                "tasks": len(engine._loop.inflight.tasks),
                "rows": len(engine._loop.inflight.rows),
                "queued": engine._n_queued,
                "groups": len(self.runner.groups()),
                "held_nbytes": self.budget.held_nbytes,
                "cursors": len(getattr(self.cache, "cursors", ())),
            }
            return {name: n for name, n in counts.items() if n}

        found: dict[str, int] = self.between_steps(count)
        return found
