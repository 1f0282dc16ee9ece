"""`firn chat` as users meet it: in a pipe, in a terminal, with Ctrl-C, and without a server."""

from __future__ import annotations

import contextlib
import os
import pty
import shlex
import signal
import socket
import subprocess
import threading
from pathlib import Path

import httpx
import pytest

from firn.cli.client import (
    ChatClient,
    ChatOptions,
    ChatTurn,
    ReplyText,
    RequestFailed,
    SseComment,
    SseData,
    SseDecoder,
)
from firn.cli.talk.chat import ChatReply, summary
from firn.core.values import Usage
from tests.cli.talk.chat_server import CHAT, CLEAN, Terminal, Wire, one_process, one_shot, serving

# --- one question --------------------------------------------------------------------------


def hello(wire: Wire) -> None:
    wire.start()
    wire.raw(": prefill 4/9\n\n: keep-alive\n\n")
    wire.delta(role="assistant", content="")
    wire.delta(reasoning_content="Let me see.")
    wire.delta(content="Hé")
    wire.delta(content="llo [bold]you[/bold] \x1b[31m")
    wire.finish()


def test_a_reply_goes_to_stdout_and_the_rest_to_stderr() -> None:
    with serving(hello) as server:
        run = one_process(server.url, "hi", "--max-tokens", "5", "--temperature", "0")
    assert run.returncode == 0, run.stderr
    assert run.stdout == "Héllo [bold]you[/bold] \x1b[31m\n"
    thought, counts = run.stderr.splitlines()
    assert thought == "Let me see."
    assert counts.startswith("4 tokens, 9 of prompt (5 cached), first token after ")
    (body,) = server.bodies
    assert body["model"] == "tiny"
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert body["max_tokens"] == 5
    assert body["temperature"] == 0
    assert server.messages == [("user", "hi")]


@pytest.mark.parametrize(
    ("arguments", "stdin", "messages"),
    [
        ([], "from a pipe\n", [("user", "from a pipe\n")]),
        (["review:"], "diff\n", [("user", "review:\n\ndiff\n")]),
        (["hi", "--system", "Be brief."], "", [("system", "Be brief."), ("user", "hi")]),
    ],
)
def test_what_is_asked(arguments: list[str], stdin: str, messages: list[tuple[str, str]]) -> None:
    with serving(hello) as server:
        run = one_shot(server.url, *arguments, "--model", "mine", stdin=stdin)
    assert run.returncode == 0, run.stderr
    assert server.messages == messages
    assert server.bodies[0]["model"] == "mine"
    assert "max_tokens" not in server.bodies[0]


def test_the_key_and_the_address_may_come_from_the_environment() -> None:
    with serving(hello, key="k") as server:
        address = server.url.removeprefix("http://") + "/v1/"
        run = one_process(address, "hi", FIRN_API_KEY="k", HTTP_PROXY="http://127.0.0.1:9")
    assert run.returncode == 0, run.stderr


def test_a_reply_cut_by_the_token_limit_says_so() -> None:
    def cut(wire: Wire) -> None:
        wire.start()
        wire.delta(content="long")
        wire.finish("length")

    with serving(cut) as server:
        run = one_shot(server.url, "hi")
    assert run.returncode == 0
    assert "cut at the token limit" in run.stderr


# --- what goes wrong -----------------------------------------------------------------------


def breaks_off(wire: Wire) -> None:
    wire.start()
    wire.delta(content="half")


def fails_late(wire: Wire) -> None:
    wire.start()
    wire.delta(content="half")
    wire.data({"error": {"message": "the model fell over", "code": "generation_failed"}})


def speaks_gibberish(wire: Wire) -> None:
    wire.start()
    wire.raw("data: {nope\n\n")


def too_long(wire: Wire) -> None:
    wire.refuse(400, {"error": {"message": "This prompt has 9 tokens.\nToo many."}})


def bad_gateway(wire: Wire) -> None:
    wire.refuse(502, "<html>")


@pytest.mark.parametrize(
    ("script", "line"),
    [
        (breaks_off, "ended the reply before it was finished"),
        (fails_late, "the model fell over"),
        (speaks_gibberish, "not JSON"),
        (too_long, "answered 400: This prompt has 9 tokens. Too many."),
        (bad_gateway, "answered 502: <html>"),
    ],
)
def test_a_fault_is_one_line(script: object, line: str) -> None:
    with serving(script) as server:  # type: ignore[arg-type]
        run = one_shot(server.url, "hi")
    assert run.returncode == 1
    last = run.stderr.splitlines()[-1]
    assert last.startswith("firn: ")
    assert line in last
    assert "Traceback" not in run.stderr


def test_no_server_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    run = one_process(url, "hi")
    assert run.returncode == 1
    assert run.stderr == (
        f"firn: No server answers at {url}; start one with `firn serve` or give --url.\n"
    )


def test_something_that_takes_connections_and_says_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with (
            ChatClient(url, list_timeout_s=0.1) as client,
            pytest.raises(RequestFailed, match="accepts connections but does not answer"),
        ):
            client.served_models()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "requires an API key: give --api-key or set FIRN_API_KEY."),
        (["--api-key", "wrong"], "does not accept this API key."),
        (["--model", "tiny", "--api-key", "wrong"], "does not accept this API key."),
    ],
)
def test_a_missing_or_wrong_key_is_one_line(arguments: list[str], line: str) -> None:
    with serving(key="right") as server:
        run = one_shot(server.url, "hi", *arguments)
    assert run.returncode == 1
    assert run.stderr == f"firn: {server.url} {line}\n"


@pytest.mark.parametrize("models", [{}, {"data": []}, [], "text"])
def test_another_kind_of_server_is_one_line(models: object) -> None:
    with serving(models=models) as server:
        run = one_shot(server.url, "hi")
    assert run.returncode == 1
    assert "does not look like an OpenAI-style server" in run.stderr


@pytest.mark.parametrize("url", ["ftp://x", "http://[", "http://a b", "://"])
def test_an_address_that_is_none(url: str) -> None:
    run = one_shot(url, "hi")
    assert run.returncode == 1
    assert run.stderr.startswith("firn: ")
    assert run.stderr.count("\n") == 1


def test_bytes_that_are_no_text_are_one_line() -> None:
    with serving() as server:
        command = [*CHAT, "--url", server.url, "what is this?"]
        for utf8 in "01":  # how Python reads stdin differs
            run = subprocess.run(
                command,
                input=b"caf\xe9",
                capture_output=True,
                env=CLEAN | {"PYTHONUTF8": utf8},
                timeout=60,
            )
            assert (run.returncode, run.stderr) == (1, b"firn: The message is not UTF-8 text.\n")


def test_without_stdin_the_argument_is_asked() -> None:
    with serving(hello) as server:
        script = f"{shlex.join([*CHAT, '--url', server.url, 'hi'])} <&-"
        run = subprocess.run(["sh", "-c", script], capture_output=True, env=CLEAN, timeout=60)
    assert run.returncode == 0, run.stderr
    assert server.messages == [("user", "hi")]


def test_a_terminal_that_cannot_show_a_character() -> None:
    with serving(hello) as server:
        run = one_process(server.url, "hi", PYTHONIOENCODING="ascii")
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("H?llo")


def test_nothing_to_ask_is_wrong_usage() -> None:
    with serving() as server:
        run = one_shot(server.url, "  ")
    assert run.returncode == 2
    assert "nothing to ask" in run.stderr


# --- Ctrl-C --------------------------------------------------------------------------------


LOST_S = 15.0


class Endless:
    """Sends one word, then waits until the client is gone."""

    def __init__(self, text: str = "one ") -> None:
        self.client_is_gone = threading.Event()
        self._text = text

    def __call__(self, wire: Wire) -> None:
        with contextlib.suppress(ConnectionError):  # it may be gone already
            wire.start()
            if self._text:
                wire.delta(content=self._text)
            wire.wait_until_client_is_gone()
        self.client_is_gone.set()

    def is_interrupted(self, terminal: Terminal) -> None:
        """Sends Ctrl-C, and again if nothing happens: Python notices a signal that arrives just
        before it waits for a socket only after the wait."""
        terminal.interrupt()
        if not self.client_is_gone.wait(LOST_S):
            terminal.interrupt()
            assert self.client_is_gone.wait(60)


def two(wire: Wire) -> None:
    wire.start()
    wire.delta(content="two\x1b[2J")
    wire.finish()


def test_ctrl_c_stops_the_reply_and_the_conversation_goes_on() -> None:
    endless = Endless()
    with serving(endless, two) as server, Terminal("--url", server.url) as terminal:
        terminal.wait_for("> ")
        terminal.type("count\n")
        terminal.wait_for("one ")
        endless.is_interrupted(terminal)
        terminal.wait_for("stopped")
        terminal.wait_for("> ")
        terminal.type("go on\n")
        terminal.wait_for("two")
        terminal.wait_for("4 tokens, 9 of prompt (5 cached)")
        terminal.wait_for("> ")
        terminal.type("\x04")
        assert terminal.exit_code() == 0
    assert server.messages == [("user", "count"), ("assistant", "one "), ("user", "go on")]
    assert "\x1b[2J" not in terminal.shown


def test_what_is_typed_ahead_is_asked_next_and_garbles_no_reply() -> None:
    typed = threading.Event()

    def slow(wire: Wire) -> None:
        wire.start()
        wire.delta(content="one ")
        assert typed.wait(60)
        wire.delta(content="more")
        wire.finish()

    with serving(slow, two) as server, Terminal("--url", server.url) as terminal:
        terminal.wait_for("> ")
        terminal.type("count\n")
        terminal.wait_for("one ")
        terminal.type("and then?\n")
        typed.set()
        terminal.wait_for("more")
        assert "one more" in terminal.shown, "nothing is between the two pieces"
        terminal.wait_for("two")
        terminal.wait_for("> ")
        terminal.type("\x04")
        assert terminal.exit_code() == 0
    assert server.messages[-1] == ("user", "and then?")


def test_what_was_typed_can_be_recalled_in_the_next_chat(tmp_path: Path) -> None:
    for typed in ("what is firn?\n", "\x10\x10\n"):  # Ctrl-P: the line before; the last was /exit
        with serving(two) as server, Terminal("--url", server.url, home=tmp_path) as terminal:
            terminal.wait_for("> ")
            terminal.type(typed)
            terminal.wait_for("two")
            terminal.wait_for("> ")
            terminal.type("/exit\n")
            assert terminal.exit_code() == 0
        assert server.messages == [("user", "what is firn?")]
    (history,) = tmp_path.rglob("chat_history")
    made = (history, *history.parents[: list(history.parents).index(tmp_path)])
    assert [path.name for path in made if path.stat().st_mode & 0o077] == []


def test_markdown_is_styled_in_a_terminal_with_colours() -> None:
    def marked(wire: Wire) -> None:
        wire.start()
        wire.delta(content="a **bo")
        wire.delta(content="ld** word")
        wire.finish()

    with (
        serving(marked) as server,
        Terminal("--url", server.url, term="xterm-256color") as terminal,
    ):
        terminal.wait_for("> ")
        terminal.type("hi\n")
        terminal.wait_for("\x1b[1mbold\x1b[0m word")


def test_ctrl_c_before_the_first_token_forgets_the_question() -> None:
    endless = Endless("")
    asked = threading.Event()

    def silent(wire: Wire) -> None:
        asked.set()
        endless(wire)

    with serving(silent, two) as server, Terminal("--url", server.url) as terminal:
        terminal.wait_for("> ")
        terminal.type("never mind\n")
        assert asked.wait(60)
        endless.is_interrupted(terminal)
        terminal.wait_for("stopped")
        terminal.wait_for("> ")
        terminal.type("hi\n")
        terminal.wait_for("two")
        terminal.wait_for("> ")
        terminal.type("/exit\n")
        assert terminal.exit_code() == 0
    assert server.messages == [("user", "hi")]


def test_ctrl_c_just_after_the_request_was_sent_drops_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted at a moment when httpx would leave the connection open."""
    send, endless, options = httpx.Client._send_single_request, Endless(""), ChatOptions("tiny")

    def interrupted(client: httpx.Client, request: httpx.Request) -> httpx.Response:
        send(client, request)
        raise KeyboardInterrupt

    with serving(endless, two) as server, ChatClient(server.url) as client:
        with monkeypatch.context() as patch:
            patch.setattr(httpx.Client, "_send_single_request", interrupted)
            with pytest.raises(KeyboardInterrupt):
                next(client.ask([ChatTurn("user", "never mind")], options=options))
        assert endless.client_is_gone.wait(60)
        pieces = list(client.ask([ChatTurn("user", "hi")], options=options))
        assert ReplyText("two\x1b[2J") in pieces


def test_a_second_ctrl_c_leaves() -> None:
    with serving() as server, Terminal("--url", server.url) as terminal:
        terminal.wait_for("> ")
        terminal.wait_for("Press Ctrl-C again, or Ctrl-D, to leave.", nudge="\x03")
        terminal.wait_for("> ")
        assert terminal.exit_code(nudge="\x03") == 0


def test_ctrl_c_after_a_stopped_reply_leaves() -> None:
    endless = Endless()
    with serving(endless) as server, Terminal("--url", server.url) as terminal:
        terminal.wait_for("> ")
        terminal.type("count\n")
        terminal.wait_for("one ")
        terminal.type("\x03")
        assert endless.client_is_gone.wait(60)
        terminal.wait_for("> ")
        assert terminal.exit_code(nudge="\x03") == 0


def test_ctrl_c_in_a_pipe_exits_130() -> None:
    endless = Endless()
    with serving(endless) as server:
        process = subprocess.Popen(
            [*CHAT, "--url", server.url, "hi"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=CLEAN,
        )
        assert process.stdout is not None
        assert process.stdout.read(4) == "one "
        process.send_signal(signal.SIGINT)
        assert endless.client_is_gone.wait(60)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.startswith("stopped")


# --- the terminal --------------------------------------------------------------------------


def test_commands_and_faults_leave_the_conversation_running() -> None:
    with serving(too_long, two) as server, Terminal("--url", server.url) as terminal:
        for typed, answer in (
            ("/help", "/reset"),
            ("/system", "System prompt: none"),
            ("/system Be brief.", "System prompt: Be brief."),
            ("/dance", "There is no command /dance"),
            ("", ""),
            ("far too long", "answered 400: This prompt has 9 tokens."),
            ("hi", "two"),
            ("/reset", "The conversation is forgotten."),
        ):
            terminal.wait_for("> ")
            terminal.type(f"{typed}\n")
            terminal.wait_for(answer)
        terminal.wait_for("> ")
        terminal.type("/quit\n")
        assert terminal.exit_code() == 0
    assert server.messages == [("system", "Be brief."), ("user", "hi")]


def test_a_long_prompt_shows_how_far_the_server_is() -> None:
    shown = threading.Event()

    def slow(wire: Wire) -> None:
        wire.start()
        wire.raw(": prefill 512/4000\n\n")
        assert shown.wait(60)
        wire.delta(reasoning="Hm.")
        wire.delta(content="done")
        wire.finish()

    with serving(slow) as server, Terminal("--url", server.url, term="xterm") as terminal:
        terminal.wait_for("> ")
        terminal.type("hi\n")
        terminal.wait_for("reading the prompt: 512 of 4000 tokens")
        shown.set()
        terminal.wait_for("Hm.")
        terminal.wait_for("done")
        terminal.wait_for("4 tokens")


def test_a_conversation_leaves_only_its_replies_in_a_pipe() -> None:
    """As in `firn chat | tee replies.txt`."""
    keyboard, slave = pty.openpty()
    os.write(keyboard, b"hi\n\x04")
    with serving(two) as server:
        run = subprocess.run(
            [*CHAT, "--url", server.url], stdin=slave, capture_output=True, env=CLEAN, timeout=60
        )
    os.close(slave)
    os.close(keyboard)
    assert (run.returncode, run.stdout) == (0, b"two\x1b[2J\n")
    assert run.stderr.count(b"> ") == 2


def test_the_terminal_needs_a_server_first() -> None:
    with serving(key="k") as server, Terminal("--url", server.url) as terminal:
        assert terminal.exit_code() == 1
    assert "requires an API key" in terminal.shown


# --- parts ---------------------------------------------------------------------------------

STREAM = (
    ': prefill 1/2\r\n\r\ndata: {"a": "é"}\r\n\r\nevent: x\ndata: one\ndata:two\n\n\n'
    "id: 3\nretry: 5\n\ndata: [DONE]\n\ndata: never closed\n"
).encode()
EVENTS = [SseComment("prefill 1/2"), SseData('{"a": "é"}'), SseData("one\ntwo"), SseData("[DONE]")]


@pytest.mark.parametrize("cut", range(len(STREAM) + 1))
def test_events_come_out_whole_at_every_cut(cut: int) -> None:
    decoder = SseDecoder()
    events = decoder.feed(STREAM[:cut]) + decoder.feed(STREAM[cut:]) + decoder.flush()
    assert events == EVENTS


def test_events_come_out_whole_byte_by_byte() -> None:
    decoder = SseDecoder()
    assert [event for byte in STREAM for event in decoder.feed(bytes([byte]))] == EVENTS


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        (
            ChatReply("a", Usage(10, 11, 8), 0.5, 1.5, stopped=False, reason="stop"),
            "11 tokens, 10 of prompt (8 cached), first token after 0.50 s, 10 tokens/s",
        ),
        (
            ChatReply("a", Usage(10, 1, 0), 0.5, 0.5, stopped=False, reason="length"),
            "1 tokens, 10 of prompt (0 cached), first token after 0.50 s, cut at the token limit",
        ),
        (
            ChatReply("a", Usage(10, 18, 0), 0.5, 0.500001, stopped=False, reason="stop"),
            "18 tokens, 10 of prompt (0 cached), first token after 0.50 s",
        ),
        (ChatReply("", None, None, 1.0, stopped=True, reason=None), "stopped"),
        (ChatReply("", None, None, 1.0, stopped=False, reason="stop"), ""),
    ],
)
def test_the_line_after_a_reply(reply: ChatReply, text: str) -> None:
    assert summary(reply) == text
