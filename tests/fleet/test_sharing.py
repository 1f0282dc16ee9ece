"""Too little memory for all models: which are unloaded, which wait, and what clients notice.

The models' processes are real ones without a model, so that loading takes no time.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import signal
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from firn.api.dialects.openai_chat import OpenAIChat
from firn.api.http import body
from firn.api.http.auth import SHARED, namespace_of
from firn.api.http.body import INLINE_NBYTES
from firn.core.values import Namespace
from firn.fleet.model import Model, ModelRun
from firn.fleet.placement import NEVER, ModelState, PlacementRules
from firn.fleet.relay import WaitLimits
from tests.fleet.fronts import ECHO, NEED_GB, Running, config, fronting
from tests.waiting import wait_until

QUICK = PlacementRules(min_stay_s=0.0, turn_min_s=0.5, turn_max_s=0.5, hold_max_s=0.2)


def serving(
    tmp_path: Path,
    *names: str,
    room: int,
    rules: PlacementRules = QUICK,
    waits: WaitLimits | None = None,
    **more: Any,
) -> Any:
    """A front with room for this many of the models."""
    flags = {"fleet.model_memory_gb": str(NEED_GB * room + 0.1), **more}
    made = config(*names, tmp=tmp_path, **flags)
    return fronting(made, rules=rules, waits=waits, command=ECHO)


def chat(front: Running, model: str, *, n: int = 1, **more: Any) -> str:
    """A reply by OpenAI's client."""
    reply = front.client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "a"}], max_tokens=n, **more
    )
    return reply.choices[0].message.content or ""


def streamed(front: Running, model: str, *, n: int) -> list[str]:
    """The pieces of a whole streamed reply."""
    body = {"model": model, "messages": [{"role": "user", "content": "a"}], "max_tokens": n}
    pieces = []
    stream = front.plain.stream("POST", "/v1/chat/completions", json=body | {"stream": True})
    with stream as response:
        lines = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]", lines[-1]
    for line in lines[:-1]:
        pieces.append(json.loads(line)["choices"][0]["delta"]["content"])
    return pieces


def test_the_least_recently_used_model_is_unloaded(tmp_path: Path) -> None:
    with serving(tmp_path, "a", "b", "c", room=2) as front:
        for name in ("a", "b", "a", "c"):
            assert chat(front, name) == name
        assert front.states() == {"a": "loaded", "b": "unloaded", "c": "loaded"}
        assert front.model("b").n_unloads == {"room": 1}


def test_an_unused_model_is_unloaded_after_its_keep_alive(tmp_path: Path) -> None:
    with serving(tmp_path, "a", "b", room=2, **{"fleet.keep_alive": "0.3"}) as front:
        assert chat(front, "a") == "a"
        front.until("a", ModelState.UNLOADED)
        assert front.model("a").n_unloads == {"idle": 1}
        assert chat(front, "a") == "a"


def test_pinned_models_are_loaded_at_start_and_stay(tmp_path: Path) -> None:
    file = '[models.a]\npinned = true\nkeep_alive = 0\naliases = ["main"]\n[models.b]\n[models.c]\n'
    flags = {"fleet.model_memory_gb": str(NEED_GB * 2 + 0.1)}
    made = config(tmp=tmp_path, file=file, **flags)
    with fronting(made, rules=QUICK, command=ECHO) as front:
        front.until("a", ModelState.LOADED)
        assert front.plain.get("/ready").json() == {"ready": True, "why": None}
        for name in ("main", "b", "c", "b"):
            chat(front, name)
        assert front.model("a").n_loads == 1
        assert front.states()["a"] == "loaded"
        shown = front.plain.get("/v1/models/main").json()
        assert (shown["pinned"], shown["expires_at"]) == (True, None)


def test_a_pinned_model_that_is_unloaded_while_it_loads_waits_for_a_request(tmp_path: Path) -> None:
    """That was no failure: it does not load again by itself, but immediately when it is needed."""
    gate = tmp_path / "gate"
    made = config(tmp=tmp_path, file=f'[models.a]\npath = "gated:{gate}"\npinned = true\n')
    with fronting(made, rules=QUICK, command=ECHO) as front:
        model = front.model("a")
        front.run(lambda: _has_process(model))
        shown = front.plain.post("/v1/models/a/unload").json()
        assert (shown["state"], shown["error"]) == ("unloaded", None)
        assert model.wanted_since == NEVER
        gate.touch()
        assert chat(front, "a") == "a"


async def _has_process(model: Model) -> None:
    while model.child is None:
        await asyncio.sleep(0.001)


def test_a_running_reply_is_never_cut_off(tmp_path: Path) -> None:
    """The other model waits until the reply has ended."""
    with serving(tmp_path, "a", "b", room=1) as front, ThreadPoolExecutor(2) as pool:
        chat(front, "a")
        long = pool.submit(streamed, front, "a", n=600)
        front.run(lambda: _active(front, "a"))
        assert chat(front, "b") == "b"
        assert len(long.result()) == 600
        assert front.model("a").n_unloads == {"room": 1}


async def _active(front: Running, name: str, *, n: int = 1) -> None:
    while front.model(name).traffic.n_active < n:
        await asyncio.sleep(0.001)


def test_two_models_that_do_not_fit_take_turns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Forty alternating requests cost a few loads, and the log mentions it once."""

    def client(name: str) -> None:
        assert all(chat(front, name, n=5) == name for _ in range(20))

    caplog.set_level(logging.WARNING, logger="firn.fleet")
    with serving(tmp_path, "a", "b", room=1) as front:
        clients = [threading.Thread(target=client, args=(name,)) for name in ("a", "b")]
        for thread in clients:
            thread.start()
        for thread in clients:
            thread.join()
        n_loads = front.model("a").n_loads + front.model("b").n_loads
    assert n_loads <= 10
    assert sum("take turns" in record.message for record in caplog.records) == 1


def test_four_models_with_room_for_two_answer_every_request(tmp_path: Path) -> None:
    """100 requests: every reply is whole, and of the right model."""
    names, rng = ("a", "b", "c", "d"), random.Random(7)
    orders = [(rng.choice(names), rng.randint(1, 20), rng.random() < 0.5) for _ in range(100)]

    def one(order: tuple[str, int, bool]) -> None:
        name, n, streams = order
        if streams:
            assert streamed(front, name, n=n) == [f"{name}{i} " for i in range(n)]
        else:
            assert chat(front, name, n=n) == name

    hasty = PlacementRules(min_stay_s=0.0, turn_min_s=0.1, turn_max_s=0.1, hold_max_s=0.02)
    with serving(tmp_path, *names, room=2, rules=hasty) as front:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(one, orders))
        models = front.parts.fleet.models.values()
        assert 4 < sum(m.n_loads for m in models) < 50
        assert not any(m.traffic.n_active or m.traffic.waiters for m in models)
        assert sum(m.state is ModelState.LOADED for m in models) <= 2


@pytest.mark.parametrize("chunked", [False, True])
def test_loading_takes_a_keep_alive(tmp_path: Path, chunked: bool) -> None:
    raw = b'{"keep_alive": -1}'
    with serving(tmp_path, "a", "b", room=2) as front:
        body = iter([raw]) if chunked else raw
        headers = {"content-type": "application/json"}
        front.plain.post("/v1/models/a/load", content=body, headers=headers).raise_for_status()
        assert front.model("a").expires_at == NEVER


# --- waiting -------------------------------------------------------------------------------


def test_a_stream_that_waits_is_kept_alive(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    file = f'[models.slow]\npath = "gated:{gate}"\n[models.other]\n'
    made = config(tmp=tmp_path, file=file)
    waits = WaitLimits(wait_s=30, silence_s=0.05)
    body: dict[str, Any] = {"model": "slow", "messages": [{"role": "user", "content": "a"}]}
    with fronting(made, command=ECHO, waits=waits) as front:
        stream = front.plain.stream("POST", "/v1/chat/completions", json=body | {"stream": True})
        with stream as response:
            lines = response.iter_lines()
            assert next(lines).startswith(": 'slow' is loading")
            assert front.plain.get("/v1/models/slow").json()["state"] == "loading"
            assert chat(front, "other") == "other"
            gate.touch()
            rest = [line for line in lines if line.startswith("data: ")]
        assert rest[-1] == "data: [DONE]"


def test_waiting_is_bounded_in_number_and_time(tmp_path: Path) -> None:
    file = f'[models.slow]\npath = "gated:{tmp_path / "never"}"\n'
    made = config(tmp=tmp_path, file=file, **{"fleet.model_queue": "1"})
    waits = WaitLimits(wait_s=0.5, silence_s=0.1)
    body: dict[str, Any] = {"model": "slow", "messages": [{"role": "user", "content": "a"}]}
    with fronting(made, command=ECHO, waits=waits) as front, ThreadPoolExecutor(1) as pool:
        first = pool.submit(front.plain.post, "/v1/chat/completions", json=body)
        front.run(lambda: _waiting(front, "slow"))
        second = front.plain.post("/v1/messages", json=body | {"max_tokens": 1})
        assert (second.status_code, second.json()["type"]) == (503, "error")
        assert int(second.headers["retry-after"]) >= 1
        assert first.result().status_code == 503
        assert first.result().json()["error"]["code"] == "model_not_ready"
        assert int(first.result().headers["retry-after"]) >= 1
        late = front.plain.post("/v1/chat/completions", json=body | {"stream": True})
        assert late.status_code == 200  # the stream had begun while it waited
        assert '"code":"model_not_ready"' in late.text.splitlines()[-2]
        wrong = front.plain.post("/v1/chat/completions", json=body | {"n": 0})
        assert wrong.status_code == 400  # an invalid request does not wait
        assert front.plain.post("/v1/models/slow/unload").json()["state"] == "unloaded"


class ThreadNames(OpenAIChat):
    """Records which threads decode bodies."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def decode(self, body: Mapping[str, Any], *, namespace: Namespace) -> Any:
        self.names.add(threading.current_thread().name)
        return super().decode(body, namespace=namespace)


def test_a_large_body_is_checked_in_the_pool_before_its_model_is_loaded(tmp_path: Path) -> None:
    dialect = ThreadNames()
    body = {"model": "a", "messages": [{"role": "user", "content": "a" * INLINE_NBYTES}]}
    with serving(tmp_path, "a", "b", room=2) as front:
        front.parts.relay._dialects[dialect.path] = dialect
        front.plain.post("/v1/chat/completions", json=body).raise_for_status()
    (name,) = dialect.names
    assert name.startswith("firn-decode")


async def _waiting(front: Running, name: str) -> None:
    while not front.model(name).traffic.waiters:
        await asyncio.sleep(0.001)


def test_a_model_that_cannot_be_loaded_fails_its_requests_at_once(tmp_path: Path) -> None:
    file = '[models.bad]\npath = "broken"\n[models.good]\n'
    with fronting(config(tmp=tmp_path, file=file), command=ECHO) as front:
        for _ in range(2):  # the second fails immediately, without another attempt
            with pytest.raises(openai.InternalServerError, match="it is broken"):
                chat(front, "bad")
        assert chat(front, "good") == "good"
        shown = front.plain.get("/v1/models/bad").json()
        assert shown["state"] == "unloaded"
        assert "it is broken" in shown["error"]


def test_a_model_that_cannot_be_loaded_displaces_no_other(tmp_path: Path) -> None:
    file = '[models.bad]\npath = "broken"\n[models.good]\n'
    flags = {"fleet.model_memory_gb": str(NEED_GB + 0.1)}
    with fronting(config(tmp=tmp_path, file=file, **flags), rules=QUICK, command=ECHO) as front:
        assert chat(front, "good") == "good"
        with pytest.raises(openai.InternalServerError, match="it is broken"):
            chat(front, "bad")
        assert front.states() == {"bad": "unloaded", "good": "loaded"}
        assert chat(front, "good") == "good"
        assert front.model("good").n_loads == 1


def test_who_alternates_does_not_wait_for_requests_that_never_come(tmp_path: Path) -> None:
    """One client asks one model, then the other: each model's stay is for nothing."""
    rules = PlacementRules(min_stay_s=0.0)
    with serving(tmp_path, "a", "b", room=1, rules=rules) as front:
        for _ in range(12):
            for name in ("a", "b"):
                assert chat(front, name) == name
        assert max(front.model(name).hold_share for name in ("a", "b")) < 0.01
        with ThreadPoolExecutor(1) as pool:  # a request that comes in time shows that it pays
            front.model("b").hold_share = 1.0
            front.model("b").load_s = 10.0
            waiting = pool.submit(chat, front, "a")
            front.run(lambda: _waiting(front, "a"))
            front.model("b").hold_share = 0.5
            assert chat(front, "b") == "b"
            assert front.model("b").hold_share == 1.0
            front.model("b").load_s = 0.0
            assert waiting.result() == "a"


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_waits_for_the_next_process_if_its_own_is_killed(
    tmp_path: Path, stream: bool
) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    file = f'[models.a]\npath = "gated:{gate}"\n'
    with (
        fronting(config(tmp=tmp_path, file=file), rules=QUICK, command=ECHO) as front,
        ThreadPoolExecutor(4) as pool,
    ):
        chat(front, "a")
        gate.unlink()
        running = [pool.submit(chat, front, "a", n=60_000) for _ in range(2)]
        front.run(lambda: _active(front, "a", n=2))
        front.kill("a")
        late = pool.submit(streamed, front, "a", n=3) if stream else pool.submit(chat, front, "a")
        front.run(lambda: _waiting(front, "a"))
        assert not any(request.done() for request in running)
        gate.touch()
        assert late.result() in ("a", ["a0 ", "a1 ", "a2 "])
        assert front.model("a").n_loads == 2
        front.run(lambda: _active(front, "a", n=2))
        front.kill("a")  # once more: whoever is asked a third time may be the reason
        for request in running:
            with pytest.raises(openai.InternalServerError, match="being restarted"):
                request.result()


def test_a_request_that_may_have_ended_its_process_is_not_asked_again(tmp_path: Path) -> None:
    with serving(tmp_path, "a", "b", room=2) as front, ThreadPoolExecutor(1) as pool:
        chat(front, "a")
        running = pool.submit(chat, front, "a", n=60_000)
        front.run(lambda: _active(front, "a"))
        os.kill(front.pid("a"), signal.SIGSEGV)
        with pytest.raises(openai.InternalServerError, match="being restarted"):
            running.result()
        assert chat(front, "a") == "a"


def test_a_model_that_can_never_fit_is_refused_at_once(tmp_path: Path) -> None:
    flags = {"fleet.model_memory_gb": "0.1"}
    with fronting(config("a", "b", tmp=tmp_path, **flags), command=ECHO) as front:
        refused = front.plain.post("/v1/chat/completions", json={"model": "a", "messages": [
            {"role": "user", "content": "a"}]})  # fmt: skip
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "insufficient_memory"


def test_a_client_that_hangs_up_ends_its_reply_in_the_models_process(tmp_path: Path) -> None:
    with serving(tmp_path, "a", "b", room=2) as front:
        body = {"model": "a", "messages": [{"role": "user", "content": "a"}], "max_tokens": 100_000}
        with front.plain.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as s:
            next(s.iter_lines())
        http = front.plain
        wait_until(lambda: not http.get("/v1/cache/stats").json()["models"]["a"]["open"])
        assert front.model("a").traffic.n_active == 0


def test_new_folders_in_models_dir_are_found(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    (folder / "one").mkdir(parents=True)
    (folder / "one" / "config.json").write_text("{}")
    made = config(tmp=tmp_path, **{"fleet.models_dir": str(folder)})
    with fronting(made, command=ECHO) as front:
        assert chat(front, "one") == "one"
        (folder / "owner" / "two").mkdir(parents=True)
        (folder / "owner" / "two" / "config.json").write_text("{}")
        assert chat(front, "owner/two") == "owner/two"
        listed = front.plain.get("/v1/models").json()["data"]
        assert [model["id"] for model in listed] == ["one", "owner/two"]
        folder.rename(tmp_path / "elsewhere")  # as when a disk is removed
        assert front.plain.get("/v1/models").json()["data"] == []
        assert front.plain.get("/health").json()["model"] is None
        body = {"messages": [{"role": "user", "content": "a"}]}
        for name in ("", "claude-x", "one"):
            gone = front.plain.post("/v1/chat/completions", json={"model": name, **body})
            assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")
        (tmp_path / "elsewhere").rename(folder)
        assert chat(front, "") == "one"


def test_who_leaves_as_the_model_is_ready_does_not_keep_it_busy(tmp_path: Path) -> None:
    """The lease was granted, but not yet taken."""
    with serving(tmp_path, "a", "b", room=2) as front:
        fleet, model = front.parts.fleet, front.model("a")

        async def leave_late() -> None:
            waiter = fleet.wait_for(model, SHARED)
            await asyncio.wait({waiter.lease})
            assert model.traffic.n_active == 1
            fleet.leave(model, waiter)
            assert model.traffic.n_active == 0

        front.run(leave_late)


# --- keys ----------------------------------------------------------------------------------


def test_a_key_pays_for_what_is_new_in_a_report(tmp_path: Path) -> None:
    charged: list[tuple[str, int]] = []
    numbers = ("calls", "bytes_per_token", "bytes_per_row", "live_peak", "weights")
    report = {**dict.fromkeys(numbers, 0), "device_memory": 1 << 40}
    with serving(tmp_path, "a", "b", room=2) as front:
        fleet, model = front.parts.fleet, front.model("a")
        fleet._charge = lambda key, n: charged.append((str(key), n))

        async def hear() -> None:
            run = ModelRun(began=0.0)
            for n in (5, 5, 12):
                message = {"event": "report", "report": {**report, "computed": {"k": n}}}
                fleet._on_message(model, run, message)

        front.run(hear)
    assert charged == [("k", 5), ("k", 0), ("k", 7)]


def test_keys_are_checked_at_the_front(tmp_path: Path) -> None:
    flags = {"server.api_keys": ["k1", "k2"], "server.admin_keys": ["boss"]}
    flags |= {"server.rate_limit": "6"}  # type: ignore[dict-item]
    with serving(tmp_path, "a", "b", room=2, **flags) as front:
        http = front.plain
        assert http.get("/v1/models").status_code == 401
        assert http.get("/health").status_code == 200
        key = {"authorization": "Bearer k1"}
        assert http.get("/v1/models", headers=key).status_code == 200
        assert http.post("/v1/models/a/load", headers=key).status_code == 403
        boss = {"x-api-key": "boss"}
        assert http.post("/v1/models/a/load", headers=boss).json()["state"] == "loaded"
        assert "firn_model_loaded" in http.get("/metrics", headers=boss).text
        assert "firn_model_loaded" not in http.get("/metrics", headers=key).text
        body = {"model": "a", "messages": [{"role": "user", "content": "a"}]}
        codes = [
            http.post("/v1/chat/completions", json=body, headers=key).status_code for _ in range(6)
        ]
        assert codes == [200] * 5 + [429]  # the refused load counted, too


def test_one_key_does_not_unload_what_another_uses(tmp_path: Path) -> None:
    with serving(tmp_path, "a", "b", room=2, **{"server.api_keys": ["k1", "k2"]}) as front:
        http, first, second = front.plain, {"x-api-key": "k1"}, {"x-api-key": "k2"}
        body = {"model": "a", "messages": [{"role": "user", "content": "a"}]}
        done = http.post("/v1/chat/completions", json=body | {"keep_alive": "1h"}, headers=first)
        assert done.status_code == 200
        done = http.post("/v1/chat/completions", json=body | {"keep_alive": 0}, headers=second)
        assert done.status_code == 200
        leave = {"model": "a", "keep_alive": 0, "stream": False}
        assert http.post("/api/chat", json=leave, headers=second).json()["done_reason"] == "unload"
        http.post("/v1/models/a/unload", headers=second).raise_for_status()
        assert (front.states()["a"], front.model("a").n_loads) == ("loaded", 1)
        assert http.post("/api/chat", json=leave, headers=first).json()["done_reason"] == "unload"
        assert front.states()["a"] == "unloaded"


def test_a_key_sees_only_when_its_own_use_ends(tmp_path: Path) -> None:
    with serving(tmp_path, "a", "b", room=2, **{"server.api_keys": ["k1", "k2"]}) as front:
        body = {"model": "a", "messages": [{"role": "user", "content": "a"}], "keep_alive": "1h"}
        used = front.plain.post("/v1/chat/completions", json=body, headers={"x-api-key": "k1"})
        assert used.status_code == 200

        def seen(key: str) -> set[bool]:
            http = front.http(headers={"x-api-key": key})
            listed = http.get("/v1/models").json()["data"]
            running = http.get("/api/ps").json()["models"]
            (shown,) = (model for model in listed if model["id"] == "a")
            one = http.get("/v1/models/a").json()
            assert {model["name"] for model in running} == {"a:latest"}
            never = running[0]["expires_at"].startswith("2318")
            return {shown["expires_at"] is not None, one["expires_at"] is not None, not never}

        assert seen("k1") == {True}
        assert seen("k2") == {False}


def test_one_key_cannot_take_all_places_that_wait_for_a_model(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    file = f'[models.slow]\npath = "gated:{gate}"\n[models.other]\n'
    flags = {"fleet.model_queue": "2", "server.api_keys": ["k1", "k2"]}
    made = config(tmp=tmp_path, file=file, **flags)
    body = {"model": "slow", "messages": [{"role": "user", "content": "a"}]}
    with fronting(made, command=ECHO) as front, ThreadPoolExecutor(3) as pool:

        def ask(key: str) -> int:
            with front.http(headers={"x-api-key": key}) as http:
                return http.post("/v1/chat/completions", json=body).status_code

        waiting = [pool.submit(ask, "k1") for _ in range(2)]
        wait_until(lambda: len(front.model("slow").traffic.waiters) == 2)
        assert ask("k1") == 503
        waiting.append(pool.submit(ask, "k2"))
        wait_until(lambda: len(front.model("slow").traffic.waiters) == 3)
        gate.touch()
        assert [each.result(60) for each in waiting] == [200, 200, 200]


def test_only_the_operator_unloads_a_model_whatever_the_api(tmp_path: Path) -> None:
    keys = {"server.api_keys": ["k1"], "server.admin_keys": ["boss"]}
    with serving(tmp_path, "a", "b", room=2, **keys) as front:
        http, boss = front.plain, {"x-api-key": "boss"}
        assert http.post("/v1/models/a/load", headers=boss).json()["state"] == "loaded"
        leave = {"model": "a", "keep_alive": 0, "stream": False}
        for path in ("/api/chat", "/api/generate"):
            refused = http.post(path, json=leave, headers={"x-api-key": "k1"})
            assert refused.status_code == 403
            assert "--admin-key" in refused.json()["error"]
        assert front.states()["a"] == "loaded"
        assert http.post("/api/chat", json=leave, headers=boss).json()["done_reason"] == "unload"
        assert front.states()["a"] == "unloaded"


def test_large_bodies_about_models_do_not_stop_the_front(tmp_path: Path) -> None:
    """They are parsed in the pool, where a key's work waits only behind its own."""
    threads: set[str] = set()
    large = {"model": "a", "more": "x" * INLINE_NBYTES}
    with serving(tmp_path, "a", "b", room=2) as front, pytest.MonkeyPatch.context() as patch:
        parse = body.parse_object

        def parsed(raw: bytes) -> dict[str, Any]:
            threads.add(threading.current_thread().name.partition("_")[0])
            return parse(raw)

        patch.setattr(body, "parse_object", parsed)
        front.plain.post("/api/show", json=large).raise_for_status()
        front.plain.post("/v1/models/a/load", json=large).raise_for_status()
    assert threads == {"firn-decode"}


@pytest.mark.parametrize("read", [{"images": ["aGk="]}, {"suffix": "b"}])
def test_a_picture_or_a_suffix_without_a_prompt_is_read(
    tmp_path: Path, read: dict[str, Any]
) -> None:
    with serving(tmp_path, "a", "b", room=2) as front:
        body = {"model": "a", "keep_alive": 0, "stream": False, **read}
        assert "choices" in front.plain.post("/api/generate", json=body).json()


def test_a_cache_that_cannot_be_cleared_is_no_success(tmp_path: Path) -> None:
    """What one model's process could not promise, the front does not promise either."""
    with serving(tmp_path, "a", "forgetful", room=3) as front:
        http = front.http()
        for name in ("a", "forgetful"):
            http.post(f"/v1/models/{name}/load").raise_for_status()
        refused = http.delete("/v1/cache")
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "cache_not_cleared"
        assert http.delete("/v1/cache", params={"model": "a"}).status_code == 200


def test_every_loaded_model_is_told_which_namespace_to_clear(tmp_path: Path) -> None:
    keys = {"server.api_keys": ["k1"], "server.admin_keys": ["boss"]}
    with serving(tmp_path, "a", "b", "c", room=3, **keys) as front:
        http = front.http(headers={"x-api-key": "boss"})
        for name in ("a", "b"):
            http.post(f"/v1/models/{name}/load").raise_for_status()

        def told(target: str) -> dict[str, Any]:
            return {"models": {name: {"deleted": target} for name in ("a", "b")}}

        own = namespace_of("boss")
        assert http.delete("/v1/cache").json() == told("/v1/cache")
        cleared = http.delete("/v1/cache", params={"namespace": own}).json()
        assert cleared == told(f"/v1/cache?namespace={own}")
        other = http.delete("/v1/cache", params={"namespace": namespace_of("k1")})
        assert (other.status_code, other.json()["error"]["param"]) == (404, "namespace")
        assert front.states()["c"] == "unloaded"
