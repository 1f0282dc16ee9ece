"""Functions of mlx-lm's and mlx-vlm's models, and what takes their place for this process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import wraps
from typing import Any

from firn.models.patches import Patches

Function = Callable[..., Any]
MARK = "__firn_replaces__"


@dataclass(frozen=True, slots=True)
class Replacement:
    """home: a module. path: the function's name there, behind its class's if it is a method. make: from
    the library's function to the one in its place."""

    home: str
    path: str
    make: Callable[[Function], Function]


def homes_of(family: str) -> tuple[str, str]:
    """Where the libraries define a model."""
    return f"mlx_lm.models.{family}", f"mlx_vlm.models.{family}.language"


def install(patches: Patches, replacements: Iterable[Replacement]) -> None:
    """In every module that is imported now. Calling it again replaces what was imported since."""
    for replacement in replacements:
        owner: Any = sys.modules.get(replacement.home)
        *parents, name = replacement.path.split(".")
        for parent in parents:
            owner = getattr(owner, parent, None)
        plain = getattr(owner, name, None)
        if plain is not None and not hasattr(plain, MARK):
            patches.replace(owner, name, _marked(plain, replacement.make(plain)))


def _marked(plain: Function, new: Function) -> Function:
    """A function, so that a class makes a method of it."""

    @wraps(plain)
    def replaced(*args: Any, **named: Any) -> Any:
        return new(*args, **named)

    setattr(replaced, MARK, plain)
    return replaced
