"""Reads request bodies: JSON only, each within its limit, all together within a memory budget."""

from __future__ import annotations

from starlette.types import Receive, Scope

from firn.api.body import check_content_type, read_body
from firn.api.exchange import Exchange, exchange_of
from firn.core.errors import Overloaded


class BodyReader:
    """Owner of the memory budget for bodies; one per app, on the asyncio thread.

    A body always fits if it is the only one. Its memory is released when the exchange ends, since texts
    and pictures live as long as their request.
    """

    def __init__(self, *, limit_nbytes: int, total_nbytes: int) -> None:
        """limit_nbytes: for one body. total_nbytes: for all together."""
        self._limit_nbytes = limit_nbytes
        self._total_nbytes = total_nbytes
        self.used_nbytes = 0

    async def read(self, scope: Scope, receive: Receive) -> bytes:
        """Raises BadRequest, BodyTooLarge, Overloaded, ClientGone."""
        headers, exchange = scope["headers"], exchange_of(scope)
        check_content_type(headers)
        return await read_body(
            headers,
            receive,
            limit_nbytes=self._limit_nbytes,
            take=lambda nbytes: self._take(nbytes, exchange),
        )

    def release(self, exchange: Exchange) -> None:
        self.used_nbytes -= exchange.body_nbytes
        exchange.body_nbytes = 0

    def _take(self, nbytes: int, exchange: Exchange) -> None:
        others_nbytes = self.used_nbytes - exchange.body_nbytes
        if others_nbytes and self.used_nbytes + nbytes > self._total_nbytes:
            raise Overloaded("All memory for request bodies is in use; try again shortly.")
        self.used_nbytes += nbytes
        exchange.body_nbytes += nbytes
