"""What a terminal shows when the server listens."""

from __future__ import annotations

import io
import logging
import socket
from contextlib import closing

import pytest

from firn.api.routes.agents import AGENTS
from firn.config import Config, PageConfig, ServerConfig
from firn.listener import bind
from firn.welcome import announce, local_url, welcome


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_is_told_where_the_page_and_the_api_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "firn")
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with closing(bind("127.0.0.1", 0)) as sock:
        announce("a-model", sock, Config())
        url = local_url(sock)
    shown = dict(line.strip().split("  ", 1) for line in terminal.getvalue().splitlines() if line)
    assert shown["dashboard and chat"].strip() == url
    assert shown["OpenAI's API"].strip() == f"{url}/v1"
    assert shown["Anthropic's, Ollama's"].strip() == url, "their clients add the rest themselves"
    assert shown["connect an agent"].strip() == f"firn agents claude --url {url}"
    assert {"claude", *shown["other agents"].strip().split(", ")} == set(AGENTS)
    assert max(map(len, terminal.getvalue().splitlines())) <= 80
    (line,) = caplog.messages
    assert "serves a-model" in line
    assert f"{url}/v1" in line
    assert f"{url} " in line


def test_a_log_gets_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "firn")
    file = io.StringIO()
    monkeypatch.setattr("sys.stderr", file)
    with closing(bind("127.0.0.1", 0)) as sock:
        announce("a-model", sock, Config())
    assert file.getvalue() == ""
    assert len(caplog.messages) == 1


def test_what_there_is_not_is_not_named() -> None:
    url = f"http://127.0.0.1:{ServerConfig().port}"
    shown = welcome(url, Config(page=PageConfig(no_dashboard=True)), is_public=False)
    assert "dashboard" not in shown
    assert "--url" not in shown, "it is where the commands look by themselves"


def test_every_address_is_typed_as_one_that_works() -> None:
    with closing(bind("0.0.0.0", 0)) as sock:
        url = local_url(sock)
        assert url == f"http://127.0.0.1:{sock.getsockname()[1]}"
        assert socket.gethostname() in welcome(url, Config(), is_public=True)
