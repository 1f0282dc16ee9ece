#!/usr/bin/env python3
# <xbar.title>firn</xbar.title>
# <xbar.desc>What a firn server on this Mac is doing.</xbar.desc>
# <xbar.dependencies>python3</xbar.dependencies>
# <xbar.var>string(FIRN_URL="http://127.0.0.1:8000"): The server.</xbar.var>
# <xbar.var>string(FIRN_API_KEY=""): A key, if the server wants one.</xbar.var>
"""firn in the menu bar of a Mac, by SwiftBar or xbar: link this file into their plugin folder.

The number in its name is how often it looks. Reads /health, and the first state of /v1/activity.
Needs nothing but Python 3.9.
"""

from __future__ import annotations

import json
import os
import shutil
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.error import HTTPError

URL = os.environ.get("FIRN_URL", "http://127.0.0.1:8000").rstrip("/")
KEY = os.environ.get("FIRN_API_KEY", "")
TIMEOUT_S = 2.0


def opened(path: str) -> Any:
    headers = {"authorization": f"Bearer {KEY}"} if KEY else {}
    request = urllib.request.Request(URL + path, headers=headers)
    return urllib.request.urlopen(request, timeout=TIMEOUT_S)


def state() -> dict | None:
    """What the dashboard would show; None: it was not told in time. Raises HTTPError."""
    try:
        with opened("/v1/activity") as lines:
            name = ""
            for raw in lines:
                field, _, value = raw.decode().strip().partition(": ")
                if field == "event":
                    name = value
                elif field == "data" and name == "state":
                    return json.loads(value)
    except HTTPError:
        raise
    except (OSError, ValueError):
        pass
    return None


def menu() -> Iterator[str]:
    try:
        with opened("/health") as answer:
            health = json.load(answer)
        now = state()
    except HTTPError as e:
        yield from ("firn !", "---", f"{URL}: {clean(e)}", dashboard())
        return
    except (OSError, ValueError):
        yield from ("firn –", "---", f"No server answers at {URL}", *service("restart"))
        return
    engine = health.get("engine") or {}
    writing, reading, waiting = (engine.get(k, 0) for k in ("decoding", "prefilling", "waiting"))
    numbers = f" {writing + reading}+{waiting}" if waiting else f" {writing + reading}"
    yield f"firn{numbers if writing or reading or waiting else ''}"
    yield "---"
    yield clean(health.get("model", "firn"))
    yield f"{writing} writing, {reading} reading, {waiting} waiting"
    yield from state_lines(now or {})
    yield "---"
    yield dashboard()
    yield from service("restart")


def state_lines(now: dict) -> Iterator[str]:
    yield from cache_lines(now.get("cache") or {})
    mlx = now.get("mlx_bytes") or {}
    if "active" in mlx:
        yield f"MLX holds {size(mlx['active'] + mlx.get('cached', 0))}"


def cache_lines(cache: dict) -> Iterator[str]:
    tokens = cache.get("tokens") or {}
    if tokens.get("prompt"):
        share = tokens.get("cached", 0) / tokens["prompt"]
        yield f"{share:.0%} of {tokens['prompt']:,} prompt tokens were reused"
    memory = cache.get("memory") or {}
    if "used_bytes" in memory:
        yield f"{size(memory['used_bytes'])} of prefixes in memory"


def dashboard() -> str:
    return f"Open the dashboard | href={URL}"


def service(verb: str) -> Iterator[str]:
    """A line that runs `firn service`, if firn is where menu bar programs find it."""
    places = os.pathsep.join(
        ("/opt/homebrew/bin", "/usr/local/bin", os.path.expanduser("~/.local/bin"))
    )
    firn = shutil.which("firn", path=f"{os.environ.get('PATH', '')}{os.pathsep}{places}")
    if firn:
        words = f'bash="{firn}" param1=service param2={verb} terminal=false refresh=true'
        yield f"{verb.capitalize()} the service | {words}"


def size(nbytes: float) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.0f} MiB"


def clean(value: object) -> str:
    """In a menu, what follows a bar is a parameter, and a line is an item."""
    return " ".join(str(value).replace("|", "/").split())


if __name__ == "__main__":
    print("\n".join(menu()))
