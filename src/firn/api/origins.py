"""Who may change what is stored here: callers with a key, programs on this machine, and of all web pages
only the one that this server serves.

A page knows no key, but it can reach every server that its visitor can.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.types import Scope

from firn.api.exchange import exchange_of
from firn.api.hosts import is_from_browser
from firn.core.errors import Forbidden


def refuse_pages(scope: Scope, allowed: Sequence[str]) -> None:
    """Raises Forbidden for a page without a key, unless its origin is one that the operator allows.

    For routes without a body: for those with one the browser asks first (see `check_content_type`).
    """
    origins = [v.decode("latin-1") for name, v in scope["headers"] if name == b"origin"]
    known = bool(origins) and all("*" in allowed or origin in allowed for origin in origins)
    known = known or bool(exchange_of(scope).own_page)
    if is_from_browser(scope["headers"]) and not known and not exchange_of(scope).caller.has_key:
        raise Forbidden("A web page cannot do that here; see --allow-origin.")


def check_may_change_cache(scope: Scope) -> None:
    """Raises Forbidden."""
    caller = exchange_of(scope).caller
    if caller.has_key:
        return  # what it changes is its own
    if not caller.operator:
        raise Forbidden("The cache is changed from the server's own machine, or with a key.")
    if is_from_browser(scope["headers"]) and not exchange_of(scope).own_page:
        raise Forbidden("A web page cannot change the cache.")
