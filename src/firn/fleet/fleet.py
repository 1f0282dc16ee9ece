"""Owns the state and the process of every model: loads them, unloads them, holds waiting requests.

placement.py makes the plans; this module carries them out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from firn.core.errors import (
    FirnError,
    ModelDied,
    ModelFailed,
    ModelNotReady,
    ModelTooLarge,
    ShuttingDown,
)
from firn.core.shares import Shares
from firn.core.values import Namespace
from firn.fleet import memory
from firn.fleet.catalogue import ModelCatalogue, ModelSpec
from firn.fleet.memory import Room
from firn.fleet.model import LoadWaiter, Model, ModelLease, ModelRun
from firn.fleet.placement import NEVER, FleetPlan, ModelState, PlacementRules, Reason, make_plan
from firn.fleet.process import Launch, Message, ModelProcess

log = logging.getLogger("firn.fleet")

STEADY_S = 60.0
"""A failure of a process that has lived longer than this counts as the first."""
MAX_RESTARTS = 5
"""Consecutive restarts of a model whose process died, while no request waits for it."""
END_S = 35.0
"""How long a process may take to write its records and end."""
KILL_S = 5.0
"""How long the system may take to end a process that was killed."""


class Fleet:
    """Owner of all models and their processes, on the asyncio thread. `run` is its main task."""

    def __init__(
        self,
        catalogue: ModelCatalogue,
        launch: Launch,
        folder: Path,
        *,
        memory_nbytes: int = 0,
        max_waiting: int = 256,
        rules: PlacementRules | None = None,
        measure: Callable[[int], Room] = memory.room,
        folder_of: Callable[[ModelSpec], Path | None] = lambda spec: None,
        charge: Callable[[Namespace, int], None] = lambda key_id, n_tokens: None,
    ) -> None:
        """max_waiting: requests of one key; each gets its share of twice that. folder: for the sockets.
        memory_nbytes: for all models together; 0: derived from the machine's memory. charge: called
        with the number of tokens computed for a caller."""
        self.catalogue = catalogue
        self._launch = launch
        self._folder = folder
        self._memory_nbytes = memory_nbytes
        self._places = Shares(2 * max_waiting)  # half of them for a key that is alone
        self._rules = rules or PlacementRules()
        self._measure = measure
        self._folder_of = folder_of
        self._charge = charge
        self.models: dict[str, Model] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._closing = False
        self._contests: set[frozenset[str]] = set()
        self._n_sockets = 0
        self._device_nbytes: float = math.inf
        """The GPU memory that the driver allows, once a process has reported it."""
        self.room = measure(memory_nbytes)
        for spec in catalogue:
            self.model(spec)

    def model(self, spec: ModelSpec) -> Model:
        """This model's state, created if it is new."""
        model = self.models.get(spec.name)
        if model is None:
            footprint = memory.estimate(self._folder_of(spec))
            model = Model(spec, footprint, self._wake.set)
            if spec.pinned:
                model.wanted_since = time.monotonic()
            self.models[spec.name] = model
        return model

    # --- for requests ----------------------------------------------------------------------

    def try_enter(self, model: Model) -> ModelLease | None:
        """A lease, if the model can accept a request now; None: wait for it."""
        if not model.is_open or model.child is None or model.child.exited.done():
            return None
        if any(other.traffic.waiters for other in self.models.values()):
            model.hold_share = 1.0  # it was right to keep it
        return model.enter()

    def peek(self, model: Model) -> ModelProcess | None:
        """Its process, for requests that do not count as use; None: it is not loaded."""
        return model.child if model.state is ModelState.LOADED else None

    def wait_for(self, model: Model, key_id: Namespace) -> LoadWaiter:
        """Queue for a lease. Raises ModelNotReady, ModelFailed, ModelTooLarge, ShuttingDown."""
        if self._closing:
            raise ShuttingDown()
        now = time.monotonic()
        error, not_before = model.attempts.error, model.attempts.not_before
        if isinstance(error, ModelFailed) and now < not_before:
            raise ModelFailed(model.spec.name, error.why, retry_after_s=math.ceil(not_before - now))
        need = model.footprint.nbytes
        if need > self.room.budget_nbytes:
            raise ModelTooLarge(model.spec.name, need, self.room.budget_nbytes)
        place = self._places.open(key_id)
        if not place.grow():
            raise self.not_ready(model, "too many requests are waiting for models to be loaded")
        waiter = LoadWaiter(now, asyncio.get_running_loop().create_future())
        waiter.lease.add_done_callback(lambda _: place.close())
        model.traffic.waiters.append(waiter)
        self._wake.set()
        return waiter

    def leave(self, model: Model, waiter: LoadWaiter) -> None:
        """Stop waiting, and release a lease that was granted meanwhile. Idempotent."""
        if waiter in model.traffic.waiters:
            model.traffic.waiters.remove(waiter)
            self._wake.set()
        if waiter.lease.done() and not waiter.lease.cancelled() and not waiter.lease.exception():
            waiter.lease.result().release(None)
        waiter.lease.cancel()

    def not_ready(self, model: Model, why: str) -> ModelNotReady:
        retry_s = max(1, min(math.ceil(model.load_s), 60))
        return ModelNotReady(
            f"The model {model.spec.name!r} is not loaded: {why}.", retry_after_s=retry_s
        )

    async def unload(self, model: Model) -> None:
        """Unload it once its replies have ended; returns when its memory is free.

        A pinned model is not loaded again until a request needs it.
        """
        model.wanted_since = NEVER
        model.unloading = model.state in (ModelState.LOADING, ModelState.LOADED)
        if model.state is ModelState.LOADING and model.child is not None:
            self._fail_waiters(model, self.not_ready(model, "it is being unloaded"))
            model.child.kill()
        self._wake.set()
        if model.state is not ModelState.UNLOADED:
            await model.unloaded.wait()

    # --- planning --------------------------------------------------------------------------

    async def run(self) -> None:
        """Until `close`, make and carry out a new plan whenever something has changed."""
        while not self._closing:
            self._wake.clear()
            if any(m.traffic.waiters or m.wanted_since < NEVER for m in self.models.values()):
                loop = asyncio.get_running_loop()
                self.room = await loop.run_in_executor(None, self._measure, self._memory_nbytes)
            plan = self._plan()
            self._act(plan)
            delay = None if plan.replan_at == NEVER else max(plan.replan_at - time.monotonic(), 0.0)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), delay)

    def _plan(self) -> FleetPlan:
        # Models that are being loaded have not allocated this yet.
        loading_nbytes = sum(
            m.footprint.nbytes for m in self.models.values() if m.state is ModelState.LOADING
        )
        if not self._memory_nbytes:
            budget = int(min(self.room.budget_nbytes, self._device_nbytes))
            self.room = replace(self.room, budget_nbytes=budget)
        room = replace(self.room, free_nbytes=self.room.free_nbytes - loading_nbytes)
        views = [model.view() for model in self.models.values()]
        return make_plan(views, room, self._rules, now=time.monotonic())

    def _act(self, plan: FleetPlan) -> None:
        for name in plan.check:
            self._start_checking(self.models[name])
        for name in plan.load:
            self._start_loading(self.models[name])
        for name in plan.held_in_vain:
            self.models[name].hold_share /= 2
        for name, reason in plan.unload:
            self._start_unloading(self.models[name], reason)
        for model in self.models.values():
            if model.unloading and model.state is ModelState.LOADED and not model.view().n_active:
                self._start_unloading(model, "asked")
            had_ended, model.turn_ended = model.turn_ended, model.spec.name in plan.close
            if had_ended and model.is_open:
                self._admit_waiters(model)
        for waiting, staying in plan.contested:
            pair = frozenset((waiting, staying))
            if pair not in self._contests:
                self._contests.add(pair)
                turn_s = self._rules.turn_s(self.models[staying].view())
                log.warning(
                    "%s and %s do not fit into memory together and both have requests: they take turns "
                    "of up to %.0f s (--model-memory-gb sets how much all models may use)",
                    staying,
                    waiting,
                    turn_s,
                )

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- checking --------------------------------------------------------------------------

    def _start_checking(self, model: Model) -> None:
        if not model.attempts.is_checking:
            model.attempts.is_checking = True
            log.info("checking %s before others are unloaded for it", model.spec.name)
            self._spawn(self._check(model))

    async def _check(self, model: Model) -> None:
        result: asyncio.Future[Message] = asyncio.get_running_loop().create_future()

        def on_message(message: Message) -> None:
            if not result.done():
                result.set_result(message)

        failed: Message = {"event": "failed", "message": "its process could not be started"}
        attempts = model.attempts
        try:
            checker = attempts.checker = await self._launch(
                model.spec, self._new_socket(), on_message, task="check"
            )
            either: set[asyncio.Future[Any]] = {result, checker.exited}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            failed = {"event": "failed", "message": _exit_text(checker)}
            checker.kill()
            await checker.exited
        except OSError as e:
            log.error("a process could not be started: %s", e.strerror or e)
        finally:
            attempts.checker, attempts.is_checking = None, False
        message = result.result() if result.done() else failed
        if message["event"] == "checked":
            attempts.is_proven = True
            self._wake.set()
        elif model.state is ModelState.UNLOADED and not self._closing:
            self._failed(model, str(message["message"]))

    def _new_socket(self) -> Path:
        self._n_sockets += 1
        return self._folder / f"{self._n_sockets}.sock"

    # --- loading ---------------------------------------------------------------------------

    def _start_loading(self, model: Model) -> None:
        """Sets the state immediately, so that the next plan sees it."""
        run = ModelRun(began=time.monotonic())
        model.state, model.run, model.wanted_since = ModelState.LOADING, run, NEVER
        model.unloaded.clear()
        log.info("loading %s", model.spec.name)
        self._spawn(self._load(model, run))

    async def _load(self, model: Model, run: ModelRun) -> None:
        spec = model.spec
        ready: asyncio.Future[Message] = asyncio.get_running_loop().create_future()

        def on_message(message: Message) -> None:
            if message["event"] in ("ready", "failed") and not ready.done():
                ready.set_result(message)
            else:
                self._on_message(model, run, message)

        try:
            child = await self._launch(spec, self._new_socket(), on_message)
        except OSError as e:
            self._failed(model, f"its process could not be started: {e.strerror or e}")
            return
        run.child = child
        either: set[asyncio.Future[Any]] = {ready, child.exited}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        message: Message = {"event": "failed", "message": _exit_text(child)}
        if ready.done():
            message = ready.result()
        if message["event"] == "failed":
            child.kill()
            await child.exited
            if model.unloading or self._closing:  # it was told to end
                self._has_no_process(model)
            else:
                self._failed(model, str(message["message"]))
            return
        model.details = message["model"]
        self._take_report(model, run, message["report"])
        self._loaded(model, run)
        code = await asyncio.shield(child.exited)
        self._ended(model, code)

    def _loaded(self, model: Model, run: ModelRun) -> None:
        now = time.monotonic()
        model.load_s, run.progress = now - run.began, ""
        model.state, model.loaded_at, model.traffic.last_used = ModelState.LOADED, now, now
        model.attempts.error, model.attempts.is_proven = None, True
        model.turn_ended = False
        model.n_loads += 1
        log.info("%s is loaded (%.1f s)", model.spec.name, model.load_s)
        self._admit_waiters(model)
        self._share_memory()
        self._wake.set()

    def _admit_waiters(self, model: Model) -> None:
        for waiter in model.traffic.take_waiters():
            waiter.lease.set_result(model.enter())

    def _has_no_process(self, model: Model) -> None:
        model.state, model.run = ModelState.UNLOADED, None
        model.turn_ended = model.unloading = False
        model.unloaded.set()
        self._wake.set()

    def _failed(self, model: Model, why: str) -> None:
        self._has_no_process(model)
        attempts = model.attempts
        attempts.is_proven, retry_s = False, attempts.back_off()
        attempts.error = ModelFailed(model.spec.name, why, retry_after_s=math.ceil(retry_s))
        log.error(
            "%s could not be loaded, next attempt in %.0f s: %s", model.spec.name, retry_s, why
        )
        self._fail_waiters(model, attempts.error)
        if model.spec.pinned:
            model.wanted_since = time.monotonic()

    def _fail_waiters(self, model: Model, error: FirnError) -> None:
        for waiter in model.traffic.take_waiters():
            waiter.lease.set_exception(error)

    # --- while it is loaded ----------------------------------------------------------------

    def _on_message(self, model: Model, run: ModelRun, message: Message) -> None:
        match message:
            case {"event": "report", "report": report}:
                self._take_report(model, run, report)
            case {"event": "progress", "text": text}:
                run.progress = str(text)
            case {"event": "ending"}:
                run.ending.set()

    def _take_report(self, model: Model, run: ModelRun, report: Mapping[str, Any]) -> None:
        for key_id, n_tokens in report["computed"].items():
            self._charge(Namespace(key_id), n_tokens - run.computed.get(key_id, 0))
            run.computed[key_id] = n_tokens
        self._device_nbytes = report["device_memory"]
        background = max(int(report["calls"]) - model.traffic.n_active, 0)
        before, model.footprint = model.footprint, memory.measured(report, model.footprint)
        if model.footprint != before or background != run.n_background:
            run.n_background = background
            self._share_memory()
            self._wake.set()

    def _share_memory(self) -> None:
        """Let each loaded model use what the others do not need."""
        in_memory = [m for m in self.models.values() if m.state is not ModelState.UNLOADED]
        total = sum(m.footprint.nbytes for m in in_memory)
        for model in in_memory:
            if model.state is ModelState.LOADED and model.child is not None:
                own = model.footprint
                free = self.room.budget_nbytes - (total - own.nbytes)
                nbytes = free - own.weights_nbytes - own.process_nbytes
                model.child.tell({"do": "capacity", "nbytes": max(nbytes, 0)})

    # --- unloading -------------------------------------------------------------------------

    def _start_unloading(self, model: Model, reason: Reason | str) -> None:
        """Tell the process to write its records and end. The model has no replies left."""
        assert model.run is not None
        assert model.run.child is not None
        log.info("unloading %s: %s", model.spec.name, _REASONS.get(reason, reason))
        model.state, model.turn_ended = ModelState.DRAINING, False
        model.n_unloads[reason] = model.n_unloads.get(reason, 0) + 1
        if reason == "room":
            model.displaced_at = time.monotonic()
        model.run.child.tell({"do": "stop", "drain_s": None})
        self._spawn(self._await_exit(model.run, model.run.child))

    async def _await_exit(self, run: ModelRun, child: ModelProcess) -> None:
        """Wait for background replies, however long they take, and then for the process to exit."""
        ending = asyncio.ensure_future(run.ending.wait())
        either: set[asyncio.Future[Any]] = {ending, child.exited}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        ending.cancel()
        await asyncio.wait({child.exited}, timeout=END_S)
        child.kill()

    def _ended(self, model: Model, code: int) -> None:
        """Called when the process of a loaded model has ended, on request or not."""
        was_told = model.state is ModelState.DRAINING
        lived_s = time.monotonic() - model.loaded_at
        self._has_no_process(model)
        model.traffic.uses.clear()
        attempts = model.attempts
        if not was_told and not self._closing:
            log.error(
                "the process of %s ended unexpectedly (%s): its running replies fail",
                model.spec.name,
                code_text(code),
            )
            attempts.n_failures = 0 if lived_s > STEADY_S else attempts.n_failures
            attempts.back_off()
            attempts.error = ModelDied(model.spec.name)
            if model.spec.pinned or attempts.n_failures <= MAX_RESTARTS:
                model.wanted_since = time.monotonic()
        elif was_told:
            attempts.n_failures, attempts.not_before = 0, 0.0
        self._share_memory()

    def drain(self) -> None:
        """Load nothing more. Waiting requests fail; running replies continue."""
        self._closing = True
        self._wake.set()
        for model in self.models.values():
            self._fail_waiters(model, ShuttingDown())

    def abort_replies(self) -> None:
        """End running replies with an error."""
        for model in self.models.values():
            if model.child is not None:
                model.child.tell({"do": "stop", "drain_s": 0.0})

    async def close(self) -> None:
        """End every process, in bounded time."""
        self.drain()
        self.abort_replies()
        attempts = [model.attempts for model in self.models.values()]
        checkers = [each.checker for each in attempts if each.checker is not None]
        for checker in checkers:
            checker.kill()
        children = [m.child for m in self.models.values() if m.child is not None] + checkers
        if children:
            await asyncio.wait({child.exited for child in children}, timeout=END_S)
        for child in children:
            child.kill()
        if children:
            await asyncio.wait({child.exited for child in children}, timeout=KILL_S)
        for task in self._tasks:
            task.cancel()


_REASONS: Mapping[str, str] = {
    "idle": "unused for its keep-alive time",
    "room": "another model needs the memory",
    "asked": "requested",
}


def _exit_text(child: ModelProcess) -> str:
    return (
        f"its process has ended ({code_text(child.exited.result())})" if child.exited.done() else ""
    )


def code_text(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
