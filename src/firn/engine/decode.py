"""Generates replies: once read, a prompt joins the decode batch, and each step extends its reply.

Owner: the engine thread.
"""

from __future__ import annotations

from collections.abc import Iterator

from firn.core.events import ChoiceDone, Token
from firn.core.ports import LiveRow, TakenTokens
from firn.engine.inflight import InFlight
from firn.engine.recovery import Recovery
from firn.engine.sequence import Choice, ListTail, PrefillTask

MAX_LENGTH_RATIO = 2.0
"""Prompts whose lengths differ by at most this factor are expected to join the same group."""


class Decode:
    def __init__(self, inflight: InFlight, recovery: Recovery) -> None:
        self._inflight = inflight
        self._runner = inflight.runner
        self._recovery = recovery
        self._has_first_token = False

    # --- joining ---------------------------------------------------------------------------

    def begin(self, task: PrefillTask) -> None:
        """The prompt is read up to its last token, or to a short rest that the first step reads: its
        choices join the decode batch."""
        job = task.sequence.job
        self._inflight.end_preparation(task)
        self._inflight.announce(task.sequence, is_final=True)
        if not job.max_tokens:
            choices = [c for c in task.choices if not c.done]
            for choice in choices:
                self._inflight.emit(job.id, ChoiceDone(choice.index, "length"))
            self._inflight.finish(choices)
            return
        del self._inflight.tasks[task.number]
        with self._recovery.guard(task.sequence):
            with self._inflight.closing_on_error(task.cursor):
                self._join(task)
            task.cursor.close(None)

    def _join(self, task: PrefillTask) -> None:
        *rest, last = task.prompt.ids[task.row.n_tokens :].tolist()
        choices = [c for c in task.choices if not c.done]
        try:
            rows = self._runner.choices(task.row, task.sequence.job, [c.index for c in choices])
        except Exception:
            self._runner.leave([task.row])
            raise
        for choice, row in zip(choices, rows, strict=True):
            choice.row = row  # dropped with its choice, whatever fails below
        n_coming = len(choices) + self._n_of_similar_length(task)
        for choice, row in zip(choices, rows, strict=True):
            n_coming -= 1
            if choice.n_rescues or choice.tokens:
                self._runner.resume(row, choice.tokens, alone=choice.n_rescues > 0)
            reply = ListTail(choice.tokens, len(task.prompt) - len(task.sequence.job.prompt))
            choice.cursor = task.cursor.fork(reply)
            self._runner.join(row, last, before=rest, n_coming=n_coming)
            self._inflight.rows[row] = choice
            if choice.forced.tokens:
                self.force(choice, row)

    def _n_of_similar_length(self, task: PrefillTask) -> int:
        """How many admitted rows will probably join the same group."""
        return sum(
            len(t.choices)
            for t in self._inflight.tasks.values()
            if 1 / MAX_LENGTH_RATIO <= len(t.prompt) / len(task.prompt) <= MAX_LENGTH_RATIO
        )

    def force(self, choice: Choice, row: LiveRow) -> None:
        """Tell the runner which of the reply's next tokens the model does not pick."""
        rest = choice.forced.rest(choice.n_picked)
        n_prompt = len(choice.sequence.job.prompt)
        self._runner.force(row, rest.tokens, at=n_prompt + rest.at)

    # --- steps -----------------------------------------------------------------------------

    def _groups(self) -> Iterator[list[LiveRow]]:
        """The decode groups, without rows that were lost to a fault in an earlier group."""
        for rows in self._runner.groups():
            if live := [row for row in rows if row in self._inflight.rows]:
                yield live

    def launch(self) -> None:
        for rows in self._groups():
            try:
                self._runner.launch(rows)
            except Exception as e:
                self._recovery.rescue(rows, e)

    def collect(self, *, wait: bool) -> None:
        """Read the tokens. Those of the newest step stay in flight until the next one is launched,
        unless a prefill chunk runs (`wait`) or a request waits for its first token.
        """
        for rows in self._groups():
            now = wait or any(not self._inflight.rows[row].tokens for row in rows)
            self._collect(rows, keep_in_flight=0 if now else 1)

    def collect_all(self, choice: Choice) -> None:
        """Read every token of this reply that has been dispatched, and those of its group."""
        for rows in self._groups():
            if choice.row in rows:
                self._collect(rows, keep_in_flight=0)

    def _collect(self, rows: list[LiveRow], *, keep_in_flight: int) -> None:
        try:
            steps = self._runner.collect(rows, keep_in_flight=keep_in_flight)
        except Exception as e:
            self._recovery.rescue(rows, e)
            return
        ended: list[Choice] = []
        with self._inflight.cache.together():
            for taken in steps:
                self._take(taken, ended)
            self._inflight.finish(ended)

    def _take(self, taken: TakenTokens[LiveRow], ended: list[Choice]) -> None:
        """ended: replies that end in this step; one that ends is added."""
        choice = self._inflight.rows.get(taken.row)
        if choice is None or choice in ended:
            return
        if taken.fault is not None:
            self._recovery.fail(choice.sequence, taken.fault)
            return
        last = len(taken.tokens) - 1
        for i, id in enumerate(taken.tokens):
            token = Token(
                choice.index,
                id,
                taken.logprobs[i],
                forced=choice.forced.at <= len(choice.tokens) < choice.forced.end,
                n_drafted=taken.n_drafted if i == last else 0,
                n_accepted=taken.n_right if i == last else 0,
            )
            if self._pass_on(choice, token):
                ended.append(choice)
                return
        if choice.cursor is not None and choice.cursor.commit_due(taken.row.n_tokens):
            self._inflight.commit(choice.cursor, taken.row)

    def _pass_on(self, choice: Choice, token: Token) -> bool:
        """Send a token to the client; returns whether it is the reply's last."""
        job = choice.sequence.job
        has_stopped = token.id in job.eos
        self._has_first_token |= not choice.tokens
        choice.tokens.append(token.id)
        self._inflight.emit(job.id, token)
        is_last = has_stopped or len(choice.tokens) >= job.max_tokens
        if is_last:
            done = ChoiceDone(choice.index, "stop" if has_stopped else "length")
            self._inflight.emit(job.id, done)
        return is_last

    def take_first_token_flag(self) -> bool:
        """Whether a reply got its first token since the last call."""
        flag, self._has_first_token = self._has_first_token, False
        return flag
