"""The S3 tier: one object for each record, in any store with S3's API, through obstore.

    s3://bucket/prefix?endpoint=https://...&region=...&deadline_s=5&write_mb_per_s=64

    <prefix>/<2 hex>/<name>.safetensors    the same bytes as a file of the SSD tier

A record is written once, by a put that fails if the name is taken; a store that ignores the condition
overwrites it with the same content. Objects are read whole. Stamps are not kept: let a lifecycle rule of
the bucket delete what is old. Credentials come from the environment or, if boto3 is installed, from
wherever the AWS tools find them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from firn.cache.storage.faults import Missing, PermanentFault, TierFault
from firn.cache.tiers import Buffer, FoundRecord, TierOptions
from firn.cache.tiers._backoff import CircuitBreaker
from firn.cache.tiers._store import StoreSettings, StoreTier, first_line
from firn.core.errors import SetupError

SCHEMES = ("s3",)
N_QUESTIONS_AT_ONCE = 16
"""Concurrent lookups: each request looks up one name."""
CONNECT_S = 2.0
LATE_SHARE = 0.9
"""A call that fails after this share of its time limit counts as too slow: obstore raises the same
class for all faults."""
OWN_SETTINGS = ("endpoint", "region", "anonymous")


class S3Client:
    """Implements _store.ObjectClient. Thread-safe."""

    def __init__(self, store: Any, library: Any, *, attempt_s: float) -> None:
        self._store = store
        self._attempt_s = attempt_s
        self._library = library
        self._pool = ThreadPoolExecutor(N_QUESTIONS_AT_ONCE, thread_name_prefix="firn-s3")
        self._is_conditional = True

    def get(self, name: str, n: int | None) -> memoryview:
        with self._translating():
            result = self._library.get(self._store, _path(name))
            data = memoryview(result.bytes())
            if len(data) != result.meta["size"]:
                raise TierFault("cut short", f"{len(data)} of {result.meta['size']} bytes")
            return data[:n]

    def find(self, names: Sequence[str]) -> Iterator[FoundRecord]:
        if len(names) == 1:
            heads: Iterator[FoundRecord | None] = map(self._head, names)
        else:
            heads = self._pool.map(self._head, names)
        return (head for head in heads if head is not None)

    def _head(self, name: str) -> FoundRecord | None:
        try:
            with self._translating():
                meta = self._library.head(self._store, _path(name))
        except Missing:
            return None
        return FoundRecord(name, meta["size"], meta["last_modified"].timestamp())

    def put(self, name: str, pieces: Sequence[Buffer], *, replace: bool) -> bool:
        data = _joined(pieces)

        def put(mode: str) -> None:
            path = _path(name)
            try:
                with self._translating():
                    self._library.put(self._store, path, data, mode=mode, use_multipart=False)
            except Missing as e:
                raise PermanentFault("no such bucket") from e

        if replace:
            put("overwrite")
            return True
        if self._is_conditional:
            try:
                put("create")
                return True
            except _Taken:
                return False
            except _Unsupported:
                self._is_conditional = False
        if self._head(name) is not None:
            return False
        put("overwrite")
        return True

    def touch(self, names: Sequence[str]) -> None:
        """Does nothing: S3 keeps no time of last use."""

    def delete(self, name: str) -> bool:
        was_there = self._head(name) is not None
        if was_there:
            with self._translating():
                self._library.delete(self._store, _path(name))
        return was_there

    @contextmanager
    def _translating(self) -> Iterator[None]:
        """What the library raises is raised as a tier's fault."""
        errors, began = self._library.exceptions, time.monotonic()
        try:
            yield
        except FileNotFoundError as e:
            raise Missing from e
        except errors.AlreadyExistsError as e:
            raise _Taken("taken") from e
        except errors.NotSupportedError as e:
            raise _Unsupported("not supported", first_line(e)) from e
        except (errors.PermissionDeniedError, errors.UnauthenticatedError) as e:
            raise PermanentFault("no permission", first_line(e)) from e
        except (errors.BaseError, OSError) as e:
            is_late = time.monotonic() - began > LATE_SHARE * self._attempt_s
            raise TierFault("too slow" if is_late else "store failed", first_line(e)) from e


class _Taken(TierFault):
    """The name is taken."""


class _Unsupported(TierFault):
    """The store has no conditional writes."""


def open_tier(options: TierOptions) -> StoreTier:
    """Raises SetupError."""
    settings = StoreSettings.of(options, OWN_SETTINGS)
    try:
        import obstore
        from obstore.store import S3Store
    except ImportError as e:
        raise SetupError(
            "--tier s3://... needs the package obstore: pip install 'firn[s3]'."
        ) from e
    where = urlsplit(options.location)
    if where.scheme != "s3" or not where.hostname:
        raise SetupError(f"--tier {options.location}: must be s3://bucket/prefix")
    endpoint = options.extra.get("endpoint") or _endpoint_of_environment()
    config: dict[str, Any] = {"virtual_hosted_style_request": endpoint is None}
    if endpoint:
        config["endpoint"] = endpoint
    if region := options.extra.get("region"):
        config["region"] = region
    if options.extra.get("anonymous", "").lower() in ("1", "true", "yes"):
        config["skip_signature"] = True
    else:
        config |= _credentials()
    attempt_s = timedelta(seconds=settings.deadline_s / 2)
    try:
        store = S3Store(
            where.netloc,
            prefix=where.path.strip("/") or None,
            client_options={
                "allow_http": bool(endpoint and endpoint.startswith("http://")),
                "timeout": attempt_s,
                "connect_timeout": min(timedelta(seconds=CONNECT_S), attempt_s),
            },
            retry_config={"max_retries": 0, "retry_timeout": attempt_s},
            **config,
        )
    except (obstore.exceptions.BaseError, ValueError, TypeError) as e:
        raise SetupError(f"--tier {options.location}: {first_line(e)}") from e
    return StoreTier(
        S3Client(store, obstore, attempt_s=settings.deadline_s / 2), settings, CircuitBreaker("s3")
    )


def _endpoint_of_environment() -> str | None:
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or None


def _credentials() -> dict[str, Any]:
    """obstore itself reads static credentials from the environment; boto3 finds all others."""
    if os.environ.get("AWS_ACCESS_KEY_ID"):
        return {}
    try:
        import boto3
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        return {}  # obstore finds roles of instances, containers and web identities by itself
    try:
        return {"credential_provider": Boto3CredentialProvider(boto3.Session())}
    except ValueError as e:
        raise SetupError(
            "--tier s3://...: no AWS credentials found; add ?anonymous=1 for a public bucket."
        ) from e


def _path(name: str) -> str:
    return f"{name[:2]}/{name}.safetensors"


def _joined(pieces: Sequence[Buffer]) -> memoryview:
    """All bytes in one buffer, for one put. Not a bytearray, which would be filled with zeros first."""
    views = [memoryview(piece).cast("B") for piece in pieces if memoryview(piece).nbytes]
    whole = np.empty(sum(view.nbytes for view in views), dtype=np.uint8)
    at = 0
    for view in views:
        whole[at : at + view.nbytes] = np.frombuffer(view, dtype=np.uint8)
        at += view.nbytes
    return whole.data
