"""Ollama's routes that add and remove models: pull, delete, copy, create.

A model is pulled by a process of its own, so the front imports no MLX, and one that its client no longer
waits for can be ended; the next pull resumes. Only the operator may do this: it fills the disk.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import shutil
import sys
import uuid
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from firn.api.http.exchange import exchange_of
from firn.api.http.fields import Fields
from firn.api.routes.ollama_fields import TAG
from firn.api.routes.openapi import error_responses
from firn.config import Config
from firn.core.errors import BadRequest, FirnError, Forbidden, InvalidValue, ModelNotFound
from firn.fleet.catalogue import ModelSpec
from firn.fleet.files import folder_of
from firn.fleet.fleet import Fleet
from firn.fleet.relay import Relay

log = logging.getLogger("firn.fleet")

PULL = (sys.executable, "-m", "firn", "pull")
REPORT_S = 1.0
"""Seconds between two lines of progress."""
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)


class PullFailed(FirnError):
    status = 502
    code = "pull_failed"


class Downloads:
    """The models of --models-dir, which pulls add and deletes remove. Owner: the front."""

    def __init__(self, fleet: Fleet, relay: Relay, config: Config) -> None:
        self._fleet = fleet
        self._relay = relay
        self._command = PULL
        self._models_dir = config.fleet.models_dir
        self._offline = config.model.offline

    def add_to(self, app: FastAPI) -> None:
        for path, method, endpoint, summary in (
            ("/api/pull", "POST", self.pull, "Download a model into --models-dir"),
            ("/api/delete", "DELETE", self.delete, "Remove a model of --models-dir"),
            ("/api/copy", "POST", self.copy, "Refused: --alias gives a model another name"),
            ("/api/create", "POST", self.create, "Refused: models are pulled, not made"),
        ):
            app.add_api_route(
                path, endpoint, methods=[method], summary=summary, responses=error_responses()
            )

    async def pull(self, request: Request) -> Response:
        name, body = await self._named(request)
        spec = self._fleet.catalogue.find(name)
        is_here = spec is not None and folder_of(spec) is not None
        command = None if is_here else self._command_for(name, spec)
        frames = self._pull(name, command)
        if not body.boolean("stream", True):
            return JSONResponse([frame async for frame in frames][-1])
        return StreamingResponse(_lines(frames), media_type="application/x-ndjson")

    def _command_for(self, name: str, spec: ModelSpec | None) -> tuple[str, ...]:
        """Raises BadRequest, ModelNotFound."""
        if self._offline:
            raise BadRequest(f"{name} is not on this machine and --offline forbids fetching it.")
        if spec is not None:
            return (*self._command, spec.path)
        if self._models_dir is None:
            served = ", ".join(spec.name for spec in self._fleet.catalogue)
            raise ModelNotFound(name[:200], f"{served}; with --models-dir it could pull others")
        if not _HUB_ID.fullmatch(name):
            raise InvalidValue("model", "must be the id of a model on the hub (owner/name)")
        return (*self._command, name, "--models-dir", str(self._models_dir))

    async def _pull(
        self, name: str, command: tuple[str, ...] | None
    ) -> AsyncIterator[Mapping[str, str]]:
        """The lines of Ollama's answer. Raises PullFailed."""
        if command is not None:
            process = await asyncio.create_subprocess_exec(
                *command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
            )
            errors = asyncio.create_task(_tail(process))
            try:
                while not errors.done():
                    yield {"status": f"pulling {name}"}
                    await asyncio.wait([errors], timeout=REPORT_S)
            finally:
                if process.returncode is None and not errors.done():
                    process.kill()
            if await process.wait():
                raise PullFailed(errors.result() or f"{name} could not be pulled.")
            self._fleet.catalogue.rescan()
            log.info("%s was pulled", name)
        yield {"status": "success"}

    async def delete(self, request: Request) -> Response:
        name, _ = await self._named(request)
        model = self._relay.find(name)
        if model.spec.name != name:  # an alias, or a stand-in for the default model
            raise ModelNotFound(name[:200], model.spec.name)
        folder = Path(model.spec.path)
        if self._models_dir is None or self._models_dir not in folder.parents:
            raise BadRequest(
                f"{name} is not in --models-dir: it was named when the server started."
            )
        gone = self._models_dir / f".deleted-{uuid.uuid4().hex}"
        folder.rename(gone)  # from now on nobody finds it
        self._fleet.catalogue.rescan()
        await self._fleet.unload(model)
        await asyncio.to_thread(_remove, gone)
        log.info("%s was deleted", name)
        return Response()

    async def copy(self, request: Request) -> Response:
        await self._named(request, "source")
        raise BadRequest("Models are not copied here; --alias NAME=MODEL gives one another name.")

    async def create(self, request: Request) -> Response:
        await self._named(request)
        raise BadRequest("Models are not made here; pull one in MLX's format from the hub.")

    async def _named(self, request: Request, field: str = "model") -> tuple[str, Fields]:
        """The model that the body names, and the body. Raises Forbidden, BadRequest."""
        if not exchange_of(request.scope).caller.operator:
            raise Forbidden("Only the operator of this server may add and remove models.")
        given, _ = await self._relay.body(request.scope, request.receive, Fields)
        name = given.string(field) or given.string("name")
        if not name:
            raise InvalidValue(field, "is required")
        return name.removesuffix(TAG), given


async def _lines(frames: AsyncIterator[Mapping[str, str]]) -> AsyncIterator[bytes]:
    try:
        async for frame in frames:
            yield json.dumps(frame).encode() + b"\n"
    except FirnError as error:
        yield json.dumps({"error": error.message}).encode() + b"\n"


async def _tail(process: asyncio.subprocess.Process) -> str:
    """The last line of what the process says is wrong."""
    assert process.stderr is not None
    last = b""
    while piece := await process.stderr.read(1 << 16):
        last = (last + piece)[-2000:]
    lines = [line for line in re.split(rb"[\r\n]+", last) if line.startswith(b"firn: ")]
    return lines[-1].decode(errors="replace").removeprefix("firn: ") if lines else ""


def _remove(folder: Path) -> None:
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder, ignore_errors=True)
