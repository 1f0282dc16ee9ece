"""`firn chat --image`: the client sends pictures with the first message, as data URLs."""

from __future__ import annotations

import base64
from pathlib import Path

from tests.cli.talk.chat_server import Terminal, Wire, one_shot, serving

BYTES = b"\x89PNG not really"
URL = "data:image/png;base64," + base64.b64encode(BYTES).decode()


def answer(wire: Wire) -> None:
    wire.start()
    wire.delta(content="I see.")
    wire.finish()


def test_pictures_are_sent_with_the_question(tmp_path: Path) -> None:
    first, second = tmp_path / "a.png", tmp_path / "b.jpg"
    first.write_bytes(BYTES)
    second.write_bytes(BYTES)
    with serving(answer) as server:
        run = one_shot(server.url, "what?", "--image", str(first), "--image", str(second))
    assert run.returncode == 0, run.stderr
    (message,) = server.bodies[0]["messages"]
    assert message["content"] == [
        {"type": "image_url", "image_url": {"url": URL}},
        {"type": "image_url", "image_url": {"url": URL.replace("png", "jpeg")}},
        {"type": "text", "text": "what?"},
    ]


def test_a_file_that_is_not_there_is_a_wrong_flag(tmp_path: Path) -> None:
    with serving(answer) as server:
        run = one_shot(server.url, "what?", "--image", str(tmp_path / "none.png"))
    assert run.returncode == 2
    assert run.stderr.startswith("firn: ")
    assert "none.png: the picture cannot be read: No such file" in run.stderr
    assert server.bodies == []


def test_a_picture_in_a_conversation(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(BYTES)
    with serving(answer, answer) as server, Terminal("--url", server.url) as terminal:
        terminal.wait_for("> ")
        terminal.type("/image /nowhere.png\n")
        terminal.wait_for("cannot be read")
        terminal.type(f"/image {file}\n")
        terminal.wait_for("with the next message")
        terminal.type("what?\n")
        terminal.wait_for("first token after")
        terminal.type("and now?\n")
        terminal.wait_for("first token after")
        assert terminal.exit_code(nudge="\x04") == 0
    first, _, second = server.bodies[1]["messages"]
    assert [part["type"] for part in first["content"]] == ["image_url", "text"]
    assert second["content"] == "and now?"
