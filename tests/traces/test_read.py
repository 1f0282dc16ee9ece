"""Traces in the formats that others write."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from firn.traces.read import SESSION_BLOCK, TURN_S, line_of, read
from firn.traces.trace import Trace, TraceEntry, TraceError


def write(path: Path, *objects: Any) -> Path:
    path.write_text("".join(json.dumps(o) + "\n" for o in objects))
    return path


def entries(path: Path, **options: Any) -> list[TraceEntry]:
    return list(read(path, **options).entries)


def mooncake(at: int, n: int, names: list[int], **more: Any) -> dict[str, Any]:
    return {"timestamp": at, "input_length": n, "output_length": 7, "hash_ids": names, **more}


def test_mooncakes_lines(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.jsonl", mooncake(0, 1100, [1, 2, 3]), mooncake(1500, 1536, [1, 2, 9])
    )
    assert read(path).block == 512
    first, second = entries(path)
    assert first.blocks == (1, 2), "the third is no whole block"
    assert (second.at_s, second.blocks) == (1.5, (1, 2, 9))
    trace = Trace.of([first, second], block=512)
    assert trace.known.tolist() == [0, 2]
    assert trace.working_set_tokens == 3 * 512


def test_hashes_that_do_not_cover_what_lies_before(tmp_path: Path) -> None:
    """The same hash after another block is another block."""
    chains = [(1, 2, 3), (9, 2, 3), (1, 2, 3), (9, 2, 3), (9, 2, 4), (2, 3), (2, 3, 3)]
    trace = Trace.of([TraceEntry(i, 99, 0, chain) for i, chain in enumerate(chains)], block=4)
    assert trace.known.tolist() == [0, 0, 3, 3, 2, 0, 2]
    assert trace.n_nodes == 3 + 3 + 1 + 2 + 1
    names = write(tmp_path / "t.jsonl", mooncake(0, 1024, [-1, "x"]), mooncake(1, 512, [2**64 - 1]))
    assert Trace.of(read(names).entries, block=512).known.tolist() == [0, 1]


def test_requests_are_sorted_by_their_arrival(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", mooncake(9000, 512, [1]), mooncake(0, 1024, [1, 2]))
    trace = Trace.of(read(path).entries, block=512)
    assert trace.at.tolist() == [0.0, 9.0]
    assert trace.known.tolist() == [0, 1]


def test_one_model_of_several(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.jsonl",
        mooncake(0, 8, [1, 2], block_tokens=4, model="a"),
        mooncake(1, 16, [3], block_tokens=16, model="b"),
    )
    with pytest.raises(TraceError, match=r"line 2: blocks of 16 tokens after blocks of 4.*--model"):
        entries(path)
    for model, block in (("a", 4), ("b", 16)):
        assert [e.model for e in entries(path, model=model)] == [model]
        assert read(path, model=model).block == block
    with pytest.raises(TraceError, match="There is no request of c in"):
        read(path, model="c")


def test_a_line_that_is_no_object_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", mooncake(0, 512, [1]), [2])
    with pytest.raises(TraceError, match="line 2 is not a request"):
        entries(path)


SESSION = [
    {"role": "system", "content": "s" * 2000},
    {"role": "user", "content": "u" * 300},
    {"role": "assistant", "content": "a" * 2000, "tool_calls": [{"name": "ls"}]},
    {"role": "tool", "content": [{"type": "text", "text": "t" * 900}]},
    {"role": "assistant", "content": "done"},
]


@pytest.mark.parametrize("lines", [[mooncake(0, 512, [1])] * 2, [[SESSION]], [SESSION] * 2])
def test_a_pipe_is_read_like_a_file(tmp_path: Path, lines: list[Any]) -> None:
    """As in `firn cache advise <(zcat trace.gz)`: what was read of it cannot be read again."""
    file, pipe = write(tmp_path / "t.jsonl", *lines), tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(file.read_bytes()), daemon=True)
    writer.start()
    assert entries(pipe) == entries(file) != []


@pytest.mark.parametrize(
    "form",
    [
        lambda s: json.dumps([s, s]),
        lambda s: json.dumps([{"messages": s}, {"trajectory": s}]),
        lambda s: "".join(json.dumps({"conversations": s}) + "\n" for _ in range(2)),
        lambda s: "".join(json.dumps(s) + "\n" for _ in range(2)),
        lambda s: json.dumps([*s, *s]),
    ],
)
def test_lists_of_sessions(tmp_path: Path, form: Any) -> None:
    path = tmp_path / "sessions.json"
    path.write_text(form(SESSION))
    found = entries(path)
    assert len(found) == 4, "every message of the assistant is a request"
    first, second, again, _ = found
    assert again.blocks[: len(first.blocks)] == first.blocks
    assert second.blocks[: len(first.blocks)] == first.blocks
    whole = (*first.blocks, *first.reply_blocks)
    assert second.blocks[: len(whole)] == whole, "a reply is a part of the next prompt"
    assert second.at_s - first.at_s == TURN_S
    assert second.n_prompt // SESSION_BLOCK == len(second.blocks)


def test_sessions_with_times_and_other_names(tmp_path: Path) -> None:
    session = {
        "start_time": "2026-11-16T00:00:00+00:00",
        "conversations": [
            {"from": "human", "value": "h" * 3000},
            {"from": "gpt", "value": "g", "timestamp": 1_800_000_000_000},
        ],
    }
    (entry,) = entries(write(tmp_path / "s.jsonl", session))
    assert entry.at_s == 1_800_000_000
    assert entry.n_reply > 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no request"),
        ("{oops\n", "line 1 is not JSON"),
        ("[oops", "line 1 is not JSON"),
        ("7\n", "line 1 is neither an object nor a list"),
        ('{"a": 1}\n', "neither hash_ids"),
        ('{"hash_ids": [1], "timestamp": 0}\n', "line 1: KeyError"),
        ('{"hash_ids": [1], "timestamp": 0, "input_length": 9999}\n', "1 hash_ids for 9999 tokens"),
        ('{"hash_ids": [], "block_tokens": 0}\n', "block_tokens must be"),
        ('[{"messages": 3}]', "session 1 cannot be read"),
        ("\xff\n", "line 1 is not JSON"),
    ],
)
def test_what_is_no_trace_is_one_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(TraceError, match=says):
        Trace.of(read(path).entries, block=512)


def test_a_line_that_was_cut_off_ends_the_trace(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", mooncake(0, 512, [1]))
    with path.open("a") as file:
        file.write('{"timestamp": 1, "inp')
    assert len(entries(path)) == 1


def test_a_line_is_read_as_it_was_written(tmp_path: Path) -> None:
    entry = TraceEntry(1.5, 1100, 600, (7, 8), (9,), (("ssd", 5),), 0.25, "m", 100)
    path = tmp_path / "t.jsonl"
    path.write_text(f"{line_of(entry, block=512)}\n")
    assert entries(path) == [entry]


def test_a_trace_survives_a_folder(tmp_path: Path) -> None:
    trace = Trace.of([TraceEntry(0, 9, 0, (1, 2)), TraceEntry(1, 9, 0, (1, 3))], block=4)
    trace.save(tmp_path)
    again = Trace.load(tmp_path)
    assert again.block == 4
    assert again.known.tolist() == trace.known.tolist() == [0, 1]
