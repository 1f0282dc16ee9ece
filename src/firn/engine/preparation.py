"""The engine's hook: work on a prompt before the model reads it, and on a request after its end.

    admitted -> restored -> prepared in slices, between decode steps -> read like any prompt
                                                              over, nothing to do -> idle work

Owner: the engine thread.
"""

from __future__ import annotations

from collections.abc import Sequence as Several
from typing import Protocol

from firn.engine.inflight import InFlight
from firn.engine.sequence import PrefillTask, Sequence


class IdleWork(Protocol):
    """What is done while the engine has no requests."""

    @property
    def has_work(self) -> bool: ...

    def add(self, sequence: Sequence) -> None:
        """A request is over."""
        ...

    def step(self) -> None:
        """Do a little. Called while there are no requests."""
        ...

    def pause(self) -> None:
        """A request has arrived: free the memory that is not needed to go on later."""
        ...

    def forget(self) -> None:
        """Drop everything: the engine ends, or nothing that was computed can be trusted."""
        ...


class Preparer(Protocol):
    """May replace a task's prompt, cursor and row. A fault that may be the device's is raised; after any
    other the prompt is read as it is."""

    recipes: Several[str]
    """The ways in which it prepares prompts: their records have separate roots."""
    idle_work: IdleWork

    def attach(self, inflight: InFlight) -> None:
        """The engine's thread begins. Called once, before everything else."""
        ...

    def begin(self, task: PrefillTask) -> None:
        """The task has a row with what is cached. To prepare its prompt, set `is_preparing`."""
        ...

    def dispatch(self, task: PrefillTask, n_tokens: int) -> None:
        """Dispatch the next slice. If that fails, the task is not `is_preparing` any more.

        n_tokens: the chunk that the model would read now.
        """
        ...

    def finish_slice(self, task: PrefillTask) -> None:
        """Wait for the slice."""
        ...

    def drop(self, task: PrefillTask) -> None:
        """The task is over. Idempotent."""
        ...

    def shrink(self) -> None:
        """A slice may have been too large for the device."""
        ...

    def close(self) -> None: ...


class NoIdleWork:
    has_work = False

    def add(self, sequence: Sequence) -> None:
        pass

    def step(self) -> None:
        pass

    def pause(self) -> None:
        pass

    def forget(self) -> None:
        pass


class NoPreparation:
    """Every prompt is read as it is."""

    recipes: Several[str] = ()
    idle_work: IdleWork = NoIdleWork()

    def attach(self, inflight: InFlight) -> None:
        pass

    def begin(self, task: PrefillTask) -> None:
        pass

    def dispatch(self, task: PrefillTask, n_tokens: int) -> None:
        pass

    def finish_slice(self, task: PrefillTask) -> None:
        pass

    def drop(self, task: PrefillTask) -> None:
        pass

    def shrink(self) -> None:
        pass

    def close(self) -> None:
        pass
