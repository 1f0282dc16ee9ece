"""Requests that ask for another protocol are answered over HTTP/1.1: a server may ignore `Upgrade`.

httptools ends such a request after its head, and its body would be lost. Java's HTTP client sends
`Upgrade: h2c` with a POST, and so do the programs that use it: JetBrains' assistant, Spring AI.
"""

from __future__ import annotations

from typing import Protocol

import httptools


class Receiver(Protocol):
    """Gets httptools' callbacks, and keeps the head of the request that is arriving."""

    url: bytes
    headers: list[tuple[bytes, bytes]]


class RequestParser:
    """httptools' parser. A request with `Upgrade` is begun again without it: the receiver ignores
    the first ends of its head and its message, while `begins_again`. Owner: one connection."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._parser = _parser(receiver)

    @property
    def begins_again(self) -> bool:
        # What follows the head of a CONNECT is no body.
        return self._parser.should_upgrade() and self._parser.get_method() != b"CONNECT"

    def feed_data(self, data: bytes) -> None:
        """Raises HttpParserError, and HttpParserUpgrade for a CONNECT."""
        rest = memoryview(data)
        while rest:
            try:
                self._parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if not self.begins_again:
                    raise
                rest = rest[upgrade.args[0] :]
                head, self._parser = self._head(), _parser(self._receiver)
                self._parser.feed_data(head)

    def _head(self) -> bytes:
        method, version = self._parser.get_method(), self._parser.get_http_version()
        lines = [b"%b %b HTTP/%b" % (method, self._receiver.url, version.encode())]
        lines += [b"%b: %b" % (n, v) for n, v in self._receiver.headers if n != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    # --- what uvicorn asks it ----------------------------------------------------------------

    def get_method(self) -> bytes:
        return self._parser.get_method()

    def get_http_version(self) -> str:
        return self._parser.get_http_version()

    def should_keep_alive(self) -> bool:
        return self._parser.should_keep_alive()

    def should_upgrade(self) -> bool:
        return False


def _parser(receiver: Receiver) -> httptools.HttpRequestParser:
    parser = httptools.HttpRequestParser(receiver)
    if hasattr(parser, "set_dangerous_leniencies"):  # not before httptools 0.6.3
        # As uvicorn has it: whoever sends more after "connection: close" still gets its answer.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser
