"""What is left of a prompt that skips some of its tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from firn.core.values import KeyTokens, Positions, Prompt, TokenArray


@dataclass(frozen=True, slots=True, eq=False)
class Thinned(Positions):
    """kept: the positions of the tokens that are read, ascending. whole: the prompt as it was sent."""

    kept: TokenArray
    whole: Prompt
    recipe: str

    has_gaps = True

    @property
    def shift(self) -> int:
        """How far positions after the prompt are ahead of the number of tokens read."""
        return int(self.kept[-1]) + 1 - len(self.kept)

    def end(self, n_tokens: int) -> int:
        if n_tokens > len(self.kept):
            return n_tokens + self.shift
        return int(self.kept[n_tokens - 1]) + 1 if n_tokens else 0

    def at(self, start: int, end: int) -> TokenArray:
        n_kept = len(self.kept)
        after = np.arange(max(start, n_kept), max(end, n_kept), dtype=np.int64) + self.shift
        return np.concatenate([self.kept[start:end], after])

    def marks(self, start: int, end: int) -> KeyTokens:
        """The positions, in the upper halves: a layer's state depends on them, too."""
        marks: KeyTokens = self.at(start, end).astype(np.uint64) << np.uint64(32)
        return marks

    def sent(self, prompt: Prompt) -> Prompt:
        return self.whole
