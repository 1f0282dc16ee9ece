"""A rendered prompt: tokens, and what is known about them. All frozen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from firn.core.values.key_tokens import PackedTokens

TokenArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PictureSpan:
    """Positions [start, end) of the prompt stand for one picture with this content digest."""

    start: int
    end: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class PreparedPicture:
    """A picture that is ready to go into a prompt.

    text: replaces the placeholder in the chat template's output; ids: the tokens of that text.
    inputs: what the model is given; opaque outside `models`.
    """

    digest: bytes
    text: str
    ids: TokenArray
    inputs: Any


class Positions:
    """Where a prompt's tokens are among those that were sent: the n-th is at position n.

    A prompt of which only a part is read has others. A row's cells hold its tokens without gaps, so
    whoever asks for a position asks here. Immutable.
    """

    has_gaps = False
    recipe = ""
    """How the part was chosen: a part of the root, so that other prompts never match its records."""

    def end(self, n_tokens: int) -> int:
        """The position after the first `n_tokens` tokens, which may include the reply's."""
        return n_tokens

    def at(self, start: int, end: int) -> TokenArray:
        """The positions of tokens [start, end), which may include the reply's."""
        return np.arange(start, end, dtype=np.int64)

    def marks(self, start: int, end: int) -> npt.NDArray[np.uint64] | np.uint64:
        """What the key tokens [start, end) contain besides the tokens' ids."""
        return np.uint64(0)

    def sent(self, prompt: Prompt) -> Prompt:
        """The prompt as it was sent. prompt: the one with these positions."""
        return prompt


IN_ORDER = Positions()


@dataclass(slots=True)
class MadeOfPrompt:
    """What was computed from a prompt, and only from it, and is remembered. Any thread may fill it in:
    whoever does finds the same."""

    key_tokens: PackedTokens | None = None
    """Written by `core.keys.packed_tokens`."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered prompt.

    ids: int64, one entry per token; never written to. boundaries: ascending positions where a
    message (or the tool list) ends. A later prompt is likely to share them, so a recurrent model's
    state is kept there. hints: the boundaries that the caller asked for.
    """

    ids: TokenArray
    picture_spans: tuple[PictureSpan, ...] = ()
    boundaries: tuple[int, ...] = ()
    hints: tuple[int, ...] = ()
    picture_inputs: tuple[Any, ...] = ()
    """Preprocessed pictures for the model, one for each span; opaque outside `models`."""
    whole_pictures: bool = False
    """Whether a picture's tokens attend to each other: then no chunk ends inside a picture, and
    nothing resumes there."""
    notes: tuple[str, ...] = ()
    """How it differs from what was sent, for the log."""
    essential: tuple[tuple[int, int], ...] = ()
    """Ranges that must be read whatever else is skipped: system prompt, tools, the newest message."""
    positions: Positions = IN_ORDER
    salt: str = ""
    """Nothing is reused between prompts with different salts (see `core.keys`)."""
    made: MadeOfPrompt = field(default_factory=MadeOfPrompt, init=False, repr=False, compare=False)
    """Never copied: `replace` makes another prompt, of which nothing is known yet."""

    def __len__(self) -> int:
        return int(self.ids.shape[0])

    @property
    def unbroken(self) -> tuple[tuple[int, int], ...]:
        """Ranges [start, end) that no prefill chunk and no resume point may cut."""
        return tuple((m.start, m.end) for m in self.picture_spans) if self.whole_pictures else ()

    @property
    def recipe(self) -> str:
        """How it was prepared before it is read; '' if it is read as it was sent."""
        return self.positions.recipe

    def position(self, n_tokens: int) -> int:
        """Where its first `n_tokens` tokens end in what was sent."""
        return self.positions.end(n_tokens)

    @property
    def has_gaps(self) -> bool:
        """Whether some of the tokens that were sent are not read."""
        return self.positions.has_gaps

    @property
    def whole(self) -> Prompt:
        """The prompt as it was sent."""
        return self.positions.sent(self)

    def grown(self, reply: Sequence[int]) -> Prompt:
        """The prompt with these tokens appended."""
        return replace(self, ids=np.concatenate([self.ids, np.array(reply, dtype=np.int64)]))
