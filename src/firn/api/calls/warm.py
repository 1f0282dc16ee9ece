"""--warm-prompts: a JSON file of prompts to compute before the first request."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from firn.api.calls.session import Session
from firn.api.dialects import discover
from firn.api.http.auth import SHARED, Caller
from firn.api.services import Services
from firn.core.errors import FirnError, SetupError, ShuttingDown
from firn.core.events import Progress
from firn.core.values import PLAIN_DEFAULTS, Defaults, GenerateRequest, RawText, Sampling

log = logging.getLogger("firn.warm")


def read(path: Path, defaults: Defaults = PLAIN_DEFAULTS) -> list[GenerateRequest]:
    """The file's prompts, in order, as requests with these defaults. Raises SetupError."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise SetupError(f"{path} cannot be read as JSON: {e}") from e
    if not isinstance(entries, list):
        raise SetupError(f"{path} must be a JSON list of prompts")
    requests = []
    for i, entry in enumerate(entries):
        try:
            requests.append(_request(entry, defaults))
        except FirnError as e:
            raise SetupError(f"{path}: prompt {i}: {e.message}") from e
    return requests


def _request(entry: object, defaults: Defaults) -> GenerateRequest:
    if isinstance(entry, str):
        return GenerateRequest("", RawText(entry))
    body = {"messages": entry} if isinstance(entry, list) else entry
    if not isinstance(body, dict):
        raise SetupError("must be a string, a list of messages or an object with messages")
    chat = next(d for d in discover(defaults) if d.path == "/v1/chat/completions")
    (request,) = chat.decode(body, namespace=SHARED).requests
    return request


async def compute(services: Services, requests: Sequence[GenerateRequest]) -> None:
    """Run every prompt once for each namespace, so that its prefix is stored. Faults are logged."""
    jobs = [(r, ns) for r in requests for ns in services.access.keys.namespaces]
    for i, (request, namespace) in enumerate(jobs):
        label = f"warm prompt {i + 1} of {len(jobs)}"
        greedy = Sampling(temperature=0.0)
        short = replace(request.in_full(), max_tokens=1, n=1, sampling=greedy)
        session = Session(services, [short], id=f"warm-{i}", caller=Caller(namespace, namespace))
        try:
            with closing(session):
                await session.start()
                n_prompt = await _follow(session, label)
        except ShuttingDown:
            log.info(
                "shutting down: warm prompts %d to %d of %d skipped", i + 1, len(jobs), len(jobs)
            )
            return
        except FirnError as e:
            log.warning("%s failed: %s", label, e.message)
        else:
            log.info("%s: %d tokens stored", label, n_prompt)


async def _follow(session: Session, label: str) -> int:
    """The length of the prompt, once it is computed."""
    async for event in session.events():
        if isinstance(event, Progress):
            log.info("%s: %d of %d tokens computed", label, event.n_done, event.n_total)
    return session.progress.usage.n_prompt
