"""At which positions of a prompt a recurrent model's state is kept. Pure.

States are large, so they are kept where they will be needed again: at the end of the tools and the
system prompt, at the start of the last user turns, where the next turn may branch off (before the
generation prompt, if history will not contain it), at a branch point that a lookup has just found, and
on a lattice of powers of two in long prompts. The ends of the prompt and of the reply cost
nothing extra: the first is always due, and the caller keeps the second.
"""

from __future__ import annotations

from collections.abc import Sequence

from firn.cache.tree import CheckpointKind

N_TURNS = 2
"""How many of the last turns have a state at their start."""
N_HINTS = 4
"""As many as Anthropic's API accepts."""
MIN_GAP_TOKENS = 32
"""States closer than this are not both kept: computing so few tokens costs less than a state."""
LATTICE_FROM_TOKENS = 4096
"""The first position of the lattice; each next one is twice as far."""


def due(
    boundaries: Sequence[int],
    n_prompt: int,
    *,
    n_restored: int,
    n_shared: int,
    hints: Sequence[int] = (),
    grid: int = 1,
    replies_stay: bool = False,
) -> dict[int, CheckpointKind]:
    """Ascending positions after n_restored where a state should be kept, with the reason.

    boundaries: ascending positions where messages end.
    n_shared: how many tokens the prompt shares with something stored; a branch point.
    hints: ascending positions where the caller expects to resume.
    grid: positions are rounded down to multiples of this (exact mode's chunk).
    replies_stay: this prompt continues the end of a reply, so the next one probably will, too. Then the
    starts of turns serve only those who go back: they are evicted first, and not written to tiers.
    """
    wanted: dict[int, CheckpointKind] = {}

    def want(position: int, kind: CheckpointKind) -> None:
        position -= position % grid
        if n_restored < position < n_prompt:
            wanted[position] = max(kind, wanted.get(position, kind))

    position = LATTICE_FROM_TOKENS
    while position < n_prompt:
        want(position, CheckpointKind.LATTICE)
        position *= 2
    if boundaries:
        want(boundaries[0], CheckpointKind.SHARED)
        for boundary in boundaries[-1 - N_TURNS :]:
            want(boundary, CheckpointKind.PROMPT_END if replies_stay else CheckpointKind.TURN)
    for hint in hints[-N_HINTS:]:
        want(hint, CheckpointKind.SHARED)
    if n_shared > n_restored + MIN_GAP_TOKENS:
        want(n_shared, CheckpointKind.BRANCH)
    kept = _spread(dict(sorted(wanted.items())), n_restored)
    end = n_prompt - 1 - (n_prompt - 1) % grid
    if end > n_restored:
        kept.setdefault(end, CheckpointKind.PROMPT_END)  # the chunk ends there anyway
    return dict(sorted(kept.items()))


def _spread(wanted: dict[int, CheckpointKind], n_restored: int) -> dict[int, CheckpointKind]:
    """Drop positions that follow a kept one too closely, or the kept one if its kind is lower.

    A branch point stays in any case: a prompt that branches off there can use no later state.
    """
    kept: dict[int, CheckpointKind] = {}
    last = n_restored
    for position, kind in wanted.items():
        close = position - last < MIN_GAP_TOKENS
        if close and kept.get(last, CheckpointKind.BRANCH) < min(kind, CheckpointKind.BRANCH):
            del kept[last]
            close = False
        if not close or kind >= CheckpointKind.BRANCH:
            kept[position] = kind
            last = position
    return kept
