"""Settings of the HTTP server: its address, its keys, who may call it and how much."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from firn.config.options import BadValue, option


def header_safe(key: str) -> str:
    """A key is sent in a header: visible ASCII only."""
    if not all("!" <= char <= "~" for char in key):
        raise BadValue("a key may contain visible ASCII characters only, and no spaces")
    return key


def origin(text: str) -> str:
    """An origin as a browser sends it: scheme and host, no path."""
    if text != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", text):
        raise BadValue(f"{text!r} is not an origin; write it like https://example.com")
    return text


def host_name(text: str) -> str:
    """A host name by which clients call the server: no scheme, no port."""
    if text != "*" and not re.fullmatch(r"(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?", text):
        raise BadValue(f"{text!r} is not a host name; write it like ai.example.com")
    return text


@dataclass(frozen=True, slots=True)
class ServerConfig:
    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 means every network.")
    port: int = option(8000, "Port to listen on; 0 picks any free one.", low=0, high=65535)
    served_model_name: str | None = option(
        None, "The model's name in the API (otherwise that of its folder or hub id)."
    )
    api_keys: tuple[str, ...] = option(
        (),
        "Key that clients must send; repeat it for several. Prefer the environment or a file: "
        "other users of the machine can see flags.",
        flag="--api-key",
        env="FIRN_API_KEYS",
        metavar="KEY",
        secret=True,
        check=header_safe,
    )
    """Every accepted key, those of `api_key_file` included. Empty: no authentication."""
    timeout: float = option(
        0.0, "Seconds that a request may take; 0 for no limit.", low=0, high=1_000_000
    )
    rate_limit: int = option(
        0,
        "Requests that a client (a key, or an address without keys) may send in a minute; 0 for no "
        "limit.",
        low=0,
        high=1_000_000,
    )
    api_key_file: Path | None = option(
        None, "File with more keys, one per line; # starts a comment.", metavar="FILE"
    )
    admin_keys: tuple[str, ...] = option(
        (),
        "Key of the operator, who sees the numbers of all keys; repeat it for several. Without any "
        "keys, every caller on this machine is the operator.",
        flag="--admin-key",
        env="FIRN_ADMIN_KEYS",
        metavar="KEY",
        secret=True,
        check=header_safe,
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        "Host name by which clients may call this server, in addition to localhost, addresses and "
        "the name it listens on (*.example.com, or * for any); repeat it for several.",
        flag="--allowed-host",
        env="FIRN_ALLOWED_HOSTS",
        metavar="NAME",
        check=host_name,
    )
    key_max_concurrency: int = option(
        0, "Calls that one key may have running; 0 for no limit.", low=0, high=1_000_000
    )
    key_queue_share: float = option(
        0.0, "Share of --max-queue that one key may use; 0 for no limit.", low=0, high=1
    )
    key_tokens_per_minute: int = option(
        0,
        "Tokens that may be computed for one key in a minute, of prompts and replies; cached ones do "
        "not count. 0 for no limit.",
        low=0,
        high=2**53,
    )
    allow_origins: tuple[str, ...] = option(
        (),
        "Origin of web pages that may call this server from a browser (https://example.com, or * "
        "for any); repeat it for several.",
        flag="--allow-origin",
        env="FIRN_ALLOW_ORIGINS",
        metavar="ORIGIN",
        check=origin,
    )
