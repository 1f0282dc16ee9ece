"""Who may change what is stored: callers with a key, programs on this machine, and no web pages but
this server's own.

A web page knows no key, but it can reach every server that its visitor can.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.types import Scope

from firn.api.exchange import exchange_of
from firn.api.hosts import is_from_browser
from firn.core.errors import Forbidden


def refuse_foreign_pages(scope: Scope, allowed: Sequence[str]) -> None:
    """Raises Forbidden for a page without a key, unless the operator allows its origin.

    For routes without a body. With one, the browser sends a preflight (see `check_content_type`).
    """
    origins = [v.decode("latin-1") for name, v in scope["headers"] if name == b"origin"]
    is_allowed = bool(origins) and all("*" in allowed or origin in allowed for origin in origins)
    is_allowed = is_allowed or bool(exchange_of(scope).own_page)
    has_key = exchange_of(scope).caller.has_key
    if is_from_browser(scope["headers"]) and not is_allowed and not has_key:
        raise Forbidden("A web page from another origin cannot do that; see --allow-origin.")


def check_may_change_cache(scope: Scope) -> None:
    """Raises Forbidden if this caller may not change the cache."""
    caller = exchange_of(scope).caller
    if caller.has_key:
        return  # it can change only its own records
    if not caller.operator:
        raise Forbidden(
            "The cache can be changed only from the server's own machine, or with a key."
        )
    if is_from_browser(scope["headers"]) and not exchange_of(scope).own_page:
        raise Forbidden("A web page from another origin cannot change the cache.")
