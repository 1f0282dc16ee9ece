"""The ports themselves: small enough to be implemented twice, and typed."""

from __future__ import annotations

import inspect
import typing
from typing import Any, Protocol

import pytest

from firn.core import ports
from tests.contracts.stands import members

MOST_MEMBERS = 20
"""Of a whole: a port that is cut into slices which nothing is declared with is no smaller."""
PORTS = {
    name: port
    for name in ports.__all__
    if inspect.isclass(port := getattr(ports, name)) and Protocol in port.__mro__
}


def test_all_ports_are_here() -> None:
    assert {"Runner", "EngineCache", "Engine", "Tokenizer", "Cursor"} <= set(PORTS)


@pytest.mark.parametrize("name", PORTS)
def test_a_port_has_few_methods(name: str) -> None:
    assert len(members(PORTS[name])) <= MOST_MEMBERS


@pytest.mark.parametrize("name", ["Runner", "EngineCache", "Cursor", "LiveRow"])
def test_rows_and_cursors_have_types(name: str) -> None:
    """Any is allowed for JSON and for what mlx-lm makes, never for a handle that is passed back."""
    for member, function in members(PORTS[name]).items():
        function = function.fget if isinstance(function, property) else function
        hints = typing.get_type_hints(function, include_extras=True)
        anys = [key for key, hint in hints.items() if hint is Any]
        assert anys == [], f"{name}.{member}"
