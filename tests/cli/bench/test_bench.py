"""`firn bench` and `firn cache advise` as people run them, on a real server that records a trace."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from benchmarks.agent_trace import agent_trace
from typer.testing import Result

from firn.bench import replay, report, throughput
from firn.bench.client import Target, TimedReply, words
from firn.bench.report import BenchError, Column
from firn.config import CacheConfig, Config, LogConfig, ModelConfig
from firn.traces.read import line_of, read
from firn.traces.trace import TraceEntry
from tests.api.live import serve
from tests.api.real import serving
from tests.cli import command
from tests.cli.talk import chat_server

MODEL = "firn-demo"


def firn(*arguments: str) -> Result:
    return command.invoke(*arguments, env={"COLUMNS": "200"})


@dataclass(frozen=True)
class Place:
    url: str
    trace: Path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """The built-in model, with a cache and a trace."""
    tmp = tmp_path_factory.mktemp("bench")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp / "cache"))
        patch.setenv("HOME", str(tmp))  # where a Mac's caches are
        config = Config(
            model=ModelConfig(path=MODEL),
            cache=CacheConfig(cache_memory_mb=256, cache_block_tokens=64, no_ssd_cache=True),
            log=LogConfig(record_trace=tmp / "trace.jsonl"),
        )
        with serving(Path(MODEL), config=config) as real:
            yield Place(real.url, tmp / "trace.jsonl")


@dataclass(frozen=True)
class Chats:
    """What a benchmark of chats printed and wrote."""

    stdout: str
    out: Path


@pytest.fixture(scope="module")
def chats(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Chats:
    """Its requests are in the server's trace."""
    out = tmp_path_factory.mktemp("chats") / "out.json"
    run = firn(
        *("bench", "chats", "--url", place.url, "--rounds", "1", "--sessions", "2", "--turns", "2"),
        *("--json", str(out)),
    )
    assert run.exit_code == 0, run.output
    return Chats(run.stdout, out)


def test_chats_reuse_what_they_share(chats: Chats) -> None:
    title, heads, row = chats.stdout.splitlines()[:3]
    assert title == "2 chats of 2 turns, medians of rounds: 1"
    assert heads.split() == ["cold", "s", "shared", "s", "later", "s", "new/turn"]
    assert row.startswith(MODEL)
    (found,) = json.loads(chats.out.read_text())["result"]["rounds"][MODEL]
    (cold, shared), later = found["cached_tokens"]
    assert cold < 64, "the salt makes every round new"
    assert shared > 500, "the system prompt was known"
    assert all(n > m for n, m in zip(later, found["prompt_tokens"][0], strict=True)), "all before"


def test_a_server_beside_itself(place: Place) -> None:
    run = firn(
        *("bench", "throughput", "--compare", place.url, place.url, "--rounds", "2"),
        *("--concurrency", "1,2", "--requests", "1", "--no-gap", "--json", "-"),
    )
    assert run.exit_code == 0, run.output
    rounds = json.loads(run.stdout)["result"]["rounds"]
    assert list(rounds) == [f"{place.url} (1)", f"{place.url} (2)"]
    assert all(len(done) == 2 and done[0]["tok_s_2"] > 0 for done in rounds.values())
    assert f"{place.url} (1) / best rival" in run.stderr
    assert "from - to" in run.stderr


def test_servers_that_share_a_cache_are_sent_different_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise the second of a round would find what the first has computed."""
    prompts: list[str] = []

    def chat(self: Target, messages: Any, max_tokens: int, **options: Any) -> TimedReply:
        prompts.append(messages[0]["content"])
        return TimedReply("", 0.1, 0.2, (), n_prompt=9, n_cached=0, n_completion=max_tokens)

    monkeypatch.setattr(Target, "chat", chat)
    run = firn(
        *("bench", "throughput", "--compare", "http://a", "http://b", "--model", "m"),
        *("--rounds", "2", "--concurrency", "1", "--requests", "1", "--no-gap"),
    )
    assert run.exit_code == 0, run.output
    assert len(prompts) == 2 * (1 + 2 * 2), "each server: one to warm up, two in a round"
    assert len(set(prompts)) == len(prompts)


@pytest.mark.usefixtures("chats")
def test_what_was_served_can_be_played_again(place: Place, tmp_path: Path) -> None:
    """The trace that a benchmark leaves can be replayed as a benchmark."""
    entries = list(read(place.trace).entries)
    assert read(place.trace).block == 64
    assert all(e.model == MODEL and e.token_nbytes > 0 for e in entries)
    assert any(dict(e.cached).get("memory", 0) > 500 for e in entries)
    assert all(e.first_s is not None and e.first_s > 0 for e in entries)
    assert "amber" not in place.trace.read_text()
    out = tmp_path / "replay.json"
    run = firn(
        *("bench", "replay", str(place.trace), "--url", place.url, "--requests", "4"),
        *("--streams", "1", "--max-reply", "2", "--json", str(out)),
    )
    assert run.exit_code == 0, run.output
    (found,) = json.loads(out.read_text())["result"]["rounds"][MODEL]
    assert found["failed"] == 0
    assert found["requests"] == 4
    assert found["reused"] > 0.8 * found["possible"] > 0.1, found


@pytest.mark.usefixtures("chats")
def test_advice_on_what_was_served(place: Place) -> None:
    run = firn("cache", "advise", str(place.trace), "--json")
    assert run.exit_code == 0, run.output
    found = json.loads(run.stdout)
    assert found["unlimited"] == pytest.approx(max(found["memory_and_ssd"][-1]), abs=1e-9)
    assert "GiB" in found["memory"][0], "the trace says what a token takes"


# --- advice --------------------------------------------------------------------------------


def write_trace(path: Path, entries: list[TraceEntry], block: int = 512) -> Path:
    path.write_text("".join(f"{line_of(e, block=block)}\n" for e in entries))
    return path


def test_the_table_grows_with_the_sizes(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.jsonl", agent_trace(400, seed=4, block=512))
    run = firn("cache", "advise", str(path), "--token-bytes", "16384", "--json")
    assert run.exit_code == 0, run.output
    found = json.loads(run.stdout)
    table = found["memory_and_ssd"]
    for row, alone in zip(table, found["memory_alone"], strict=True):
        assert row == sorted(row)
        assert row[0] >= alone
    assert found["memory_alone"] == sorted(found["memory_alone"])
    assert table[-1][-1] == pytest.approx(found["unlimited"])
    assert found["plain_lru"][-1] == pytest.approx(found["unlimited"])
    sizes = ("--memory-gb", "1,2", "--ssd-gb", "4", "--token-bytes", "16384")
    shown = firn("cache", "advise", str(path), *sizes)
    assert shown.exit_code == 0, shown.output
    heads = [line.split("  ")[0] for line in shown.stdout.splitlines()]
    assert heads[3:7] == ["memory", "1 GiB", "2 GiB", "plain LRU"]
    assert "of what is possible" in shown.stdout


def test_processes_of_its_own_say_the_same(tmp_path: Path) -> None:
    from firn.traces import advise
    from firn.traces.trace import Trace

    trace = Trace.of(agent_trace(300, seed=4, block=512), block=512)
    sizes = {"memory": [50], "ssd": [100]}
    alone = advise.advise(trace, **sizes, workers=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(advise, "SERIAL_BELOW", 0)
        assert advise.advise(trace, **sizes, workers=2) == alone


@pytest.mark.parametrize(
    ("rates", "size"),
    [
        ({1: 0.1, 2: 0.5, 4: 0.9, 8: 0.904}, 4),
        ({1: 0.1, 2: 0.5}, 2),
        ({1: 0.9, 2: 0.9, 4: 0.9}, 1),
        ({1: 0.1, 2: 0.1, 4: 0.5, 8: 0.5}, 4),
        ({7: 0.3}, 7),
    ],
)
def test_the_knee(rates: dict[int, float], size: int) -> None:
    from firn.traces.advise import knee

    assert knee(rates) == size


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["cache", "advise", "nowhere.jsonl"], 1, "nowhere.jsonl: No such file"),
        (["cache", "advise", "{trace}", "--ssd-gb", "3"], 2, "add --token-bytes"),
        (["cache", "advise", "{trace}", "--ssd-gb", "x", "--token-bytes", "9"], 2, "sizes above 0"),
        (["bench", "replay", "nowhere.jsonl"], 1, "nowhere.jsonl: No such file"),
        (["bench", "chats", "--url", "http://127.0.0.1:9"], 1, "no server answers at"),
        (["bench", "chats", "--url", "ftp://x"], 1, "is not an address"),
        (["bench", "throughput", "--concurrency", "0"], 2, "whole numbers above 0"),
        (["bench", "chats", "--model", "a", "--model", "b"], 2, "more models than servers"),
    ],
)
def test_wrong_calls_are_one_line(
    tmp_path: Path, arguments: list[str], code: int, says: str
) -> None:
    trace = write_trace(tmp_path / "t.jsonl", [TraceEntry(0, 600, 1, (1,))])
    run = firn(*(a.format(trace=trace) for a in arguments))
    assert run.exit_code == code, run.output
    (line,) = run.stderr.splitlines()
    assert line.startswith("firn: ")
    assert says in line


# --- the parts -----------------------------------------------------------------------------


def test_requests_that_fail_are_counted() -> None:
    with serve() as live:
        target = Target(live.url, "fake")
        short, long = TraceEntry(0, 16, 1, ()), TraceEntry(1, 9000, 1, tuple(range(1, 19)))
        pace = replay.ReplayPace(speed=0, streams=2)
        run = replay.run(target, [short, long], block=512, pace=pace, salt="a")
        assert run["failed"] == 1
        assert "400" in run["faults"][0]
        with pytest.raises(BenchError, match="no request of the trace was answered"):
            replay.run(target, [long], block=512, pace=pace, salt="a")


def test_only_an_error_with_content_ends_a_reply() -> None:
    """Some servers send every field in every chunk, with null for what there is not."""

    def answers(wire: chat_server.Wire) -> None:
        wire.start()
        choice = {"index": 0, "delta": {"content": "four"}, "finish_reason": None}
        wire.data({"choices": [choice], "error": None})
        wire.finish()

    def breaks_off(wire: chat_server.Wire) -> None:
        wire.start()
        wire.data({"error": {"message": "the model fell over"}})

    with chat_server.serving(answers, breaks_off) as server:
        target = Target(server.url, "tiny")
        assert target.chat([{"role": "user", "content": "2 + 2?"}], 8).text == "four"
        with pytest.raises(BenchError, match="the model fell over"):
            target.chat([{"role": "user", "content": "2 + 2?"}], 8)


def test_ctrl_c_does_not_wait_for_requests_of_tomorrow() -> None:
    def ctrl_c() -> None:
        raise KeyboardInterrupt

    entries = [TraceEntry(0, 16, 1, ()), TraceEntry(1e6, 16, 1, ())]
    pace = replay.ReplayPace(speed=1, streams=2)
    with serve() as live, pytest.raises(KeyboardInterrupt):
        replay.run(
            Target(live.url, "fake"), entries, block=512, pace=pace, salt="a", on_reply=ctrl_c
        )


def test_a_script_that_is_told_to_end_stops_what_it_has_started() -> None:
    script = """
import time
from firn.bench.report import cli

def main():
    try:
        print("up", flush=True)
        time.sleep(60)
    finally:
        print("stopped", flush=True)

cli(main)
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.terminate()
    assert process.stdout.read() == "stopped\n"
    assert process.wait(30) == 128 + signal.SIGTERM


def test_ctrl_c_does_not_wait_for_long_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of a decoder's reply is sent only after the benchmark has ended."""
    ended = threading.Event()

    class SlowTarget(Target):
        def chat(self, messages: Any, max_tokens: int, **more: Any) -> TimedReply:
            if max_tokens != throughput.N_DECODER_TOKENS:
                raise KeyboardInterrupt  # while the long prompt is read
            for _ in range(throughput.N_BEFORE):
                more["on_piece"](0.0)
            assert ended.wait(60)
            with pytest.raises(BenchError):
                more["on_piece"](0.0)
            raise BenchError("stopped")

    class Event(threading.Event):
        def set(self) -> None:
            super().set()
            ended.set()

    monkeypatch.setattr(throughput.threading, "Event", Event)
    with pytest.raises(KeyboardInterrupt):
        throughput.while_prefilling(SlowTarget("http://x", "m"), turn=0)


def test_no_prompt_is_longer_than_asked_for() -> None:
    entry = TraceEntry(0, 1500, 1, (1, 2))
    lengths = {n: replay.cut([entry], block=512, max_prompt=n)[0] for n in (100, 512, 1100, 9000)}
    assert {n: e.n_prompt for n, e in lengths.items()} == {
        100: 100,
        512: 512,
        1100: 1024,
        9000: 1500,
    }
    assert {n: e.blocks for n, e in lengths.items()} == {
        100: (), 512: (1,), 1100: (1, 2), 9000: (1, 2)
    }  # fmt: skip


def test_prompts_begin_alike_as_far_as_their_blocks_do() -> None:
    writer = replay.PromptWriter(64, tokens_per_word=4.0, salt="s")
    entries = [
        TraceEntry(0, 200, 1, (1, 2, 3)),
        TraceEntry(0, 200, 1, (1, 2, 4)),
        TraceEntry(0, 200, 1, (5,)),
    ]
    texts = [writer.prompt(e, i, block=64).split() for i, e in enumerate(entries)]
    shared = [a == b for a, b in zip(texts[0], texts[1], strict=False)]
    assert shared[:32] == [True] * 32, "16 words a block"
    assert not all(shared[32:48])
    assert texts[0][0] != texts[2][0] or texts[0][1] != texts[2][1]
    assert replay.possible(entries, block=64) == 2 * 64 / 600


def test_a_known_block_behind_a_new_one_cannot_be_reused() -> None:
    entries = [TraceEntry(0, 192, 1, (1, 2, 3)), TraceEntry(1, 192, 1, (1, 9, 3))]
    assert replay.possible(entries, block=64) == 64 / 384


def test_ratios_and_their_range() -> None:
    rounds: dict[str, list[dict[str, Any]]] = {
        "a": [{"s": 1.0}, {"s": 2.0}, {"s": 3.0}],
        "b": [{"s": 2.0}, {"s": 2.0}, {"s": 2.0}],
    }
    column = Column("s", "seconds")
    text = report.table("t", [column], rounds=rounds)
    assert [line.split() for line in text.splitlines()[4:6]] == [
        ["a", "/", "best", "rival", "1.00"],
        ["from", "-", "to", "0.50", "-", "1.50"],
    ]


def test_words_differ_by_their_seed() -> None:
    assert words(20, seed=1) == words(20, seed=1)
    assert words(20, seed=1) != words(20, seed=2)
