"""Servers take turns, round after round: a machine that slows down slows all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


def in_turns(
    servers: Mapping[str, T], rounds: int, play: Callable[[T], dict[str, Any]]
) -> dict[str, list[dict[str, Any]]]:
    """Calls `play` with each server: A B, then B A, and so on."""
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in servers}
    for i in range(rounds):
        for name, server in rotated(list(servers.items()), i):
            results[name].append(play(server))
    return results


def rotated(items: Sequence[T], turn: int) -> list[T]:
    """The items, beginning with another one each turn, so that none is always first."""
    k = turn % len(items)
    return [*items[k:], *items[:k]]
