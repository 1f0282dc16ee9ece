"""Every metric is in the table of docs/metrics.md, and the Grafana dashboard uses no others."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from firn.config import CacheConfig, Config, ModelConfig, ServerConfig
from tests.api.real import Real, serving
from tests.metrics_table import DOCS, HISTOGRAM, documented, shown


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    tmp = tmp_path_factory.mktemp("metrics")
    config = Config(
        server=ServerConfig(api_keys=("alice", "bob"), admin_keys=("root",)),
        model=ModelConfig(path="firn-demo"),
        cache=CacheConfig(cache_memory_mb=64, cache_block_tokens=16, ssd_cache_dir=tmp / "ssd"),
    )
    with serving(Path("firn-demo"), config=config) as real:
        text = "Say something about snow that has outlived its season, please. " * 4
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 4}
        for _ in range(2):
            ask(real, "alice").post("/v1/chat/completions", json=body).raise_for_status()
        yield real


def ask(real: Real, key: str) -> httpx.Client:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.Client(base_url=real.url, headers=headers, timeout=60)


def test_the_operator_sees_what_the_table_says(server: Real) -> None:
    table, _, of_the_front = documented()
    found = shown(ask(server, "root").get("/metrics").text)
    assert found.keys() == table.keys() - of_the_front
    for name, metric in found.items():
        assert metric.kind == table[name].kind, name
        assert metric.labels <= table[name].labels, name


def test_a_key_sees_what_the_table_says(server: Real) -> None:
    _, of_a_key, _ = documented()
    assert shown(ask(server, "alice").get("/metrics").text).keys() == of_a_key


def test_a_key_sees_how_many_of_its_records_were_stored(server: Real) -> None:
    stored = re.compile(r'^firn_cache_commits_total\{part="pages"\} (\S+)$', re.MULTILINE)
    found = {
        k: stored.findall(ask(server, k).get("/metrics").text) for k in ("alice", "bob", "root")
    }
    assert found["alice"] == found["root"] != []
    assert found["bob"] == []
    stats = ask(server, "alice").get("/v1/cache/stats").json()
    assert stats["commits"]["pages"] == float(found["alice"][0]) > 0


def test_numbers_of_tiers(server: Real) -> None:
    text = ask(server, "root").get("/metrics").text
    assert re.search(r'firn_cache_limit_bytes\{tier="memory"\} 6\.7\d+e\+07', text)
    assert 'firn_cache_limit_bytes{tier="ssd"}' in text


def test_the_dashboard_asks_for_what_there_is() -> None:
    table, _, _ = documented()
    dashboard = json.loads((DOCS / "grafana.json").read_text(encoding="utf-8"))
    asked = [t["expr"] for p in dashboard["panels"] for t in p.get("targets", ())]
    asked += [v["definition"] for v in dashboard["templating"]["list"] if "definition" in v]
    names = {name for expr in asked for name in re.findall(r"\bfirn_\w+", expr)}
    plain = {next((n.removesuffix(s) for s in HISTOGRAM if n.endswith(s)), n) for n in names}
    assert plain <= table.keys()
    for expr in asked:
        for labels in re.findall(r"by \(([^)]*)\)", expr):
            known = {label for n in re.findall(r"\bfirn_\w+", expr) for label in _labels(n, table)}
            assert {label.strip() for label in labels.split(",")} <= known, expr
    ids = [p["id"] for p in dashboard["panels"]]
    assert len(set(ids)) == len(ids)


def _labels(name: str, table: dict[str, object]) -> set[str]:
    plain = next((name.removesuffix(s) for s in HISTOGRAM if name.endswith(s)), name)
    return set(table[plain].labels) | {"le"}  # type: ignore[attr-defined]
