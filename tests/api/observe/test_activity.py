"""/v1/activity: what is shown of running calls, and to whom."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from firn.api.calls.progress import CallProgress
from firn.api.http.auth import Caller, Keys
from firn.api.http.exchange import Exchange
from firn.api.observe import activity
from firn.api.observe.activity import Activity, _Watcher
from firn.core.reuse import Cause, Reason
from firn.core.values import Namespace, Usage
from tests.api.live import Live, serve
from tests.api.observe.watchers import SHARE, check_that_watchers_are_limited


class Events:
    """A stream of events, read as far as a test wants."""

    def __init__(self, response: httpx.Response) -> None:
        self._lines = response.iter_lines()

    def next(self, wanted: str) -> Any:
        """The next event of this name."""
        event = ""
        for line in self._lines:
            if line.startswith("event: "):
                event = line.removeprefix("event: ")
            elif line.startswith("data: ") and event == wanted:
                return json.loads(line.removeprefix("data: "))
        raise AssertionError("the stream has ended")

    def call(self, phase: str) -> dict[str, Any]:
        """The next call that is in this phase."""
        while True:
            for call in self.next("calls"):
                if call["phase"] == phase:
                    return dict(call)


@contextmanager
def watching(live: Live, key: str | None = None) -> Iterator[Events]:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    with httpx.stream("GET", f"{live.url}/v1/activity", headers=headers, timeout=30) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        yield Events(response)


def test_a_call_is_shown_from_its_queue_to_its_end(live: Live) -> None:
    live.engine.n_cached, live.engine.tiers = 3, (("ssd", 3),)
    live.engine.reason = Reason(Cause.DIVERGED, 3)
    with watching(live) as events:
        assert events.next("calls") == []
        state = events.next("state")
        assert state["model"] == "fake"
        assert state["operator"] is True
        live.engine.hold("queue")
        stream = live.openai().chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "Hi"}], stream=True
        )
        queued = events.call("queued")
        assert queued["prompt_tokens"] > 3
        assert queued["admitted_s"] is None
        live.engine.release("queue")
        text = "".join(c.choices[0].delta.content or "" for c in stream if c.choices)
        done = events.call("done")
    assert text
    assert done["id"] == queued["id"]
    assert done["cached_tokens"] == 3
    assert done["tiers"] == {"ssd": 3}
    assert done["reason"] == "diverged at token 3"
    assert done["reply_tokens"] > 0
    assert 0 <= done["admitted_s"] <= done["first_token_s"] <= done["ended_s"]
    assert "Hi" not in json.dumps(done)


def test_a_late_watcher_sees_calls_that_have_ended(live: Live) -> None:
    client = live.openai()
    for _ in range(2):
        client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "Hi"}])
    with watching(live) as events:
        assert [call["phase"] for call in events.next("calls")] == ["done", "done"]


def test_a_busy_key_does_not_push_out_what_another_may_see(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(activity, "N_ENDED", 3)
    with serve(keys=Keys(["alice", "bob"], admin=["root"])) as live:
        for key in ("alice", "alice", *["bob"] * 5):
            client = live.openai(api_key=key)
            client.chat.completions.create(
                model="fake", messages=[{"role": "user", "content": "Hi"}]
            )
        known = {}
        for key in ("alice", "bob", "root"):
            with watching(live, key) as events:
                known[key] = events.next("calls")
    assert [len(calls) for calls in known.values()] == [2, 3, 3]
    assert known["root"] == known["bob"], "the last of all"


def test_calls_that_fail_or_lose_their_client_are_shown_as_such(live: Live) -> None:
    with watching(live) as events:
        live.engine.hold("decode")
        body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
        with httpx.stream("POST", f"{live.url}/v1/chat/completions", json=body) as response:
            assert response.status_code == 200
            events.call("reading")
        gone = events.call("gone")
        assert gone["ended_s"] > 0
        assert gone["error"] is None
        live.engine.release("decode")
        for more in ({}, {"stream": True}):
            long = {"messages": [{"role": "user", "content": "x" * 5000}], **more}
            refused = httpx.post(f"{live.url}/v1/chat/completions", json=long)
            assert refused.status_code == 400
            failed = events.call("failed")
            assert failed["error"] == refused.json()["error"]["message"]


def test_a_key_sees_its_own_calls_and_the_operator_all() -> None:
    with serve(keys=Keys(["alice", "bob"], admin=["root"])) as live:
        for key in ("alice", "bob"):
            client = live.openai(api_key=key)
            client.chat.completions.create(
                model="fake", messages=[{"role": "user", "content": "Hi"}]
            )
        with watching(live, "root") as events:
            keys = {call["key"] for call in events.next("calls")}
            assert len(keys) == 2
            assert "engine" in events.next("state")
        with watching(live, "alice") as events:
            (call,) = events.next("calls")
            assert call["key"] in keys
            state = events.next("state")
            assert not {"engine", "mlx_bytes"} & set(state)
        refused = httpx.get(f"{live.url}/v1/activity")
        assert refused.status_code == 401


def test_each_key_has_a_share_of_the_watchers() -> None:
    with serve(keys=Keys(["alice", "bob"])) as live, ExitStack() as open_streams:
        own = [open_streams.enter_context(watching(live, "alice")) for _ in range(SHARE)]
        for events in own:
            events.next("calls")
        refused = httpx.get(f"{live.url}/v1/activity", headers={"x-api-key": "alice"})
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "too_many_watchers"
        other = open_streams.enter_context(watching(live, "bob"))
        other.next("calls")


def test_a_call_is_inspected_once_however_many_watch() -> None:
    """And one that another key made, not at all."""
    activity, inspected = Activity("fake", excerpt=None), list[str]()

    class Counted(CallProgress):
        def __init__(self, key: str) -> None:
            super().__init__(1)
            self.key = key

        @property
        def usage(self) -> Usage:
            inspected.append(self.key)
            return Usage(3, 0)

    keys = {name: Caller(Namespace(name), Namespace(name)) for name in ("alice", "bob")}
    with ExitStack() as open_calls:
        for i in range(50):
            for name, caller in keys.items():
                exchange = Exchange(id=f"{name}{i}", caller=caller)
                open_calls.callback(activity.follow(exchange, Counted(name)).close)
        watchers = [_Watcher(0, {}) for _ in range(16)]
        shown = [activity.news(watcher, keys["alice"]) for watcher in watchers]
        assert {len(views) for views in shown} == {50}
        assert inspected == ["alice"] * 50
        assert not any(activity.news(watcher, keys["alice"]) for watcher in watchers)


def test_watchers_that_come_at_the_same_time_are_limited(live: Live) -> None:
    app, loop = live.server.config.app, live.server.loop
    while not isinstance(app, FastAPI):
        app = app.app  # type: ignore[union-attr]
    assert loop is not None
    asyncio.run_coroutine_threadsafe(check_that_watchers_are_limited(app), loop).result(60)


def test_a_server_that_stops_ends_the_stream(live: Live) -> None:
    with watching(live) as events:
        events.next("state")
        live.on_loop(live.event_router.drain)
        with pytest.raises(AssertionError, match="the stream has ended"):
            events.next("state")
