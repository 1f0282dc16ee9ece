"""What `--record-trace` writes: enough to replay it, and nothing that anybody said."""

from __future__ import annotations

import contextlib
import json
import os
import select
import stat
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from firn.core.errors import SetupError
from firn.core.values import Namespace, Prompt, ServedRequest
from firn.traces import record
from firn.traces.read import read
from firn.traces.record import Recorder, open_trace, user_salt
from tests.waiting import wait_until

SALT = b"s" * 32
BLOCK = 4


def recorder(path: Path, **options: Any) -> Recorder:
    given = {"model": "tiny", "block": BLOCK, "token_nbytes": 10, "salt": SALT}
    return Recorder(open_trace(path), **{**given, **options})


def served(tokens: range, reply: range = range(0), *, who: str = "", **facts: Any) -> ServedRequest:
    given: dict[str, Any] = {"at_s": 12.5, "tiers": (("memory", 4),), "first_s": 0.25}
    return ServedRequest(
        prompt=Prompt(np.array(tokens, dtype=np.int64)),
        reply=tuple(reply),
        n_reply=len(reply),
        namespace=Namespace(who),
        **{**given, **facts},
    )


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_prompts_share_names_as_far_as_they_agree(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    writer = recorder(path)
    writer.record(served(range(100, 110), range(110, 115)))
    writer.record(served(range(100, 116)))
    writer.record(served(range(100, 110), who="somebody else"))
    writer.close()
    first, second, other = lines(path)
    assert (first["input_length"], first["output_length"]) == (10, 5)
    assert len(first["hash_ids"]) == 3, "as Mooncake has it: one for the rest of a block, too"
    whole = first["hash_ids"][:2] + first["output_hash_ids"]
    assert whole == second["hash_ids"][:3], "a reply is a part of the next prompt"
    assert first["hash_ids"][2] != second["hash_ids"][2], "the rest was of fewer tokens"
    assert not set(first["hash_ids"]) & set(other["hash_ids"])
    assert first["cached"] == {"memory": 4}
    assert first["first_token_ms"] == 250.0
    assert first["timestamp"] == 12_500
    assert max(second["hash_ids"]) < 1 << 53


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    writer = recorder(path)
    writer.record(served(range(100, 110), range(110, 115), first_s=None))
    writer.close()
    source = read(path)
    (entry,) = source.entries
    assert source.block == BLOCK
    assert (entry.at_s, entry.n_prompt, entry.n_reply) == (12.5, 10, 5)
    assert len(entry.blocks) == 2
    assert len(entry.reply_blocks) == 1
    assert (entry.model, entry.token_nbytes, entry.first_s) == ("tiny", 10, None)


def test_names_depend_on_the_salt_and_the_file_is_ours_alone(tmp_path: Path) -> None:
    names = []
    for i, salt in enumerate([SALT, SALT, b"t" * 32]):
        path = tmp_path / f"{i}.jsonl"
        writer = recorder(path, salt=salt)
        writer.record(served(range(100, 108)))
        writer.close()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        names.append(lines(path)[0]["hash_ids"])
    assert names[0] == names[1]
    assert not set(names[0]) & set(names[2])


def test_the_salt_is_kept_for_the_next_process(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    salt = user_salt(folder)
    assert user_salt(folder) == salt
    assert stat.S_IMODE((folder / "trace.salt").stat().st_mode) == 0o600
    assert [p.name for p in folder.iterdir()] == ["trace.salt"]
    (folder / "trace.salt").write_bytes(b"short")
    assert user_salt(folder) != salt


def test_a_writer_that_cannot_keep_up_holds_nobody_up(tmp_path: Path) -> None:
    """The thread blocks forever in a write to a pipe that nobody reads."""
    reading, writing = os.pipe()
    writer = Recorder(
        writing, model="tiny", block=1, token_nbytes=0, salt=SALT, max_queued_tokens=20_000
    )
    for _ in range(40):
        writer.record(served(range(5_000)))
    assert writer.n_dropped >= 40 - 2 - 4, "some are in the pipe, and four wait"
    os.close(reading)  # now the write fails, and the thread ends
    writer.close()


def test_what_is_being_written_takes_no_room_in_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, begun, gate = tmp_path / "trace.jsonl", threading.Event(), threading.Event()
    writer = recorder(path, max_queued_tokens=25)
    write = writer._write

    def held(request: ServedRequest) -> None:
        begun.set()
        assert gate.wait(60)
        write(request)

    monkeypatch.setattr(writer, "_write", held)
    writer.record(served(range(10)))
    assert begun.wait(60)
    for _ in range(2):
        writer.record(served(range(10)))
    gate.set()
    writer.close()
    assert writer.n_dropped == 0
    assert len(lines(path)) == 3


def test_a_trace_has_an_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "trace.jsonl"
    writer = recorder(path, max_file_nbytes=1000)
    for _ in range(20):
        writer.record(served(range(100, 110)))
    writer.close()
    assert path.stat().st_size <= 1000
    assert len(lines(path)) + writer.n_dropped == 20
    assert sum("recording stopped" in r.getMessage() for r in caplog.records) == 1


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"--record-trace .*nowhere"):
        open_trace(tmp_path / "nowhere" / "trace.jsonl")


def test_a_pipe_without_a_reader_keeps_no_start_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SetupError, match="--record-trace"):
        open_trace(tmp_path / "pipe")


def test_a_reader_that_falls_behind_gets_every_line_whole(tmp_path: Path) -> None:
    """Each line is longer than a pipe holds, and the reader pauses after every piece."""
    os.mkfifo(tmp_path / "pipe")
    reader, got = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK), bytearray()
    writer = recorder(tmp_path / "pipe", block=1)
    for _ in range(3):
        writer.record(served(range(5_000)))

    def has_all() -> bool:
        with contextlib.suppress(BlockingIOError):
            got.extend(os.read(reader, 1 << 14))
        return got.count(b"\n") == 3 or writer.n_dropped > 0

    wait_until(has_all)
    writer.close()
    os.close(reader)
    assert writer.n_dropped == 0
    assert [json.loads(line)["input_length"] for line in got.splitlines()] == [5_000] * 3


def test_closing_does_not_wait_for_a_reader_that_never_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(record, "END_S", 0.01)
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    writer = recorder(tmp_path / "pipe", block=1)
    for _ in range(3):
        writer.record(served(range(5_000)))
    wait_until(lambda: select.select([reader], [], [], 0)[0])  # the first is being written
    writer.close()
    assert "--record-trace: 3 requests are missing from the trace" in caplog.messages
    os.close(reader)  # now the write fails, and the thread ends
