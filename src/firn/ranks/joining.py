"""How the ranks of one model find each other, and what they must agree on before they load it.

MLX connects them first (`mlx.launch` tells it where). Then rank 0 opens a port for calls and sends
its number to the others through MLX, together with a secret, so that nobody else can connect.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from firn import __version__
from firn.config import Config
from firn.core.errors import SetupError
from firn.ranks.calls import RankCall
from firn.ranks.follower import Follower
from firn.ranks.group import RankGroup
from firn.ranks.leader import Leader
from firn.ranks.wire import LinkClosed, RankLink, encode

log = logging.getLogger("firn.ranks")

JOIN_S = 600.0
"""How long ranks wait for each other: one may still be copying a model."""
CONNECT_S = 30.0
GREET_S = 5.0
"""How long a new connection may take to show the secret: it may be a stranger's."""
GREETING_NBYTES = 256
"""Size limit of that greeting: a rank, the secret and a version."""
RETRY_S = 0.1
"""Pause between two attempts to connect: rank 0's network may not be up yet."""
REFUSED = {
    "--adapter": ("model", "adapter"),
    "--draft-model": ("engine", "draft_model"),
    "--sparse-prefill": ("sparse", "sparse_prefill"),
    "--tier": ("cache", "tiers"),
}
"""Options that would make rank 0 do things the others are not told of, with section and field."""


@dataclass(frozen=True, slots=True)
class RankMember:
    """This process as one of the ranks: rank 0 has a leader, any other a follower."""

    group: RankGroup
    leader: Leader | None = None
    follower: Follower | None = None

    @property
    def text(self) -> str:
        """Part of the root of this rank's records, so that slices never mix."""
        return f"rank {self.group.rank} of {self.group.size}"

    def folder(self, location: Path) -> Path:
        """Where this rank keeps its records."""
        return location / f"rank-{self.group.rank}-of-{self.group.size}"


def check_options(config: Config) -> None:
    """Raises SetupError for options that sharded models do not support."""
    for flag, (section, field) in REFUSED.items():
        if getattr(getattr(config, section, None), field, None):
            raise SetupError(f"--tensor-parallel cannot be combined with {flag}")
    speculation = config.engine.speculation
    if speculation not in ("auto", "off"):
        raise SetupError(f"--tensor-parallel cannot be combined with --speculation {speculation}")


def form() -> RankMember:
    """Wait for all ranks and connect them. Raises SetupError."""
    joined = threading.Event()
    threading.Thread(target=_give_up, args=(joined,), daemon=True).start()
    group = RankGroup.join()
    if group.rank == 0:
        leader = _open(group)
        joined.set()
        log.info("all %d ranks are connected; rank 0 serves", group.size)
        return RankMember(group, leader=leader)
    follower = _connect(group)
    joined.set()
    return RankMember(group, follower=follower)


def _give_up(joined: threading.Event) -> None:
    """Exits if not all ranks join in time: MLX would wait forever."""
    if not joined.wait(JOIN_S):
        log.critical(
            "the ranks could not connect to each other within %.0f s: was firn started on every "
            "host?",
            JOIN_S,
        )
        os._exit(1)


def _open(group: RankGroup) -> Leader:
    host, secret = host_of_first(os.environ), secrets.token_hex(16)
    server = socket.create_server((host, 0), family=_family(host))
    server.settimeout(CONNECT_S)
    group.from_first(json.dumps([host, server.getsockname()[1], secret]).encode())
    links: dict[int, RankLink] = {}
    try:
        while len(links) < group.size - 1:
            link = RankLink(server.accept()[0])
            rank = _greeted(link, secret)
            if rank is None:
                link.close()
            else:
                links[rank] = link
    except TimeoutError:
        missing = sorted(set(range(1, group.size)) - set(links))
        raise SetupError(
            f"--tensor-parallel: rank {missing[0]} did not connect to rank 0 at {host}"
        ) from None
    finally:
        server.close()
    return Leader(links)


def _greeted(link: RankLink, secret: str) -> int | None:
    """The rank at the other end; None: it is not one of this group."""
    try:
        call = link.receive_within(GREET_S, max_nbytes=GREETING_NBYTES)
        rank, their_secret, version = call.args
        is_ours = hmac.compare_digest(str(their_secret).encode(), secret.encode())
    except (LinkClosed, ValueError, TypeError):
        return None
    if not is_ours:
        return None
    if version != __version__:
        raise SetupError(f"rank {rank} runs firn {version}, and rank 0 runs {__version__}")
    return int(rank)


def _connect(group: RankGroup) -> Follower:
    host, port, secret = json.loads(group.from_first(b""))
    until = time.monotonic() + CONNECT_S
    while True:
        try:
            sock = socket.create_connection((host, port), timeout=CONNECT_S)
            break
        except OSError as e:
            if time.monotonic() > until:
                raise SetupError(f"rank 0 cannot be reached at {host}:{port}: {e}") from e
            time.sleep(RETRY_S)
    link = RankLink(sock)
    link.send(encode(RankCall("hello", (group.rank, secret, __version__))))
    return Follower(group.rank, link)


def host_of_first(environ: Mapping[str, str]) -> str:
    """Rank 0's address as the other ranks know it, from the launcher's variables for MLX."""
    if address := environ.get("MLX_JACCL_COORDINATOR"):
        return _without_port(address)
    if host := environ.get("NCCL_HOST_IP"):
        return host
    if path := environ.get("MLX_HOSTFILE"):
        hosts: list[list[str]] = json.loads(Path(path).read_text(encoding="utf-8"))
        return _without_port(hosts[0][0])
    return _own_address()


def _without_port(address: str) -> str:
    return address.rsplit(":", 1)[0].strip("[]")


def _own_address() -> str:
    """The address of this machine's default route: with MPI, no variable names rank 0."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        try:
            s.connect(("192.0.2.1", 9))  # sends nothing, but chooses an interface
        except OSError:
            return "127.0.0.1"
        return str(s.getsockname()[0])


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def end_start(error: SetupError) -> NoReturn:
    """Print the error and exit: a normal exit may abort while MLX waits for ranks that are gone."""
    print(f"firn: {error}", file=sys.stderr, flush=True)
    os._exit(1)


# --- what they must agree on ---------------------------------------------------------------


def options_digest(config: Config) -> str:
    """A digest of the settings that all ranks must share. A section's repr contains no secrets."""
    text = repr((config.model, config.engine, config.cache))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def agree(own: Mapping[str, object], others: Mapping[int, Mapping[str, Any]]) -> None:
    """Raises a SetupError naming the first rank whose values differ from rank 0's."""
    for rank, theirs in sorted(others.items()):
        if theirs.get("error"):
            raise SetupError(f"rank {rank}: {theirs['error']}")
        for name, value in own.items():
            if theirs.get(name) != value:
                raise SetupError(f"rank {rank}'s {name} differ from rank 0's: all must be the same")
