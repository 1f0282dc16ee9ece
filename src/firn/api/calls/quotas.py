"""Limits per key: calls at a time, places in the queue, tokens per minute. Off unless set.

Tokens of prompts and replies count if they are computed; cached ones are free. A key's bucket holds
a minute's worth of tokens; a key that has used them up must wait until the bucket is above zero
again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from firn.core.errors import InvalidValue, KeyLimit
from firn.core.values import Namespace

RETRY_S = 1
"""A guess: nobody knows when one of the key's calls will end."""


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """0: no such limit. queue_share: a key's share of the places in the queue, in (0, 1]."""

    concurrency: int = 0
    queue_share: float = 0.0
    tokens_per_minute: int = 0


class MeteredCall(Protocol):
    """What a quota must know about a call; `api.calls.progress.CallProgress` implements it."""

    @property
    def n_waiting(self) -> int:
        """Its requests that have no row yet."""
        ...

    @property
    def n_computed(self) -> int:
        """Tokens computed for it so far."""
        ...


@dataclass(slots=True, eq=False)
class FixedMeter:
    """For calls that never queue. Its owner sets n_computed, or another process charges the key."""

    n_waiting: int = 0
    n_computed: int = 0


@dataclass(slots=True, eq=False)
class _RunningCall:
    meter: MeteredCall
    n_charged: int = 0


@dataclass(slots=True)
class _Account:
    """One key's account. tokens: what its bucket held at `as_of`; negative: it is overdrawn."""

    tokens: float
    as_of: float
    calls: list[_RunningCall] = field(default_factory=list)
    n_computed: int = 0
    """Tokens computed for it since the server started."""


class Quotas:
    """One account for each key that has called. Owner: the app, on the asyncio thread."""

    def __init__(
        self,
        limits: KeyLimits | None = None,
        *,
        max_queue: int = 256,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits or KeyLimits()
        share = self._limits.queue_share
        self._max_waiting = max(1, int(share * max_queue)) if share else 0
        self._clock = clock
        self._accounts: dict[Namespace, _Account] = {}

    @contextmanager
    def call(self, key_id: Namespace, meter: MeteredCall, *, n_requests: int = 1) -> Iterator[None]:
        """Count a call against its key while it runs. Raises KeyLimit; InvalidValue if it could
        never run."""
        account = self._account(key_id)
        self._check(account, n_requests)
        call = _RunningCall(meter)
        account.calls.append(call)
        try:
            yield
        finally:
            self._settle(account)
            account.calls.remove(call)

    def n_calls(self, key_id: Namespace) -> int:
        account = self._accounts.get(key_id)
        return len(account.calls) if account else 0

    def computed(self) -> dict[Namespace, int]:
        """Tokens computed for each key so far."""
        for account in self._accounts.values():
            self._settle(account)
        return {key_id: account.n_computed for key_id, account in self._accounts.items()}

    def charge(self, key_id: Namespace, n_tokens: int) -> None:
        """Charge tokens that another process has computed for this key."""
        account = self._account(key_id)
        self._settle(account)
        account.tokens -= n_tokens

    def _check(self, account: _Account, n_requests: int) -> None:
        limits = self._limits
        if limits.concurrency and len(account.calls) >= limits.concurrency:
            raise KeyLimit(
                f"This key has {len(account.calls)} calls running; its limit is "
                f"{limits.concurrency}.",
                retry_after_s=RETRY_S,
            )
        n_waiting = sum(call.meter.n_waiting for call in account.calls)
        if (
            self._max_waiting and n_requests > self._max_waiting
        ):  # not a 429: waiting would not help
            raise InvalidValue(
                "prompt",
                f"{n_requests} prompts in one request exceed this key's limit of "
                f"{self._max_waiting}",
            )
        if self._max_waiting and n_waiting + n_requests > self._max_waiting:
            raise KeyLimit(
                f"This key has {n_waiting} requests waiting; its limit is {self._max_waiting}.",
                retry_after_s=RETRY_S,
            )
        if limits.tokens_per_minute:
            self._settle(account)
            if account.tokens <= 0:
                missing = 1 - account.tokens
                raise KeyLimit(
                    f"This key has used its {limits.tokens_per_minute} tokens per minute.",
                    retry_after_s=max(1, math.ceil(missing * 60 / limits.tokens_per_minute)),
                )

    def _account(self, key_id: Namespace) -> _Account:
        if key_id not in self._accounts:
            full = float(self._limits.tokens_per_minute)
            self._accounts[key_id] = _Account(full, self._clock())
        return self._accounts[key_id]

    def _settle(self, account: _Account) -> None:
        """Charge what was computed since the last time, and refill the bucket for the time passed."""
        for call in account.calls:
            n_computed = call.meter.n_computed
            account.tokens -= n_computed - call.n_charged
            account.n_computed += n_computed - call.n_charged
            call.n_charged = n_computed
        now, rate = self._clock(), self._limits.tokens_per_minute
        filled = account.tokens + (now - account.as_of) * rate / 60
        account.tokens, account.as_of = min(filled, float(rate)), now
