"""Pictures in `firn chat`: names of files as people type and drop them, and what a refusal leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from firn.cli.talk.chat import typed_paths
from tests.cli.talk.chat_server import Terminal, Wire, serving


@pytest.mark.parametrize(
    "name", ["a.png", "my photo.png", "it's.png", 'say "firn".png', "a\\b.png"]
)
def test_a_file_that_is_there_is_taken_by_its_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    assert typed_paths(f"{tmp_path}/{name}") == [tmp_path / name]


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("/x/a.png /x/b.png", ["/x/a.png", "/x/b.png"]),
        (r"/x/my\ photo.png", ["/x/my photo.png"]),
        ("'/x/my photo.png' \"/x/b.png\"", ["/x/my photo.png", "/x/b.png"]),
        ("/x/it's.png", ["/x/it's.png"]),
        ("", []),
    ],
)
def test_as_a_shell_writes_them(text: str, want: list[str]) -> None:
    assert typed_paths(text) == [Path(p) for p in want]


def test_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    assert typed_paths("~/a.png '~/b.png'") == [Path("/home/ann/a.png"), Path("/home/ann/b.png")]


def test_a_refused_picture_is_not_sent_again(tmp_path: Path) -> None:
    def refuse(wire: Wire) -> None:
        wire.refuse(400, {"error": {"message": "the image is damaged."}})

    def answer(wire: Wire) -> None:
        wire.start()
        wire.delta(content="Yes.")
        wire.finish()

    files = [tmp_path / "a.png", tmp_path / "b.png"]
    for file in files:
        file.write_bytes(b"no picture")
    with serving(refuse, answer) as server, Terminal("--url", server.url) as terminal:
        terminal.wait_for("> ")
        terminal.type(f"/image {files[0]} {files[1]}\n")
        terminal.wait_for("2 pictures go with the next message")
        terminal.type("what?\n")
        terminal.wait_for("are dropped")
        terminal.type("are you there?\n")
        terminal.wait_for("first token after")
        assert terminal.exit_code(nudge="\x04") == 0
    refused, asked = (body["messages"] for body in server.bodies)
    assert [part["type"] for part in refused[0]["content"]] == ["image_url", "image_url", "text"]
    assert asked == [{"role": "user", "content": "are you there?"}]
