"""How the ranks of one model find each other, and what they must agree on before they load it.

MLX connects them first (`mlx.launch` says where). Then rank 0 opens a port for calls, and tells it to
the others through MLX, together with a secret: nobody else can speak there.
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
from firn.core.ranks import RankCall
from firn.models.ranks.group import RankGroup
from firn.ranks.follower import Follower
from firn.ranks.leader import Leader
from firn.ranks.wire import LinkClosed, RankLink, encode

log = logging.getLogger("firn.ranks")

JOIN_S = 600.0
"""How long ranks wait for each other: one may still be copying a model."""
CONNECT_S = 30.0
REFUSED = {
    "--adapter": ("model", "adapter"),
    "--draft-model": ("engine", "draft_model"),
    "--sparse-prefill": ("sparse", "sparse_prefill"),
    "--tier": ("cache", "tiers"),
}
"""Options that make rank 0 do what the others are not told of: section and field, where they exist."""


@dataclass(frozen=True, slots=True)
class RankMember:
    """This process among the ranks; it has one of the two ends."""

    group: RankGroup
    leader: Leader | None = None
    follower: Follower | None = None

    @property
    def text(self) -> str:
        """A part of what records say of themselves, so that slices never mix."""
        return f"rank {self.group.rank} of {self.group.size}"

    def folder(self, location: Path) -> Path:
        """Where this rank keeps its records."""
        return location / f"rank-{self.group.rank}-of-{self.group.size}"


def check_options(config: Config) -> None:
    """Raises SetupError for what does not go with sharded models."""
    for flag, (section, field) in REFUSED.items():
        if getattr(getattr(config, section, None), field, None):
            raise SetupError(f"--tensor-parallel does not go with {flag}")
    guesses = config.engine.speculation
    if guesses not in ("auto", "off"):
        raise SetupError(f"--tensor-parallel does not go with --speculation {guesses}")


def form() -> RankMember:
    """Wait for all ranks and connect them. Raises SetupError."""
    joined = threading.Event()
    threading.Thread(target=_give_up, args=(joined,), daemon=True).start()
    group = RankGroup.join()
    if group.rank == 0:
        leader = _open(group)
        joined.set()
        log.info("rank 0 of %d speaks for all", group.size)
        return RankMember(group, leader=leader)
    follower = _connect(group)
    joined.set()
    return RankMember(group, follower=follower)


def _give_up(joined: threading.Event) -> None:
    """MLX waits for ever for a rank that never comes."""
    if not joined.wait(JOIN_S):
        log.critical("the ranks did not find each other within %.0f s", JOIN_S)
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
        raise SetupError(f"--tensor-parallel: rank {missing[0]} does not reach {host}") from None
    finally:
        server.close()
    return Leader(links)


def _greeted(link: RankLink, secret: str) -> int | None:
    """The rank at the other end; None for a stranger."""
    try:
        call = link.receive()
        rank, said, version = call.args
    except (LinkClosed, ValueError, TypeError):
        return None
    if not hmac.compare_digest(str(said), secret):
        return None
    if version != __version__:
        raise SetupError(f"rank {rank} is firn {version}, and rank 0 is {__version__}")
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
            time.sleep(0.1)
    link = RankLink(sock)
    link.send(encode(RankCall("hello", (group.rank, secret, __version__))))
    return Follower(group.rank, link)


def host_of_first(environ: Mapping[str, str]) -> str:
    """Rank 0's address, as the other ranks know it: the launcher has told MLX."""
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
    """The one that leads out of this machine: where nobody has said, it is MPI that knows."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        try:
            s.connect(("192.0.2.1", 9))  # sends nothing, but chooses an interface
        except OSError:
            return "127.0.0.1"
        return str(s.getsockname()[0])


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def end_start(error: SetupError) -> NoReturn:
    """Say why, and end at once: MLX's threads may wait for ranks that have ended, and abort an exit."""
    print(f"firn: {error}", file=sys.stderr, flush=True)
    os._exit(1)


# --- what they must agree on ---------------------------------------------------------------


def options_digest(config: Config) -> str:
    """Secrets are no part of a section's repr."""
    text = repr((config.model, config.engine, config.cache))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def agree(own: Mapping[str, Any], others: Mapping[int, Mapping[str, Any]]) -> None:
    """Raises SetupError naming the rank that has something else."""
    for rank, theirs in sorted(others.items()):
        if theirs.get("error"):
            raise SetupError(f"rank {rank}: {theirs['error']}")
        for what, value in own.items():
            if theirs.get(what) != value:
                raise SetupError(f"rank {rank} has other {what} than rank 0")
