"""What the front tells a model's process about a caller: its identity, and the request's id.

The front has checked keys, hosts and rates; behind it nothing is checked again. Clients cannot
forge these headers: the front forwards none of theirs by these names, and only the front reaches
the processes.
"""

from __future__ import annotations

from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from firn.api.auth import Caller, Keys
from firn.api.exchange import SCOPE_KEY, Exchange
from firn.core.errors import Unauthorized
from firn.core.values import Namespace

CALLER, REQUEST, PAGE = b"x-firn-caller", b"x-firn-request", b"x-firn-page"

RawHeaders = Iterable[tuple[bytes, bytes]]


def vouch(exchange: Exchange) -> list[tuple[bytes, bytes]]:
    """The headers that identify the caller, and say whether the server's own page asks."""
    caller = exchange.caller
    text = f"{caller.own} {caller.namespace} {int(caller.operator)}"
    said = [(CALLER, text.encode("ascii")), (REQUEST, exchange.id.encode("ascii"))]
    return [*said, (PAGE, b"1")] if exchange.own_page else said


class VouchedKeys(Keys):
    """Trusts the front about who calls; the keys only tell which namespaces there can be."""

    def admit(self, headers: RawHeaders, *, local: bool = False) -> Caller:
        for name, value in headers:
            if name == CALLER:
                own, namespace, operator = value.decode("ascii").split(" ")
                return Caller(Namespace(own), Namespace(namespace), operator == "1")
        raise Unauthorized("This is the private socket of a firn server.")


def vouched(app: ASGIApp) -> ASGIApp:
    """The app with the front's request ids, so that both logs show the same."""

    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            given = [value.decode("ascii") for name, value in scope["headers"] if name == REQUEST]
            if given:
                page = any(name == PAGE for name, _ in scope["headers"])
                scope[SCOPE_KEY] = Exchange(id=given[0], own_page=page)
        await app(scope, receive, send)

    return inner
