"""Which host names are this server's own, and which callers may change what is stored.

A web page can make its own name point to 127.0.0.1 and then talk to this server as if it were the
page's own (DNS rebinding). The browser still sends the page's name as Host, so the server answers
only to names that nobody else can own. It also answers to IP addresses: a page loaded from one of
those came from this server. What is stored may be changed by callers with a key, which a web page
does not know, and by programs on this machine.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable, Sequence

from starlette.types import Scope

from firn.api.http.exchange import exchange_of
from firn.core.errors import Forbidden, HostNotAllowed

RawHeaders = Iterable[tuple[bytes, bytes]]
EVERY = "*"
_HOST = re.compile(r"(?:(?P<name>[^\[\]:]*)|\[(?P<ipv6>[^\[\]]*:[^\[\]]*)\])(?::\d*)?")
OWN_NAMES = ("localhost", "host.docker.internal", "host.containers.internal")
"""The last two are this machine as seen from a container; nobody can register them."""
FORWARDED = frozenset({b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip", b"via"})


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


def machine_names(bound: str) -> tuple[str, ...]:
    """This machine's names at the address that the server listens on."""
    address = _address(bound)
    if address is None:
        return (bound,)
    if address.is_loopback:
        return ()
    name = socket.gethostname()
    first = name.partition(".")[0]
    return (name, first, f"{first}.local")


class Hosts:
    """The host names that the server answers to. Immutable."""

    def __init__(self, allowed: Iterable[str] = ()) -> None:
        names = [_normal(name) for name in (*OWN_NAMES, *allowed)]
        self._every = EVERY in names
        self._names = frozenset(name for name in names if not name.startswith("*."))
        self._suffixes = (".localhost", *(name[1:] for name in names if name.startswith("*.")))

    def allow(self, host: str) -> bool:
        """Whether the server answers to `host`, given as in the header, with or without a port."""
        return self._every or self._is_ours(_name_in(host))

    def is_own_page(self, headers: RawHeaders) -> bool:
        """Whether a browser sent this for one of our own pages: Origin and Host agree.

        The name must be one that nobody else can own, even if the server answers to every name: the
        two also agree for a page that made its own name point here.
        """
        values: dict[bytes, list[str]] = {b"host": [], b"origin": [], b"sec-fetch-site": []}
        for header, value in headers:
            if header in values:
                values[header].append(value.decode("latin-1").strip().lower())
        hosts, origins, sites = values.values()
        if len(hosts) != 1 or len(origins) > 1 or any(site != "same-origin" for site in sites):
            return False
        from_here = (f"http://{hosts[0]}", f"https://{hosts[0]}")
        same = origins[0] in from_here if origins else bool(sites)
        return same and self._is_ours(_name_in(hosts[0]))

    def _is_ours(self, name: str) -> bool:
        is_listed = name in self._names - {EVERY} or name.endswith(self._suffixes)
        return is_listed or _address(name) is not None

    def check(self, headers: RawHeaders) -> None:
        """Raises HostNotAllowed. A request without the header passes: it is not from a browser."""
        for header, value in headers:
            if header == b"host" and not self.allow(shown := value.decode("latin-1")):
                raise HostNotAllowed(shown.strip()[:100])


def is_local(scope: Scope) -> bool:
    """Whether the caller is a program on this machine that acts for itself.

    A proxy on this machine acts for others; the headers that it adds give it away.
    """
    client = scope.get("client")
    address = _address(client[0]) if client else None
    if address is None or any(name in FORWARDED for name, _ in scope["headers"]):
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def is_from_browser(headers: RawHeaders) -> bool:
    """Whether a web page sent this: browsers add these headers, and pages cannot prevent it."""
    return any(name == b"origin" or name.startswith(b"sec-fetch-") for name, _ in headers)


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _name_in(header: str) -> str:
    """The name or address of a Host header, without its port; empty if it is neither."""
    found = _HOST.fullmatch(header.strip())
    return _normal(found["name"] or found["ipv6"] or "") if found else ""


def _normal(name: str) -> str:
    return name.strip().lower().removesuffix(".")
