"""Where rows lose their own type.

Each runner has its own class of rows. The engine passes them back only to the runner that made them,
so it need not know the class. This cast expresses that.
"""

from __future__ import annotations

from typing import TypeVar, cast

from firn.core.ports import LiveRow, Runner

R = TypeVar("R", bound=LiveRow)


def any_rows(runner: Runner[R]) -> Runner[LiveRow]:
    return cast("Runner[LiveRow]", runner)
