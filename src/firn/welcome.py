"""What a person reads in the terminal once the server listens: where it is and what to do with it.

Logs get one line; the rest is printed only where somebody looks on.
"""

from __future__ import annotations

import logging
import shlex
import socket
import sys

from firn import __version__
from firn.config import Config, ServerConfig
from firn.listener import address

log = logging.getLogger("firn")

ANY = ("0.0.0.0", "::")
DEFAULT_URL = f"http://127.0.0.1:{ServerConfig().port}"


def announce(names: str, sock: socket.socket, config: Config) -> None:
    """names: of the models that are served."""
    url = local_url(sock)
    log.info("firn %s serves %s at %s (the API at %s/v1)", __version__, names, url, url)
    if sys.stderr.isatty():
        print(welcome(url, config, is_public=sock.getsockname()[0] in ANY), file=sys.stderr)


def local_url(sock: socket.socket) -> str:
    """The server's address as a program on this machine would type it."""
    host, port = sock.getsockname()[:2]
    if host == "0.0.0.0":
        return f"http://127.0.0.1:{port}"
    return f"http://[::1]:{port}" if host == "::" else address(sock)


def welcome(url: str, config: Config, *, is_public: bool) -> str:
    there = "" if url == DEFAULT_URL else f" --url {shlex.quote(url)}"
    rows = [] if config.page.no_dashboard else [("dashboard and chat", url)]
    rows += [
        ("OpenAI's API", f"{url}/v1"),
        ("Anthropic's, Ollama's", url),
        ("chat here", f"firn chat{there}"),
        ("connect an agent", f"firn agents claude{there}"),
        ("other agents", "codex, opencode, aider, qwen, cline, continue"),
    ]
    if is_public:
        port = url.rpartition(":")[2]
        rows.append(("other machines", f"http://{socket.gethostname()}:{port}"))
    rows.append(("stop", "Ctrl-C"))
    return "\n" + "".join(f"  {name:23}{text}\n" for name, text in rows)
