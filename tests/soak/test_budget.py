"""More requests than memory holds, all the time: they wait for their turn, and none fails."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import zoo
from tests.soak.house import House, always_healthy, at_once, held_by, let_go_of_everything
from tests.zoo import folder as zoo_folder

N_REQUESTS = 120
N_CLIENTS = 12
N_WORDS = 300
CAPACITY_MIB = 256
"""A server's capacity for live requests if the headroom leaves it nothing."""


def write_model(path: Path) -> None:
    """Cheap to compute, but with 64 KiB of keys and values for every token."""
    entry = zoo.ZOO["llama"]
    config = {
        **entry.config,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 128,
    }
    zoo_folder.write(zoo.build_entry(replace(entry, config=config)), config, path)


def prompt(rng: random.Random) -> str:
    """One of a few shared beginnings, and its own end."""
    shared = random.Random(rng.randrange(4))
    words = [str(shared.randrange(100)) for _ in range(N_WORDS)]
    n = rng.choice([20, 100, N_WORDS])
    return " ".join([*words[:n], str(rng.random())])


@pytest.mark.soak
def test_requests_wait_for_memory_and_none_fails(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    with House(tmp_path) as house:
        server = house.start(
            "--scheduler-headroom-gb", "4096", "--cache-memory-mb", "64", "--cache-block-tokens", "32",
            "--max-concurrency", "16", "--max-queue", "64", "--no-ssd-cache",
            model=str(tmp_path / "model"),
        )  # fmt: skip
        url = f"{server.url}/v1/completions"
        small: dict[str, Any] = {"prompt": "1 2 3", "max_tokens": 4, "ignore_eos": True}
        assert httpx.post(url, json=small, timeout=120).status_code == 200
        let_go_of_everything(server)
        before, high = held_by(server), [0.0]

        def client(number: int) -> int:
            rng = random.Random(number)
            n_tokens = 0
            with httpx.Client(timeout=300) as connection:
                for _ in range(N_REQUESTS // N_CLIENTS):
                    body = {
                        "prompt": prompt(rng),
                        "max_tokens": rng.choice([1, 8, 60]),
                        "n": rng.choice([1, 1, 1, 3]),
                        "ignore_eos": True,
                        "seed": number,
                    }
                    answer = connection.post(url, json=body)
                    assert answer.status_code == 200, answer.text
                    used = answer.json()["usage"]["completion_tokens"]
                    assert used == body["max_tokens"] * body["n"]
                    n_tokens += used
                    high[0] = max(high[0], held_by(server).rss_mib)
            return n_tokens

        with always_healthy(server):
            n_tokens = at_once(N_CLIENTS, client)
        assert all(n_tokens)
        # A request that can never fit is refused.
        never = httpx.post(url, json={"prompt": "7 " * 8_000, "max_tokens": 1}, timeout=120)
        assert never.status_code == 400
        let_go_of_everything(server)
        after = held_by(server)
        print(
            f"{N_REQUESTS} requests, {sum(n_tokens)} tokens; "
            f"{before}, at most {high[0]:.0f} MiB, {after}"
        )
        assert high[0] < before.rss_mib + 6 * CAPACITY_MIB, high
        assert after.n_files <= before.n_files + 2
        assert server.stop() == 0
    assert "Traceback" not in house.log()
