"""Four real models, with room for two: 200 random requests, none cut off, every answer right."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from firn.demo.facts import make_session
from firn.fleet.placement import PlacementRules
from tests.fleet.fronts import NEED_GB, config, fronting
from tests.zoo import write_folder

PAIR, TINY = ("firn-demo", "firn-demo-hybrid"), ("llama", "gemma3_text")
SESSIONS = [
    make_session(i, n_facts=6, n_questions=6, kinds=("fact",), placement="system") for i in range(4)
]


@pytest.mark.soak
def test_200_random_requests_to_many_models_are_answered_right(tmp_path: Path) -> None:
    for name in TINY:
        write_folder(name, tmp_path / "models" / name)
    flags: dict[str, Any] = {
        "fleet.models_dir": str(tmp_path / "models"),
        "fleet.model_memory_gb": str(NEED_GB * 2 + 0.15),
    }
    made = config(*PAIR, tmp=tmp_path, **flags)
    rng = random.Random(11)
    orders = [(rng.choice(PAIR + TINY), rng.randrange(4), rng.randrange(6)) for _ in range(200)]

    def one(order: tuple[str, int, int]) -> int:
        name, i, n = order
        session = SESSIONS[i]
        reply = front.client.chat.completions.create(
            model=name, messages=session.messages(n), max_tokens=48, temperature=0
        )
        assert reply.model == name
        assert reply.usage is not None
        assert reply.choices[0].finish_reason in ("stop", "length")
        if name in PAIR:
            assert reply.choices[0].message.content == session.questions[n].answer
        details = reply.usage.prompt_tokens_details
        return (details.cached_tokens or 0) if details else 0

    rules = PlacementRules(min_stay_s=0.5, turn_min_s=5, turn_max_s=5, hold_max_s=2)
    with fronting(made, rules=rules) as front:
        with ThreadPoolExecutor(8) as pool:
            cached = list(pool.map(one, orders))
        models = front.parts.fleet.models.values()
        n_loads = sum(model.n_loads for model in models)
        print(f"{n_loads} loads for 200 requests, {sum(n > 0 for n in cached)} of them cached")
        assert n_loads > 4
        assert not any(model.traffic.n_active or model.traffic.waiters for model in models)
