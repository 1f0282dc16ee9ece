"""Why a prompt resumed where it did and no later. Pure."""

from __future__ import annotations

from itertools import takewhile

from firn.cache.parts import Needs, Part
from firn.cache.planning.match import ANYWHERE, Walk, has_parts
from firn.cache.tree import Tree
from firn.core.reuse import Cause, Reason


def why_not_more(tree: Tree, walk: Walk, needs: Needs, n_tokens: int) -> Reason | None:
    """Why a prompt cannot resume later than here; None when only its last token is left.

    Considers what memory and tiers have. The caller knows whether a load was slow or failed.
    """
    n_last = len(walk.tokens) - 1
    if n_tokens >= n_last:
        return None
    if n_tokens >= n_last - n_last % needs.grid:
        return Reason(Cause.OFF_THE_GRID)
    limit = walk.limit
    if n_tokens < limit:
        if n_tokens >= limit - limit % needs.grid:
            return Reason(Cause.OFF_THE_GRID)
        if needs.state and _has_all_pages(walk, needs):
            return Reason(Cause.NO_STATE)
        return Reason(Cause.EVICTED)
    if _next_was_evicted(tree, walk):
        return Reason(Cause.EVICTED)
    if not walk.n_shared:
        return Reason(Cause.COLD)
    return Reason(Cause.DIVERGED if _diverges(walk) else Cause.NEW, walk.n_shared)


def _diverges(walk: Walk) -> bool:
    """Whether something stored goes on differently there, instead of ending there."""
    last = walk.node(len(walk.path))
    n_more = walk.n_shared - last.end
    if not n_more:
        return len(last.children) > 0
    closest = last.children.closest(walk.tokens, last.end, last.end + walk.block)
    return any(
        child.n_tokens > n for child, n in takewhile(lambda each: each[1] == n_more, closest)
    )


def _has_all_pages(walk: Walk, needs: Needs) -> bool:
    """Whether only a state is missing."""
    pages = (Part.PAGES,) if needs.pages else ()
    return all(has_parts(node, pages, ANYWHERE) for node in walk.path)


def _next_was_evicted(tree: Tree, walk: Walk) -> bool:
    """Whether the tree once knew more of the prompt than it does now.

    If another child shares some tokens, only an evicted block that matched as a whole is known to
    have shared more.
    """
    last = walk.node(len(walk.path))
    n = walk.block if walk.n_shared > last.end else 1
    tokens = walk.tokens.tokens[last.end : last.end + n]
    return len(tokens) == n and tree.evicted.had(last, tokens)
