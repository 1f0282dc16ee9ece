"""A model's process: serves one model on a private socket, for the front only.

Run as `python -m firn.fleet.worker FD`. The task and the settings, including API keys, arrive on
standard input; reports are written to FD. End of input means that the front is gone: this process
writes its records and ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvloop

from firn import app, backends
from firn.api.calls import warm
from firn.api.http.connections import ConnectionLimits, Connections, http_config
from firn.api.http.hosts import EVERY, Hosts
from firn.api.routes.models import model_object
from firn.api.server import create_app
from firn.api.services import Services
from firn.assembly.cache import FLUSH_S
from firn.backends.memory import active_nbytes
from firn.config import Config
from firn.core.errors import FirnError, ShuttingDown
from firn.core.memory_plan import MIN_CAPACITY_NBYTES
from firn.core.values import GenerateRequest
from firn.engine import EngineParts
from firn.fleet.catalogue import ModelSpec, from_json
from firn.fleet.files import folder_of
from firn.fleet.memory import estimate
from firn.fleet.vouching import VouchedKeys, vouched
from firn.host.machine import raise_descriptor_limit
from firn.host.shutdown import end, exit_or_return, kill_after
from firn.listener import Uvicorn
from firn.logs import configure as configure_logs

log = logging.getLogger("firn.fleet")

REPORT_S = PROGRESS_S = 0.5
DRAIN_POLL_S = 0.02
"""How often to check whether the last reply has ended: nothing signals that."""
STARTUP_POLL_S = 0.005
"""How often to check whether the socket listens: uvicorn does not signal it, and a client waits."""
LEAVE_S = FLUSH_S + app.STOP_S + 5.0
LIMITS = ConnectionLimits(max_open=1 << 20, max_heads=1 << 20)
"""The front limits connections; a second limit here would only refuse what it let in."""


class FrontLink:
    """The two pipes to the front. `tell`: any thread. Orders arrive on a thread of their own."""

    def __init__(self, fd: int) -> None:
        self.orphaned = False
        """The front is gone."""
        self._out = os.fdopen(fd, "wb", buffering=0)
        self._lock = threading.Lock()
        self._handler: Callable[[Mapping[str, Any] | None], None] = _end_at_once
        self._orders = _orders(sys.stdin.fileno())

    def first_order(self) -> Mapping[str, Any]:
        """Task, settings and socket. Exits if the front is already gone."""
        order = next(self._orders, None)
        if order is None:
            raise SystemExit(1)
        return order

    def listen(self) -> None:
        threading.Thread(target=self._listen, name="firn-link", daemon=True).start()

    def _listen(self) -> None:
        for order in self._orders:
            self._handler(order)
        self.orphaned = True
        self._handler(None)

    def on_order(self, handler: Callable[[Mapping[str, Any] | None], None]) -> None:
        """Set the handler of orders; it runs on the link's thread. None: the front is gone."""
        self._handler = handler

    def tell(self, event: str, **details: Any) -> None:
        line = json.dumps({"event": event, **details}).encode() + b"\n"
        with self._lock, contextlib.suppress(OSError):  # the front is gone
            self._out.write(line)


def _orders(fd: int) -> Iterator[Mapping[str, Any]]:
    """Lines of JSON until the end of input.

    Reads the descriptor directly: a thread waiting in Python's buffered reader would hold its lock,
    and the interpreter could not exit.
    """
    rest = b""
    while piece := os.read(fd, 1 << 16):
        *lines, rest = (rest + piece).split(b"\n")
        yield from map(json.loads, lines)


def _end_at_once(order: Mapping[str, Any] | None) -> None:
    """The handler while the model is being loaded: there is nothing to save, whatever the order."""
    os._exit(1)


def main() -> int:
    link = FrontLink(int(sys.argv[1]))
    order = link.first_order()
    config = from_json(json.dumps(order["config"]))
    name = config.server.served_model_name or config.model.path
    configure_logs(config.log.level, tag=name)
    raise_descriptor_limit()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    link.listen()
    try:
        if order["task"] == "check":
            app.check(config)
            link.tell("checked")
            return exit_or_return(0)
        prompts = app.warm_prompts(config)
        with _progress(link, ModelSpec(name, config)):
            server = app.build(config, front=os.getppid())
            server.own_process()
    except FirnError as error:
        link.tell("failed", message=" ".join(error.message.split()))
        return exit_or_return(1)
    path = Path(order["socket"])
    try:
        code = uvloop.run(_run(server, _services(server, config), path, prompts, link))
    finally:
        server.close()
    if link.orphaned:  # the front cannot remove the socket any more
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            path.parent.rmdir()
    return exit_or_return(code)


@contextlib.contextmanager
def _progress(link: FrontLink, spec: ModelSpec) -> Iterator[None]:
    """Report how much of the weights is in memory while the model is being loaded."""
    n_weights = max(estimate(folder_of(spec)).weights_nbytes, 1)
    done = threading.Event()

    def tell() -> None:
        while not done.wait(PROGRESS_S):
            share = min(active_nbytes() / n_weights, 0.99)
            link.tell("progress", text=f"{share:.0%}")

    thread = threading.Thread(target=tell, name="firn-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _services(server: app.Server, config: Config) -> Services:
    """The server's services, for callers that the front vouches for."""
    keys = VouchedKeys(
        config.server.api_keys, admin=config.server.admin_keys, share=config.cache.share_cache
    )
    access = replace(server.services.access, keys=keys, hosts=Hosts((EVERY,)))
    return replace(server.services, access=access, any_name=True)


class _SocketServer(Uvicorn):
    """Listens on one Unix socket that only this user can open."""

    def __init__(self, *args: Any, path: Path) -> None:
        super().__init__(*args)
        self._path = path

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        config = self.config
        # With a umask instead of chmod, the file has this mode from the moment it exists.
        mask = os.umask(0o177)
        try:
            server = await asyncio.get_running_loop().create_unix_server(
                lambda: config.http_protocol_class(  # type: ignore[call-arg]
                    config=config, server_state=self.server_state, app_state={}
                ),
                path=str(self._path),
                backlog=config.backlog,
            )
        finally:
            os.umask(mask)
        self.servers = [server]
        self.started = True


async def _run(
    server: app.Server,
    services: Services,
    path: Path,
    prompts: list[GenerateRequest],
    link: FrontLink,
) -> int:
    web = _SocketServer(
        http_config(
            vouched(create_app(services)),
            Connections(LIMITS),
            lifespan="off",
            timeout_graceful_shutdown=int(app.STOP_S),
        ),
        path=path,
    )
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()

    def stop(drain_s: float | None) -> None:
        """Let replies end, but cut them off after `drain_s`; None: wait however long they take."""
        server.event_router.drain()
        stopping.set()
        if drain_s is not None:
            kill_after(drain_s + LEAVE_S)
            loop.call_later(drain_s, server.event_router.fail_all, ShuttingDown())

    def obey(order: Mapping[str, Any] | None) -> None:
        match order:
            case None:
                log.warning("the front process is gone: this model's process exits")
                kill_after(LEAVE_S)
                loop.call_soon_threadsafe(stop, 0.0)
            case {"do": "stop", "drain_s": drain_s}:
                loop.call_soon_threadsafe(stop, drain_s)
            case {"do": "capacity", "nbytes": nbytes}:
                capacity = max(min(nbytes, own_capacity), MIN_CAPACITY_NBYTES)
                server.engine.call(lambda parts: parts.set_capacity(capacity))

    own_capacity = server.engine.parts.budget.capacity_nbytes
    link.on_order(obey)
    loop.add_signal_handler(signal.SIGTERM, stop, app.DRAIN_S)
    watching = asyncio.create_task(app.watch(server, web))
    await warm.compute(services, prompts)
    reports = asyncio.create_task(_report(server, services, web, link))
    ending = asyncio.create_task(_end_when_idle(server, web, stopping, link))
    await web.serve(sockets=[])
    for task in (watching, reports, ending):
        task.cancel()
    return 1 if server.died else 0


async def _end_when_idle(
    server: app.Server, web: Uvicorn, stopping: asyncio.Event, link: FrontLink
) -> None:
    await stopping.wait()
    while server.event_router.n_calls:  # including background replies
        await asyncio.sleep(DRAIN_POLL_S)
    kill_after(LEAVE_S)
    link.tell("ending")
    web.should_exit = True


# --- reports -------------------------------------------------------------------------------


async def _report(server: app.Server, services: Services, web: Uvicorn, link: FrontLink) -> None:
    """Report `ready` once the socket listens, and then every change."""
    while not web.started:
        await asyncio.sleep(STARTUP_POLL_S)
    peak, last, device_nbytes = 0, None, backends.find().memory.total_nbytes
    message: dict[str, Any] = {"event": "ready", "model": model_object(services)}
    while True:
        report = await asyncio.wrap_future(server.engine.call(_measure))
        peak = max(peak, report.pop("live"))
        report = {**report, "live_peak": peak, "calls": server.event_router.n_calls}
        report["weights"] = server.engine.model.weights_nbytes
        report["device_memory"] = device_nbytes
        report["computed"] = services.access.quotas.computed()
        if report != last:
            link.tell(**message, report=report)
        message, last = {"event": "report"}, report
        await asyncio.sleep(REPORT_S)


def _measure(parts: EngineParts) -> dict[str, Any]:
    """On the engine thread."""
    view = parts.budget.view()
    return {
        "live": max(parts.runner.live_nbytes(), parts.budget.reserved_nbytes),
        "bytes_per_token": view["bytes_per_token"],
        "bytes_per_row": view["bytes_per_row"],
    }


if __name__ == "__main__":
    end(main())
