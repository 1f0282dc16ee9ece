"""`firn service` as its user lives with it: installed, asked, installed again over the one that runs,
restarted, removed. Run by the workflow on Macs, and by `make mac`.

    python tools/service_round.py [--port 8791]

Uses the real supervisor of this user. Refuses to touch a service that is installed already.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from urllib.error import URLError

START_S = 120.0
MODEL = "firn-demo"


class Failed(Exception):
    pass


def firn(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "firn", "service", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    print(
        f"firn service {' '.join(arguments)}: {done.returncode} {done.stdout}{done.stderr}".strip()
    )
    return done


def expect(*arguments: str) -> str:
    done = firn(*arguments)
    if done.returncode:
        raise Failed(f"firn service {arguments[0]} failed: {done.stderr.strip()}")
    return done.stdout


def answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False


def wait(port: int, *, up: bool) -> None:
    until = time.monotonic() + START_S
    while answers(port) != up:
        if time.monotonic() > until:
            firn("status")
            firn("logs", "-n", "100")
            raise Failed(
                f"after {START_S:.0f} s the service {'does not answer' if up else 'answers'}"
            )
        time.sleep(0.2)


def reply(port: int) -> int:
    """Tokens of a reply."""
    body = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return int(json.load(answer)["usage"]["completion_tokens"])


def round_trip(port: int) -> None:
    if firn("status").stdout.strip() != "not installed":
        raise Failed("a service is installed already: it is left alone")
    try:
        for number in (1, 2):  # the second over the first, which runs
            expect("install", MODEL, "--port", str(port))
            wait(port, up=True)
            print(f"install {number}: a reply of {reply(port)} tokens")
        expect("restart")
        wait(port, up=True)
        if "running" not in expect("status"):
            raise Failed("the service runs, and status does not say so")
        print(f"after the restart: a reply of {reply(port)} tokens")
        firn("logs", "-n", "20")
    finally:
        firn("uninstall")
    wait(port, up=False)
    if firn("status").stdout.strip() != "not installed":
        raise Failed("the service is still there after uninstall")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--port", type=int, default=8791)
    try:
        round_trip(parser.parse_args(arguments).port)
    except Failed as e:
        print(f"failed: {e}", file=sys.stderr)
        return 1
    print("firn service works")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
