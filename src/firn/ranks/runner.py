"""The runner of a sharded model: rank 0 sends each call to the others, and they make the same calls.

A forward pass contains collectives, so all ranks must build and evaluate the same passes in the same
order. Rank 0 sends a call before it makes it. A call that computes nothing and may fail for one request
(`start`, `choices`) is made first and sent when it has succeeded. Rows are identified by numbers.

Only rank 0 samples. Its tokens reach the others inside the computation (`RankGroup.share`), so decode
steps stay pipelined. A row's group, index and padding follow from the calls alone; a follower checks
that it has arrived at the same state.

Owner: the engine thread; on a follower, its main thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

import mlx.core as mx
import numpy as np

from firn.core.ports import ReadChunk, Restored
from firn.core.values import Job, Prompt, RequestId, Sampling
from firn.models.decode.batch import Row, TakenTokens
from firn.models.decode.runner import Runner
from firn.models.decode.sampling import Picker, Picks
from firn.ranks.calls import Followers
from firn.ranks.group import RankGroup

Fills = list[tuple[str, list[int], int]]
"""How a row was restored: (part, the numbers of its payloads, tokens)."""
EMPTY_PROMPT = Prompt(np.zeros(0, dtype=np.int64))


class LeaderRunner(Runner):
    """The runner of rank 0."""

    group: RankGroup
    followers: Followers
    take_fills: Callable[[], Fills]

    def lead(
        self, group: RankGroup, followers: Followers, take_fills: Callable[[], Fills]
    ) -> LeaderRunner:
        """take_fills: returns what was filled since its last call, by the numbers of payloads."""
        self.group, self.followers, self.take_fills = group, followers, take_fills
        self._numbers: WeakKeyDictionary[Row, int] = WeakKeyDictionary()
        self._serial = count(1)
        return self

    def number_of(self, layers: Sequence[Any], index: int) -> int:
        """The number of the row at this index of these layers."""
        for row, number in self._numbers.items():
            mine = row.group.layers if row.group is not None else row.layers
            if mine is layers and row.index == index:
                return number
        raise LookupError("no row has these layers")

    @property
    def can_batch_prefill(self) -> bool:
        """Whether one pass can read several prompts. It cannot: followers have no such pass."""
        return False

    # --- prefill ---------------------------------------------------------------------------

    def start(self, restored: Restored | None) -> Row:
        try:
            row = super().start(restored)
        finally:
            fills = self.take_fills()
        number = self._named(row)
        self.followers.tell("start", number, row.n_tokens, fills)
        return row

    def prefill(
        self, row: Row, prompt: Prompt, end: int, *, top_logprobs: int | None = None
    ) -> None:
        chunk = prompt.ids[row.n_tokens : end].astype("<i4").tobytes()
        place = (self._numbers[row], row.n_tokens, end, len(prompt))
        with self._on_all_ranks("prefill", *place, top_logprobs, blob=chunk):
            super().prefill(row, prompt, end, top_logprobs=top_logprobs)

    def finish_chunk(self, row: Row) -> ReadChunk:
        with self._on_all_ranks("finish_chunk", self._numbers[row]):
            return super().finish_chunk(row)

    def choices(self, row: Row, job: Job, indices: Sequence[int]) -> list[Row]:
        rows = super().choices(row, job, indices)
        self.followers.tell("choices", self._numbers[row], [self._named(r) for r in rows])
        return rows

    # --- decode ----------------------------------------------------------------------------

    def join(self, row: Row, token: int, *, before: Sequence[int] = (), n_coming: int = 0) -> None:
        assert not before, "followers have no steps of several tokens"
        with self._on_all_ranks("join", self._numbers[row], token, n_coming, row.alone):
            super().join(row, token, n_coming=n_coming)

    def leave(self, rows: Sequence[Row]) -> None:
        with self._on_all_ranks("leave", [self._numbers[r] for r in rows if r in self._numbers]):
            super().leave(rows)
        for row in rows:
            self._numbers.pop(row, None)

    def launch(self, rows: Sequence[Row]) -> None:
        with self._on_all_ranks("launch", self._numbers[rows[0]]):
            super().launch(rows)

    def collect(self, rows: Sequence[Row], *, keep_in_flight: int) -> list[TakenTokens]:
        if rows[0].group is None:
            return []
        with self._on_all_ranks("collect", self._numbers[rows[0]], keep_in_flight):
            return super().collect(rows, keep_in_flight=keep_in_flight)

    def free_memory(self) -> None:
        with self._on_all_ranks("free_memory"):
            super().free_memory()

    def _pick(
        self,
        logits: mx.array,
        pickers: Sequence[Picker],
        forced: Sequence[int | None],
        *,
        allowed: mx.array | None,
    ) -> Picks:
        picks = super()._pick(logits, pickers, forced, allowed=allowed)
        return replace(picks, tokens=self.group.share(picks.tokens))

    # --- inside ----------------------------------------------------------------------------

    def _named(self, row: Row) -> int:
        if row not in self._numbers:
            self._numbers[row] = next(self._serial)
        return self._numbers[row]

    @contextmanager
    def _on_all_ranks(self, name: str, *args: Any, blob: bytes = b"") -> Iterator[None]:
        """Send the call, then make it in the block. If it fails on this rank, the ranks' states
        differ and the group ends."""
        self.followers.tell(name, *args, blob=blob)
        try:
            yield
        except Exception as e:
            raise self.followers.end_group(f"rank 0 failed in {name}: {e!r}") from e


class FollowerRunner(Runner):
    """The runner of a follower. It has a method `on_NAME` for each call that rank 0 sends."""

    group: RankGroup

    def follow(self, group: RankGroup) -> FollowerRunner:
        self.group = group
        self.by_number: dict[int, Row] = {}
        return self

    def on_start(self, number: int, n_tokens: int, restored: Restored | None) -> None:
        self.by_number[number] = self.start(restored)

    def on_prefill(
        self, number: int, start: int, end: int, total: int, top: int | None, *, chunk: bytes
    ) -> None:
        row = self.by_number[number]
        in_step(row.n_tokens == start, "a row's tokens")
        ids = np.zeros(total, dtype=np.int64)
        ids[start:end] = np.frombuffer(chunk, dtype="<i4")
        self.prefill(row, Prompt(ids), end, top_logprobs=top)

    def on_finish_chunk(self, number: int) -> None:
        self.finish_chunk(self.by_number[number])

    def on_choices(self, number: int, numbers: Sequence[int]) -> None:
        job = Job(RequestId(""), EMPTY_PROMPT, 1, sampling=Sampling(temperature=0.0))
        rows = self.choices(self.by_number[number], job, list(range(len(numbers))))
        self.by_number.update(zip(numbers, rows, strict=True))

    def on_join(self, number: int, token: int, n_coming: int, alone: bool) -> None:
        row = self.by_number[number]
        row.alone = alone
        self.join(row, token, n_coming=n_coming)

    def on_leave(self, numbers: Sequence[int]) -> None:
        self.leave([row for n in numbers if (row := self.by_number.pop(n, None)) is not None])

    def on_launch(self, number: int) -> None:
        self.launch([self.by_number[number]])

    def on_collect(self, number: int, keep_in_flight: int) -> None:
        self.collect([self.by_number[number]], keep_in_flight=keep_in_flight)

    def on_free_memory(self) -> None:
        self.free_memory()

    def _pick(
        self,
        logits: mx.array,
        pickers: Sequence[Picker],
        forced: Sequence[int | None],
        *,
        allowed: mx.array | None,
    ) -> Picks:
        """Zeros that depend on the logits: a slice of them may have to be computed on this rank."""
        return Picks(self.group.share(mx.argmax(logits, axis=-1) * 0), None, None, None)


def in_step(same: bool, subject: str) -> None:
    """Stop a follower whose state differs from rank 0's."""
    if not same:
        raise RuntimeError(f"out of step with rank 0: {subject}")
