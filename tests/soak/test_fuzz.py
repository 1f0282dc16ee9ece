"""Whatever arrives over the wire: no 5xx, no growth, and /health answers all the while."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error

from tests.raw_fuzz import RawFuzzer
from tests.soak.house import (
    SMALL,
    House,
    always_healthy,
    ask,
    at_once,
    held_by,
    let_go_of_everything,
    sessions,
)

N_SHOTS = 4000
N_AT_ONCE = 4
N_EXAMPLES = 60


@pytest.mark.soak
def test_raw_bytes(tmp_path: Path) -> None:
    with House(tmp_path) as house:
        server = house.start(*SMALL)
        (talk,) = sessions(1)

        def shoot(seed: int, n: int) -> RawFuzzer:
            fuzzer = RawFuzzer(server.port, seed=seed)
            for _ in range(n):
                fuzzer.shoot()
            return fuzzer

        at_once(N_AT_ONCE, lambda k: shoot(1000 + k, 100))
        let_go_of_everything(server)
        before = held_by(server)
        with always_healthy(server):
            fuzzers = at_once(N_AT_ONCE, lambda k: shoot(k, N_SHOTS // N_AT_ONCE))
            assert ask(server.url, talk, 0).right
        errors = [error for fuzzer in fuzzers for error in fuzzer.server_errors]
        assert errors == []
        statuses = sum((fuzzer.statuses for fuzzer in fuzzers), Counter())
        print(f"{N_SHOTS} connections: {dict(statuses)}")
        assert min(statuses[200], statuses[400]) > N_SHOTS / 20, statuses
        let_go_of_everything(server)
        after = held_by(server)
        assert after.n_files <= before.n_files + 3
        assert after.rss_mib < before.rss_mib * 1.1 + 24
        assert ask(server.url, talk, 1).right
        assert server.stop() == 0
    assert "Traceback" not in house.log()


def try_everything(url: str, *, n_examples: int) -> Counter[int]:
    """Sends up to `n_examples` valid and invalid requests to each route; counts the statuses."""
    search = settings(
        max_examples=n_examples,
        database=None,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    described: Any = schemathesis.openapi.from_url(f"{url}/openapi.json")
    statuses: Counter[int] = Counter()
    for found in described.get_all_operations():
        operation = found.ok()
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            if mode is GenerationMode.NEGATIVE and not operation.body:
                continue

            @search
            @given(case=operation.as_strategy(generation_mode=mode))
            def check(case: schemathesis.Case) -> None:
                answer = case.call(timeout=120)
                statuses[answer.status_code] += 1
                case.validate_response(answer, checks=[not_a_server_error])

            check()
    return statuses


@pytest.mark.soak
def test_bodies_made_from_the_description(tmp_path: Path) -> None:
    """Valid bodies and invalid ones, for every route, on a real server."""
    with House(tmp_path) as house:
        server = house.start(*SMALL, "--max-tokens", "8")
        (talk,) = sessions(1)
        with always_healthy(server):
            try_everything(server.url, n_examples=10)
            let_go_of_everything(server)
            before = held_by(server)
            statuses = try_everything(server.url, n_examples=N_EXAMPLES)
        print(f"{sum(statuses.values())} requests: {dict(statuses)}")
        assert statuses[200] > 100
        assert statuses[400] > 100
        assert max(statuses) < 500
        let_go_of_everything(server)
        after = held_by(server)
        assert after.n_files <= before.n_files + 3
        assert after.rss_mib < before.rss_mib * 1.1 + 24
        assert ask(server.url, talk, 0).right
        assert server.stop() == 0
    assert "Traceback" not in house.log()
