"""The header x-session: which conversation a call belongs to, for routers that keep it on one server.

A client may name its conversation. If it does not, the name is derived from the beginning of the
conversation, so that every turn has the same name. The response carries it either way, and the next
request can send it. firn itself ignores it: the cache compares tokens, not names.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

from firn.core.values import Chat, GenerateRequest, Namespace

HEADER = b"x-session"
MAX_CHARS_PER_MESSAGE = 2000
"""Characters of each message that go into a derived name."""
_is_name = re.compile(rb"[\x21-\x7e]{1,128}").fullmatch


def conversation_of(
    headers: Iterable[tuple[bytes, bytes]], request: GenerateRequest, owner: Namespace
) -> str:
    """The name that the client sends, or a derived one.

    Empty if the client sends none and the request is not a chat, or has no user message.
    """
    for name, value in headers:
        if name == HEADER and _is_name(value):
            return value.decode("ascii")
    return _derive(request, owner)


def _derive(request: GenerateRequest, owner: Namespace) -> str:
    source = request.source
    if not isinstance(source, Chat):
        return ""
    digest = hashlib.blake2b(digest_size=12, person=b"firn-session")
    digest.update(owner.encode())
    for message in source.messages:
        digest.update(f"\0{message.role}\0".encode())
        digest.update(message.text[:MAX_CHARS_PER_MESSAGE].encode("utf-8", "surrogatepass"))
        if message.role == "user":
            return f"s-{digest.hexdigest()}"
    return ""
