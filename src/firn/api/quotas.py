"""Limits of one key: calls at a time, places in the queue, tokens a minute. Off unless set.

Tokens count when they are computed, prompt and reply; cached ones are free, as they take no time. The
bucket holds a minute's worth; a key that has used more must wait until it is refilled.
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
"""A guess: nobody knows when one of the key's calls will have ended."""


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """0: no such limit. queue_share: of the places in the queue, in (0, 1]."""

    concurrency: int = 0
    queue_share: float = 0.0
    tokens_per_minute: int = 0


class MeteredCall(Protocol):
    """What a quota must know of a call; `api.session.Session` is one."""

    @property
    def n_waiting(self) -> int:
        """Its requests that have no row yet."""
        ...

    @property
    def n_computed(self) -> int:
        """Tokens computed for it so far."""
        ...


@dataclass(slots=True, eq=False)
class _RunningCall:
    work: MeteredCall
    n_charged: int = 0


@dataclass(slots=True)
class _Account:
    """One key's account. tokens: left in its bucket at `as_of`; negative: what it owes."""

    tokens: float
    as_of: float
    calls: list[_RunningCall] = field(default_factory=list)
    n_computed: int = 0
    """Tokens, since the server started."""


class Quotas:
    """Owner: the app; on the asyncio thread. One account for each key that has called."""

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
    def call(self, own: Namespace, work: MeteredCall, *, n_requests: int = 1) -> Iterator[None]:
        """Around a call: it counts against its key while it runs. Raises KeyLimit; InvalidValue for
        one that could never run."""
        account = self._account(own)
        self._check(account, n_requests)
        call = _RunningCall(work)
        account.calls.append(call)
        try:
            yield
        finally:
            self._settle(account)
            account.calls.remove(call)

    def n_calls(self, own: Namespace) -> int:
        account = self._accounts.get(own)
        return len(account.calls) if account else 0

    def computed(self) -> dict[Namespace, int]:
        """Tokens computed for each key so far."""
        for account in self._accounts.values():
            self._settle(account)
        return {own: account.n_computed for own, account in self._accounts.items()}

    def charge(self, own: Namespace, n_tokens: int) -> None:
        """Charges tokens that another process has computed for this key."""
        account = self._account(own)
        self._settle(account)
        account.tokens -= n_tokens

    def _check(self, account: _Account, n_requests: int) -> None:
        limits = self._limits
        if limits.concurrency and len(account.calls) >= limits.concurrency:
            raise KeyLimit(
                f"This key has {len(account.calls)} calls running; {limits.concurrency} are the most.",
                retry_after_s=RETRY_S,
            )
        n_waiting = sum(call.work.n_waiting for call in account.calls)
        if self._max_waiting and n_requests > self._max_waiting:  # for ever, so no 429
            raise InvalidValue(
                "prompt",
                f"{n_requests} prompts at once are over the limit of {self._max_waiting} of a key",
            )
        if self._max_waiting and n_waiting + n_requests > self._max_waiting:
            raise KeyLimit(
                f"This key has {n_waiting} requests waiting; {self._max_waiting} are the most.",
                retry_after_s=RETRY_S,
            )
        if limits.tokens_per_minute:
            self._settle(account)
            if account.tokens <= 0:
                missing = 1 - account.tokens
                raise KeyLimit(
                    f"This key has used its {limits.tokens_per_minute} tokens a minute.",
                    retry_after_s=max(1, math.ceil(missing * 60 / limits.tokens_per_minute)),
                )

    def _account(self, own: Namespace) -> _Account:
        if own not in self._accounts:
            full = float(self._limits.tokens_per_minute)
            self._accounts[own] = _Account(full, self._clock())
        return self._accounts[own]

    def _settle(self, account: _Account) -> None:
        """Charges what was computed since the last time, and refills the bucket for the time passed."""
        for call in account.calls:
            n_computed = call.work.n_computed
            account.tokens -= n_computed - call.n_charged
            account.n_computed += n_computed - call.n_charged
            call.n_charged = n_computed
        now, rate = self._clock(), self._limits.tokens_per_minute
        filled = account.tokens + (now - account.as_of) * rate / 60
        account.tokens, account.as_of = min(filled, float(rate)), now
