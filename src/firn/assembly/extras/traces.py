"""--record-trace: traffic is recorded, without text."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from firn.api.services import Services
from firn.assembly.extras import Extra
from firn.assembly.model import ServerSpec
from firn.config import Config, default_cache_dir
from firn.engine import Engine

if TYPE_CHECKING:
    from firn.traces.record import Recorder

log = logging.getLogger("firn")


class TraceRecording(Extra):
    """The file is opened before the model is loaded, so that a bad path is reported immediately."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._fd: int | None = None
        self._recorder: Recorder | None = None

    def begin(self) -> None:
        if self.config.log.record_trace is not None:
            from firn.traces.record import open_trace

            self._fd = open_trace(self.config.log.record_trace)

    def add_to(self, services: Services, spec: ServerSpec, engine: Engine[Any]) -> Services:
        if self._fd is None:
            return services
        from firn.traces.record import Recorder, user_salt

        log.info("recording a trace: %s", self.config.log.record_trace)
        self._recorder = Recorder(
            self._fd,
            model=engine.model.name,
            block=spec.config.cache.cache_block_tokens,
            token_nbytes=engine.parts.budget.cost.per_token_nbytes,
            salt=user_salt(default_cache_dir()),
        )
        return replace(services, telemetry=replace(services.telemetry, recorder=self._recorder))

    def close(self) -> None:
        if self._recorder is not None:
            self._recorder.close()


EXTRA = TraceRecording
