"""What a backend has replaced in MLX for the whole process: one list, taken out again in reverse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Patches:
    """Owner: the backend. Installed before the first model is loaded: MLX keeps what it compiles."""

    def __init__(self) -> None:
        self._undo: list[tuple[str, Callable[[], object]]] = []

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self._undo]

    def replace(self, owner: Any, name: str, new: Any) -> None:
        """Make `owner.name` another function."""
        old = getattr(owner, name)
        setattr(owner, name, new)
        self.add(f"{owner.__name__}.{name}", lambda: setattr(owner, name, old))

    def add(self, name: str, undo: Callable[[], object]) -> None:
        """Record something that was replaced in another way."""
        self._undo.append((name, undo))

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()[1]()
