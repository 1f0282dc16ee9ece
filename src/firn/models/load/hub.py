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
    from huggingface_hub.errors import LocalEntryNotFoundError

    _set_timeout(rules)
    try:
        if rules.offline:
            return Path(mlx_utils.hf_repo_to_path(name))
        return _download(name, rules.retries)
    except LocalEntryNotFoundError as e:
        raise _not_here(name, rules) from e
    except FileNotFoundError as e:
        raise SetupError(f"{name} is not complete on this machine: {first_line(e)}") from e
    except (_http().HTTPError, OSError, ValueError) as e:
        raise SetupError(f"{name} could not be fetched from the hub: {first_line(e)}") from e


def fetch_into(name: str, folder: Path, rules: HubRules) -> Path:
    """Download the model with this id into this folder instead of the hub's cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    def fetch() -> Path:
        snapshot_download(
            name,
            local_dir=folder,
            local_files_only=rules.offline,
            allow_patterns=mlx_utils.DEFAULT_ALLOW_PATTERNS,
        )
        return folder

    _set_timeout(rules)
    try:
        return _retried(name, fetch, rules.retries)
    except LocalEntryNotFoundError as e:
        raise _not_here(name, rules) from e
    except (_http().HTTPError, OSError, ValueError) as e:
        raise SetupError(f"{name} could not be fetched from the hub: {first_line(e)}") from e


def _set_timeout(rules: HubRules) -> None:
    from huggingface_hub import constants

    if rules.timeout_s is not None:
        constants.HF_HUB_DOWNLOAD_TIMEOUT = rules.timeout_s


def _not_here(name: str, rules: HubRules) -> SetupError:
    from huggingface_hub import constants

    by = "--offline" if rules.offline else "HF_HUB_OFFLINE" if constants.HF_HUB_OFFLINE else ""
    why = f"{by} forbids fetching it" if by else "the hub cannot be reached"
    return SetupError(f"{name} is not on this machine and {why}.")


def _download(name: str, retries: int) -> Path:
    return _retried(name, lambda: Path(mlx_utils._download(name)), retries)


def _retried(name: str, fetch: Callable[[], Path], retries: int) -> Path:
    pause_s = FIRST_PAUSE_S
    for attempt in range(retries + 1):
        try:
            return fetch()
        except Exception as e:
            if attempt == retries or not _broke_off(e, is_first=attempt == 0):
                raise
            log.warning(
                "the download of %s was interrupted (%s); resuming in %.0f s",
                name,
                first_line(e),
                pause_s,
            )
            time.sleep(pause_s)
            pause_s *= 2
    raise AssertionError("unreachable")


def _broke_off(error: Exception, *, is_first: bool) -> bool:
    """Whether another attempt may succeed. It resumes, so nothing is fetched twice.

    is_first: whether this was the first attempt, and so the hub may never have been reached.
    """
    from huggingface_hub.errors import (
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
    )

    http = _http()
    reason: BaseException | None = error
    is_missing = isinstance(error, LocalEntryNotFoundError)
    if is_missing:  # it says what is missing; its cause says why
        reason = error.__cause__
    if isinstance(reason, OfflineModeIsEnabled):
        return False
    if isinstance(reason, http.ConnectError):
        # In the middle of a file, the library raises the ConnectError itself.
        return not (is_first and is_missing)
    if isinstance(reason, HfHubHTTPError):
        status = int(reason.response.status_code)
        return status == 429 or status >= 500
    return isinstance(reason, (http.TransportError, ConnectionError, TimeoutError))


def _http() -> Any:
    """The HTTP library whose errors the hub's library raises: httpx, or httpx2 from its version 2 on."""
    from huggingface_hub.errors import HfHubHTTPError

    return importlib.import_module(HfHubHTTPError.__bases__[0].__module__.partition(".")[0])
