"""The Hugging Face hub: finds a model's folder in its cache on this machine, or downloads it."""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_lm import utils as mlx_utils

from firn.core.errors import SetupError
from firn.models.faults import first_line

log = logging.getLogger("firn.models")

FIRST_PAUSE_S = 1.0
"""Pause before a broken download is resumed; doubled each time."""


@dataclass(frozen=True, slots=True)
class HubRules:
    """offline: nothing is downloaded. timeout_s: how long to wait for data; None for the hub
    library's own limit. retries: how often a broken download is resumed."""

    offline: bool = False
    timeout_s: int | None = None
    retries: int = 3


def folder_of(name: str, rules: HubRules) -> Path:
    """The folder of the model with this id; downloads what is missing (progress bars on stderr)."""
    from huggingface_hub import constants
    from huggingface_hub.errors import LocalEntryNotFoundError

    if rules.timeout_s is not None:
        constants.HF_HUB_DOWNLOAD_TIMEOUT = rules.timeout_s
    try:
        if rules.offline:
            return Path(mlx_utils.hf_repo_to_path(name))
        return _download(name, rules.retries)
    except LocalEntryNotFoundError as e:
        by = "--offline" if rules.offline else "HF_HUB_OFFLINE" if constants.HF_HUB_OFFLINE else ""
        why = f"{by} forbids fetching it" if by else "the hub cannot be reached"
        raise SetupError(f"{name} is not on this machine and {why}.") from e
    except FileNotFoundError as e:
        raise SetupError(f"{name} is not complete on this machine: {first_line(e)}") from e
    except (_http().HTTPError, OSError, ValueError) as e:
        raise SetupError(f"{name} could not be fetched from the hub: {first_line(e)}") from e


def fetch_into(name: str, folder: Path, rules: HubRules) -> Path:
    """Download the model with this id into this folder instead of the hub's cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    def fetch() -> Path:
        snapshot_download(name, local_dir=folder, allow_patterns=mlx_utils.DEFAULT_ALLOW_PATTERNS)
        return folder

    try:
        return _retried(name, fetch, rules.retries)
    except LocalEntryNotFoundError as e:
        raise SetupError(f"{name}: the hub cannot be reached.") from e
    except (_http().HTTPError, OSError, ValueError) as e:
        raise SetupError(f"{name} could not be fetched from the hub: {first_line(e)}") from e


def _download(name: str, retries: int) -> Path:
    return _retried(name, lambda: Path(mlx_utils._download(name)), retries)


def _retried(name: str, fetch: Callable[[], Path], retries: int) -> Path:
    pause_s = FIRST_PAUSE_S
    for attempt in range(retries + 1):
        try:
            return fetch()
        except Exception as e:
            if attempt == retries or not _broke_off(e):
                raise
            log.warning(
                "the download of %s broke off (%s); resuming in %.0f s",
                name,
                first_line(e),
                pause_s,
            )
            time.sleep(pause_s)
            pause_s *= 2
    raise AssertionError("unreachable")


def _broke_off(error: Exception) -> bool:
    """Whether another attempt may succeed. It resumes, so nothing is fetched twice."""
    from huggingface_hub.errors import (
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
    )

    http = _http()
    reason: BaseException | None = error
    if isinstance(error, LocalEntryNotFoundError):  # it says what is missing; its cause says why
        reason = error.__cause__
    if isinstance(reason, (http.ConnectError, OfflineModeIsEnabled)):
        return False  # the hub was not reached at all
    if isinstance(reason, HfHubHTTPError):
        status = int(reason.response.status_code)
        return status == 429 or status >= 500
    return isinstance(reason, (http.TransportError, ConnectionError, TimeoutError))


def _http() -> Any:
    """The HTTP library whose errors the hub's library raises: httpx, or httpx2 from its version 2 on."""
    from huggingface_hub.errors import HfHubHTTPError

    return importlib.import_module(HfHubHTTPError.__bases__[0].__module__.partition(".")[0])
