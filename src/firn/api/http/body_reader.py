"""Reads request bodies: each within its limit, all together within a memory budget."""

from __future__ import annotations

from starlette.types import Receive, Scope

from firn.api.http.body import check_content_type, read_body
from firn.api.http.exchange import Exchange, client_of, exchange_of
from firn.core.errors import Overloaded
from firn.core.shares import Share, Shares


class BodyReader:
    """Owner of the memory budget for bodies; one per app, on the asyncio thread.

    A client gets its share; a body always fits if it is the only one. Its memory is released when the
    exchange ends, since texts and pictures live as long as their request.
    """

    def __init__(self, *, limit_nbytes: int, total_nbytes: int) -> None:
        """limit_nbytes: for one body. total_nbytes: for all together."""
        self._limit_nbytes = limit_nbytes
        self._memory = Shares(max(total_nbytes, limit_nbytes))

    @property
    def used_nbytes(self) -> int:
        return self._memory.n_used

    async def read(self, scope: Scope, receive: Receive) -> bytes:
        """Raises BadRequest, BodyTooLarge, Overloaded, ClientGone."""
        headers, exchange = scope["headers"], exchange_of(scope)
        check_content_type(headers)
        if exchange.body is None:
            exchange.body = self._memory.open(client_of(scope))
        share = exchange.body
        return await read_body(
            headers,
            receive,
            limit_nbytes=self._limit_nbytes,
            take=lambda nbytes: _take(nbytes, share),
        )

    def release(self, exchange: Exchange) -> None:
        if exchange.body is not None:
            exchange.body.close()


def _take(nbytes: int, share: Share) -> None:
    if not share.grow(nbytes):
        raise Overloaded(
            "Your share of the memory for request bodies is in use; try again shortly."
        )
