"""Where a recurrent model's state is worth keeping. Pure.

States are large, so they are taken where they will be asked for again: the end of the tools and the
system prompt, the start of the last user turns, where the next turn may depart (before the generation
prompt, if history does not contain it as it is), the branch point that a lookup has just found, and a
sparse power-of-two lattice in long prompts. The end of the prompt and the end of the reply come for free
and are kept by the caller.
"""

from __future__ import annotations

from collections.abc import Sequence

from firn.cache.tree import Mark

N_TURNS = 2
N_HINTS = 4
"""As many as Anthropic's API takes."""
MIN_GAP_TOKENS = 32
"""Two states closer than this are one: reading that many tokens again costs less than a state."""
LATTICE_FROM_TOKENS = 4096


def due(
    boundaries: Sequence[int],
    n_prompt: int,
    *,
    n_restored: int,
    n_shared: int,
    hints: Sequence[int] = (),
    grid: int = 1,
) -> dict[int, Mark]:
    """Positions (ascending) where state should be kept, with the reason. All lie after n_restored.

    boundaries: ascending positions where messages end.
    n_shared: how far the prompt agrees with something stored: a branch point if not resumable.
    hints: ascending positions that the caller expects to resume at.
    grid: positions are rounded down to multiples of this (exact mode's chunk).
    """
    wanted: dict[int, Mark] = {}

    def want(position: int, mark: Mark) -> None:
        position -= position % grid
        if n_restored < position < n_prompt:
            wanted[position] = max(mark, wanted.get(position, mark))

    position = LATTICE_FROM_TOKENS
    while position < n_prompt:
        want(position, Mark.LATTICE)
        position *= 2
    if boundaries:
        want(boundaries[0], Mark.SHARED)
        for boundary in boundaries[-1 - N_TURNS :]:
            want(boundary, Mark.TURN)
    for hint in hints[-N_HINTS:]:
        want(hint, Mark.SHARED)
    if n_shared > n_restored + MIN_GAP_TOKENS:
        want(n_shared, Mark.BRANCH)
    kept = _spread(dict(sorted(wanted.items())), n_restored)
    end = n_prompt - 1 - (n_prompt - 1) % grid
    if end > n_restored:
        kept.setdefault(end, Mark.PROMPT_END)  # the chunk ends there anyway
    return dict(sorted(kept.items()))


def _spread(wanted: dict[int, Mark], n_restored: int) -> dict[int, Mark]:
    """Drop positions too close behind a kept one; the last of a close group stays if it is higher.

    A branch point stays in any case: what departs there can use nothing behind it.
    """
    kept: dict[int, Mark] = {}
    last = n_restored
    for position, mark in wanted.items():
        close = position - last < MIN_GAP_TOKENS
        if close and kept.get(last, Mark.BRANCH) < min(mark, Mark.BRANCH):
            del kept[last]
            close = False
        if not close or mark >= Mark.BRANCH:
            kept[position] = mark
            last = position
    return kept
