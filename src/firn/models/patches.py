"""What is replaced in MLX: one list, which the device's backend owns, and which can be taken out again.

MLX's functions belong to the process, so whoever replaces one records it here: a backend at the start
(`replace`, `add`), and a pass of the model for its duration (`during`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Patches:
    """Owner: the backend. Installed before the first model is loaded: MLX keeps what it compiles."""

    def __init__(self) -> None:
        self._undo: list[tuple[str, Callable[[], object]]] = []

    @property
    def names(self) -> list[str]:
        """What is replaced now, in the order in which it was."""
        return [name for name, _ in self._undo]

    def replace(self, owner: Any, name: str, new: Any) -> None:
        """Make `owner.name` another function."""
        old = getattr(owner, name)
        setattr(owner, name, new)
        self.add(f"{owner.__name__}.{name}", lambda: setattr(owner, name, old))

    def add(self, name: str, undo: Callable[[], object]) -> None:
        """Record something that was replaced in another way."""
        self._undo.append((name, undo))

    @contextmanager
    def during(self, owner: Any, name: str, new: Any) -> Iterator[None]:
        """Make `owner.name` another function inside the block."""
        self.replace(owner, name, new)
        try:
            yield
        finally:
            self._undo.pop()[1]()

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()[1]()
