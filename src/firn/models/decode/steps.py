"""Steps of a group: how one is dispatched, and how its tokens are read.

    PlainStep       one token a row. It may be dispatched while the one before it is in flight.
    VerifyStep      several tokens a row: those it took before, and a draft (see `verify`)
    PipelinedStep   the same, behind a step of several tokens that is still unread (see `pipelined`)

`Step.launch(group)` dispatches it and returns what is in flight, whose `read()` gives the tokens that
each row took. `Steps.next` is the one place that decides which is next.

The next mask of a row with a grammar needs the row's last token on the host. The forward pass needs it
on the device only, so half of the pass is dispatched before the masks are computed:

    device   pick n | first half of forward n+1     | second half  | pick n+1 | first half ...
    host              read n -> masks -> dispatch the second half and pick n+1 -> first half of n+2 ...

Owner: the engine thread, through the runner.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from firn.core.values import Job
from firn.models.decode.batch import Group, Row, StepInFlight, TakenTokens
from firn.models.decode.forward import Forward
from firn.models.decode.masks import Masks
from firn.models.decode.pipelined import DraftsAhead, Pipeline, PipelineFault
from firn.models.decode.ragged import MAX_FEED
from firn.models.decode.rewind import RaggedStep, is_rewindable
from firn.models.decode.sampling import Picker, Picks, read_logprobs, to_host
from firn.models.decode.step_profile import StepProfile
from firn.models.decode.step_trace import NoStepTrace
from firn.models.decode.verify import Feed, Verification
from firn.models.model_arguments import PreparePass


class Step(Protocol):
    """One way to compute a group's next tokens."""

    def launch(self, group: Group) -> StepInFlight:
        """Dispatch it. The caller keeps what is in flight, and reads it."""
        ...


class Speculator(Protocol):
    """Proposes drafts for a group's next step, and learns from how they turn out."""

    profile: StepProfile
    in_groups: bool
    """Whether rows that take unequal numbers of tokens can share a group."""
    drafts: bool
    """Whether it ever proposes any, so that steps of several tokens are known to be right."""

    def open(self, row: Row, job: Job) -> None:
        """A row begins its reply."""
        ...

    def close(self, row: Row) -> None: ...

    def extend(self, row: Row, tokens: Sequence[int]) -> None:
        """The row's reply continues with these tokens."""
        ...

    def propose(self, group: Group, read_all: Callable[[], None]) -> list[tuple[int, ...]] | None:
        """One draft for each seat, or None for a step of one token each. read_all: brings every token
        of the group to the host, and calls `observe` for each step."""
        ...

    def propose_ahead(self, group: Group, width: int) -> DraftsAhead | None:
        """What to feed each seat after the step in flight, which has this width."""
        ...

    def observe(self, group: Group, taken: Sequence[TakenTokens], step: StepInFlight) -> None:
        """A step's tokens were read."""
        ...

    def disturbed(self) -> None:
        """The device computes something else, or the rows change."""
        ...

    def counters(self) -> Mapping[str, int]:
        """What was drafted since the start; empty if nothing ever is. From any thread."""
        ...

    def end(self) -> None: ...


class NoSpeculation:
    """One token a step."""

    profile = StepProfile()
    in_groups = True
    drafts = False

    def open(self, row: Row, job: Job) -> None:
        pass

    def close(self, row: Row) -> None:
        pass

    def extend(self, row: Row, tokens: Sequence[int]) -> None:
        pass

    def propose(self, group: Group, read_all: Callable[[], None]) -> list[tuple[int, ...]] | None:
        return None

    def propose_ahead(self, group: Group, width: int) -> DraftsAhead | None:
        return None

    def observe(self, group: Group, taken: Sequence[TakenTokens], step: StepInFlight) -> None:
        pass

    def disturbed(self) -> None:
        pass

    def counters(self) -> Mapping[str, int]:
        return {}

    def end(self) -> None:
        pass


NO_SPECULATION = NoSpeculation()


class Pick(Protocol):
    """Picks a step's tokens. With ranks, one of them picks for all."""

    def __call__(
        self,
        logits: mx.array,
        pickers: Sequence[Picker],
        forced: Sequence[int | None],
        *,
        allowed: mx.array | None,
    ) -> Picks: ...


class Steps:
    """Chooses a group's next step, and reads those in flight."""

    def __init__(
        self,
        forward: Forward,
        speculator: Speculator,
        *,
        vocab_size: int,
        pick: Pick,
        prepare: PreparePass,
    ) -> None:
        self.forward = forward
        self.speculator = speculator
        self.masks = Masks(vocab_size)
        self.pick = pick
        self.prepare = prepare
        self.pipeline = Pipeline(forward.trace)

    @property
    def n_read_first(self) -> int:
        """How many tokens before its newest one a row's first step can read as well."""
        can = self.speculator.drafts and self.forward.takes_ids_only
        return MAX_FEED - 1 if can else 0

    def launch(self, group: Group) -> None:
        step = self.next(group).launch(group)
        step.is_new = self.forward.trace.had_new_shape() or step.is_new
        group.unread.append(step)

    def next(self, group: Group) -> Step:
        """The group's next step. Reads those in flight, unless it can be dispatched without that."""
        width = self.pipeline.width_of_unread(group)
        drafts = self.speculator.propose_ahead(group, width) if width else None
        return self.next_read(group) if drafts is None else PipelinedStep(drafts, self)

    def next_read(self, group: Group) -> PlainStep | VerifyStep:
        """The next step, after those that drafts depend on are read."""
        # Drafts follow its tokens, and seats may be removed.
        self.read_all(group, but_plain=True)
        group.tick()  # before drafts are made for each seat
        drafts = self.speculator.propose(group, lambda: self.read_all(group))
        if drafts is None and any(len(r.pending) > 1 for r in group.seats):
            drafts = [()] * len(group.seats)
        return PlainStep(self) if drafts is None else VerifyStep(drafts, self)

    def read_all(self, group: Group, *, but_plain: bool = False) -> None:
        """Bring all tokens of these steps to the host, where grammars and drafters see them."""
        for step in group.unread:
            if not (but_plain and isinstance(step, PlainInFlight)):
                self.read(group, step)

    def end(self) -> None:
        """Let go of what belongs to the thread's streams."""
        self.forward.trace = NoStepTrace()
        self.pipeline = Pipeline(self.forward.trace)
        self.speculator.end()

    def read(self, group: Group, step: StepInFlight) -> list[TakenTokens]:
        """Wait for a step's tokens; the first time, the speculator learns from them."""
        try:
            taken = step.read()
        except PipelineFault:
            self.pipeline.stop()
            raise
        if not step.is_counted:
            step.is_counted = True
            self.speculator.observe(group, taken, step)
        return taken


class PlainStep:
    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    def launch(self, group: Group) -> PlainInFlight:
        steps = self._steps
        is_pipelined = group.has_step_in_flight
        steps.prepare(len(group.seats))
        logits = steps.forward.step(group)
        # The step consumes position n_tokens, so it picks the one after.
        forced = [r.forced.pop(r.n_tokens + 1, None) if r.forced else None for r in group.seats]
        pickers = [picker_of(r) for r in group.seats]
        allowed = None
        if any(p.constraint for p in pickers):
            mx.async_eval(group.layers[len(group.layers) // 2].state)
            steps.read_all(group)
            allowed = mx.array(steps.masks.fill([p.constraint for p in pickers]))
        picks = steps.pick(logits, pickers, forced, allowed=allowed)
        mx.async_eval(picks.arrays)
        group.next_tokens = picks.tokens
        for row in group.seats:
            row.n_tokens += 1
        steps.forward.stepped(group)
        return PlainInFlight(tuple(group.seats), picks, is_pipelined)


@dataclass(eq=False, slots=True)
class PlainInFlight:
    """A dispatched step of one token a row. Its tokens are never taken back."""

    rows: tuple[Row, ...]
    picks: Picks
    is_pipelined: bool = False
    """It was dispatched while the step before it was in flight."""
    is_new: bool = False
    is_counted: bool = False
    _taken: list[TakenTokens] | None = None

    width = 1
    n_unread = 0
    may_stay_in_flight = True

    def read(self) -> list[TakenTokens]:
        """One token per row. The first call waits for them and advances the rows' grammars."""
        if self._taken is None:
            tokens = to_host(self.picks.tokens)
            logprobs = read_logprobs(self.picks, [r.picker for r in self.rows if r.picker])
            self._taken = []
            for row, token, logprob in zip(self.rows, tokens, logprobs, strict=True):
                row.pending = [token]
                if row.picker and row.picker.constraint:
                    row.picker.constraint.take([token])
                self._taken.append(TakenTokens(row, (token,), (logprob,)))
        return self._taken

    def sync(self) -> None:
        pass


class VerifyStep:
    """All tokens of its rows are on the host: drafting needed them."""

    def __init__(self, drafts: Sequence[tuple[int, ...]], steps: Steps) -> None:
        """drafts: one for each seat; those of rows that only catch up are empty."""
        self._drafts, self._steps = drafts, steps

    def launch(self, group: Group) -> Verification:
        steps = self._steps
        group.make_ready()
        feed = Feed(tuple(group.seats), tuple(self._drafts))
        width = max(feed.lengths)
        if is_rewindable(group.layers):  # other layers would have to know about padding
            width = steps.speculator.profile.shape(width)
        steps.prepare(len(feed.rows) * width)
        step = RaggedStep(group.layers, feed.lengths, width)
        ids, pickers = feed.ids(width), feed.pickers()
        fed = steps.pipeline.feed(feed.rows, feed.drafts, ids, group.layers)
        logits = steps.forward.wide(group, ids)
        allowed = None
        if any(picker_of(r).constraint for r in feed.rows):
            mx.async_eval(group.layers[len(group.layers) // 2].state)
            rows = [
                (picker_of(r).constraint, d) for r, d in zip(feed.rows, self._drafts, strict=True)
            ]
            allowed = mx.array(steps.masks.fill_ahead(rows))
        picks = feed.pick(logits, pickers, allowed=allowed)
        mx.async_eval(picks.arrays)
        keep = steps.forward.keeper()
        return Verification(group, feed.rows, feed.drafts, step, picks, pickers, width, keep, fed)


class PipelinedStep:
    """Follows a step of several tokens that is unread: the device continues the drafts itself."""

    def __init__(self, drafts: DraftsAhead, steps: Steps) -> None:
        self._drafts, self._steps = drafts, steps

    def launch(self, group: Group) -> StepInFlight:
        step = self._steps.pipeline.launch(group, self._drafts)
        if step is not None:
            return step
        # Its shape has no trace yet.
        return self._steps.next_read(group).launch(group)


def picker_of(row: Row) -> Picker:
    assert row.picker is not None
    return row.picker
