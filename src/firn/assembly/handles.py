"""Where rows and cursors lose their own types.

Each runner has its own class of rows, each cache of cursors. The engine
passes them back only to the part that made them, so it need not know the classes. These casts
express that.
"""

from __future__ import annotations

from typing import TypeVar, cast

from firn.cache.off import CacheOff
from firn.cache.prefix import PrefixTree
from firn.core.ports import Cursor, LiveRow, PrefixCache, Runner

R = TypeVar("R", bound=LiveRow)
C = TypeVar("C", bound=Cursor)


def any_rows(runner: Runner[R]) -> Runner[LiveRow]:
    return cast("Runner[LiveRow]", runner)


def any_cursors(cache: PrefixTree | CacheOff) -> PrefixCache[Cursor]:
    if isinstance(cache, CacheOff):  # each branch checks that its class implements the port
        return _any_cursors(cache)
    return _any_cursors(cache)


def _any_cursors(cache: PrefixCache[C]) -> PrefixCache[Cursor]:
    return cast("PrefixCache[Cursor]", cache)
