"""The mutable records of a request in flight. Owner: the engine thread."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from firn.core.ports import Trail
from firn.core.values import Job, Prompt, TokenArray


@dataclass(eq=False)
class Choice:
    """One reply of a request: its row on the device and the tokens it has so far."""

    sequence: Sequence
    index: int
    row: Any = None
    trail: Trail | None = None
    tokens: list[int] = field(default_factory=list)
    done: bool = False
    n_rescues: int = 0

    def ids(self) -> TokenArray:
        """The prompt and the reply so far."""
        prompt = self.sequence.job.prompt.ids
        return np.concatenate([prompt, np.array(self.tokens, dtype=np.int64)])


@dataclass(eq=False)
class Sequence:
    """One request. `task` is set while its prompt is being read."""

    job: Job
    trail: Trail
    choices: list[Choice] = field(default_factory=list)
    admitted: bool = False
    need_nbytes: int = 0

    def __post_init__(self) -> None:
        self.choices = [Choice(self, i) for i in range(self.job.n)]

    @property
    def open_choices(self) -> list[Choice]:
        return [c for c in self.choices if not c.done]


@dataclass(eq=False)
class Task:
    """A prompt to read, and the choices that start to decode when it is read.

    # [0, row.n_tokens) done   [row.n_tokens, n_total) to do   the last token makes the logits
    """

    number: int
    sequence: Sequence
    prompt: Prompt
    choices: list[Choice]
    trail: Trail
    row: Any

    @property
    def n_total(self) -> int:
        return len(self.prompt) - 1

    @property
    def n_left(self) -> int:
        return self.n_total - int(self.row.n_tokens)
