"""When a server asks its extras."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from firn import app, kv_events
from firn.assembly.extras import Extra
from firn.assembly.extras.traces import TraceRecording
from firn.config import CacheConfig, Config, LogConfig, ModelConfig
from firn.core.errors import SetupError
from firn.core.fair_pool import FairPool
from firn.traces.record import Recorder
from tests.contracts.test_extras import services
from tests.traces.test_record import served


class Told(Extra):
    def __init__(self, calls: list[str]) -> None:
        super().__init__(Config())
        self.calls = calls

    def close(self) -> None:
        self.calls.append("extra")


def test_extras_end_before_the_engine() -> None:
    calls: list[str] = []
    engine = SimpleNamespace(stop=lambda timeout_s: calls.append("engine"))
    sharding = SimpleNamespace(end=lambda: calls.append("ranks"))
    own = services()
    server = app.Server(
        own,
        cast("Any", engine),
        own.event_router,
        FairPool(1, name="test"),
        [],
        extras=(Told(calls),),
        sharding=cast("Any", sharding),
    )
    server.close()
    assert calls == ["extra", "engine", "ranks"]


def test_a_trace_that_cannot_be_written_is_said_before_the_model_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("not JSON")
    config = Config(
        model=ModelConfig(path=str(tmp_path / "model")),
        log=LogConfig(record_trace=tmp_path / "none" / "trace"),
    )
    with pytest.raises(SetupError, match="trace"):
        app.build(config)


def test_a_trace_is_recorded_from_the_beginning_to_the_end(tmp_path: Path) -> None:
    extra = TraceRecording(Config(log=LogConfig(record_trace=tmp_path / "trace")))
    extra.begin()
    assert (tmp_path / "trace").exists()
    engine = SimpleNamespace(
        model=SimpleNamespace(name="m"),
        parts=SimpleNamespace(budget=SimpleNamespace(cost=SimpleNamespace(per_token_nbytes=1))),
    )
    spec = SimpleNamespace(config=Config())
    recorder = extra.add_to(services(), cast("Any", spec), cast("Any", engine)).telemetry.recorder
    assert isinstance(recorder, Recorder)
    recorder.record(served(range(3)))
    extra.close()
    assert recorder.n_dropped == 0
    recorder.record(served(range(3)))
    assert recorder.n_dropped == 1, "it is closed"
    assert b'"m"' in (tmp_path / "trace").read_bytes()


@pytest.mark.parametrize(("is_off", "watched"), [(False, ["tcp://a"]), (True, [])])
def test_a_cache_that_stores_is_watched(
    is_off: bool, watched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses: list[str] = []

    class Publisher:
        def __init__(self, address: str) -> None:
            addresses.append(address)

        def announce(self, event: object) -> None:
            pass

        def close(self) -> None:
            pass

    monkeypatch.setattr(kv_events, "EventPublisher", Publisher)
    cache = CacheConfig(disable_prefix_cache=is_off, no_ssd_cache=True, kv_events="tcp://a")
    app.build(Config(model=ModelConfig(path="firn-demo"), cache=cache)).close()
    assert addresses == watched
