"""The examples of docs/extending.md: found in their folders, held to the contracts, served live.

Slow: one test starts a real server that finds the examples.
"""

from __future__ import annotations

import importlib
import json
import re
import shutil
import sqlite3
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import mlx.core as mx
import pytest

import firn
from firn.api import dialects, routes
from firn.assembly import extras
from firn.cache import codecs, tiers
from firn.cache.tiers import TierOptions
from firn.config import CacheConfig, Config
from firn.core.errors import FirnError, InvalidValue, StepFailed
from firn.demo.server import ServerProcess
from firn.models.speculation import drafters
from firn.text.calls import parsers
from tests.api.live import GREETING, serve
from tests.cache.specimens import Specimen, table
from tests.cache.tiers.records import Direct
from tests.contracts import test_codecs as codec_contract
from tests.contracts import test_dialects as dialect_contract
from tests.contracts import test_drafters as drafter_contract
from tests.contracts import test_extras as extra_contract
from tests.contracts import test_parsers as parser_contract
from tests.contracts import test_routes as route_contract
from tests.contracts import test_tiers as tier_contract

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"
FILE = re.compile(r"^`([\w./]+\.py)`[^\n]*:\n\n```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
FOLDERS: dict[str, ModuleType] = {
    "cache/tiers": tiers,
    "cache/codecs": codecs,
    "text/calls/parsers": parsers,
    "api/dialects": dialects,
    "models/speculation/drafters": drafters,
    "api/routes": routes,
    "assembly/extras": extras,
}


def examples() -> dict[str, str]:
    return dict(FILE.findall(PAGE.read_text(encoding="utf-8")))


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Installs every example: each package searches one more folder."""
    for path, source in examples().items():
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    names = set(sys.modules)
    for folder, package in FOLDERS.items():
        more = str(tmp_path / "src" / "firn" / folder)
        monkeypatch.setattr(package, "__path__", [*package.__path__, more])
    _forget_what_was_discovered()
    yield
    for name in set(sys.modules) - names:
        if name == "decay_model" or any(
            name.startswith(f"{p.__name__}.") for p in FOLDERS.values()
        ):
            parent, _, child = name.rpartition(".")
            if parent and hasattr(sys.modules[parent], child):
                delattr(sys.modules[parent], child)
            del sys.modules[name]
    _forget_what_was_discovered()


def _forget_what_was_discovered() -> None:
    codecs.registry.cache_clear()
    parsers.formats.cache_clear()
    parsers.names.cache_clear()


def test_there_is_one_file_for_each_folder() -> None:
    folders = {Path(path).parent.as_posix() for path in examples()}
    assert folders == {f"src/firn/{folder}" for folder in FOLDERS} | {"."}


# --- tier ----------------------------------------------------------------------------------

TIER = [
    tier_contract.test_bytes_come_back_whole_or_as_far_as_wanted,
    tier_contract.test_what_is_not_there,
    tier_contract.test_a_scan_tells_names_heads_lengths_and_stamps_once,
    tier_contract.test_what_is_set_aside_is_never_seen_again,
    tier_contract.test_a_store_says_which_names_it_has,
    tier_contract.test_a_large_record_comes_back_whole,
    tier_contract.test_what_is_written_is_read,
    tier_contract.test_parts_of_a_block_are_records_of_their_own,
    tier_contract.test_writing_it_again_changes_nothing,
    tier_contract.test_other_tokens_under_the_same_name_are_not_served,
]


@pytest.mark.parametrize("contract", TIER)
def test_the_tier_keeps_the_contract(contract: Any, tmp_path: Path) -> None:
    open_tier = tiers.discover()["sqlite"]
    options = TierOptions(f"sqlite://{tmp_path}/records.db")
    contract(lambda limit_nbytes: Direct(open_tier(options), wall=time.time))


def test_the_tier_takes_calls_of_many_threads_and_shares_with_other_servers(tmp_path: Path) -> None:
    options = TierOptions(f"sqlite://localhost{tmp_path}/records.db")
    store, other = [tiers.discover()["sqlite"](options) for _ in range(2)]
    names = [f"{i:02x}" for i in range(100)]

    def work(_: int) -> None:
        for name in names:
            store.write(name, [name.encode()], used_at=0.0)
            assert bytes(other.read(name)) == name.encode()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert store.usage().counts["writes"] == len(names)


# --- codec ---------------------------------------------------------------------------------

CODEC = [
    codec_contract.test_what_it_says_of_itself,
    codec_contract.test_the_bytes_of_a_live_layer,
    codec_contract.test_a_restored_layer_goes_on_like_the_first,
    codec_contract.test_writing_to_a_restored_layer_leaves_the_records_be,
    codec_contract.test_a_live_layer_that_goes_on_leaves_the_records_be,
    codec_contract.test_a_record_is_no_view_of_a_larger_buffer,
]


@pytest.mark.parametrize("contract", CODEC)
def test_the_codec_keeps_the_contract(contract: Any) -> None:
    cache = importlib.import_module("decay_model").DecayCache

    def feed(layer: Any, rows: Any, starts: Any, n: int) -> None:
        (row,), (start,) = rows, starts
        for token in table(row, 64)[0, 0, start : start + n]:
            layer.update(token[None])
        mx.eval(layer.average)

    codec = codecs.registry()["decay_model.DecayCache"]
    kind = Specimen("decay", codec, lambda: cache(0.1), feed, lambda layer, n: (layer.average,))
    contract(kind=kind)


# --- parser --------------------------------------------------------------------------------

PARSER = [
    parser_contract.test_the_example_is_one_call_at_every_split,
    parser_contract.test_text_around_a_call_is_kept_and_nothing_else,
    parser_contract.test_calls_in_a_row,
    parser_contract.test_reasoning_first,
    parser_contract.test_a_call_inside_unclosed_reasoning_counts,
    parser_contract.test_inside_reasoning_an_unknown_name_is_no_call,
    parser_contract.test_without_tools_markup_is_text,
    parser_contract.test_cut_anywhere_it_is_a_part_of_the_call_or_text,
    parser_contract.test_arguments_come_while_they_are_written,
    parser_contract.test_any_mixture_of_its_parts_at_any_split,
    parser_contract.test_any_string_in_the_json_formats,
    parser_contract.test_what_is_written_is_read_again,
]


@pytest.mark.parametrize("contract", PARSER)
def test_the_parser_keeps_the_contract(contract: Any) -> None:
    contract(format=parsers.formats()["brackets"])


# --- dialect -------------------------------------------------------------------------------

DIALECT = [
    dialect_contract.test_the_schema_has_an_example_that_decodes,
    dialect_contract.test_stream_and_unknown_fields,
    dialect_contract.test_missing_fields_are_named,
    dialect_contract.test_every_kind_of_junk_in_every_field,
    dialect_contract.test_junk_in_any_field_is_a_bad_request_at_worst,
    dialect_contract.test_frames_do_not_depend_on_how_events_are_batched,
    dialect_contract.test_a_fold_holds_all_that_was_said,
    dialect_contract.test_whole_and_streamed_hold_the_same_text,
    dialect_contract.test_a_client_that_has_gone_is_no_fault,
    dialect_contract.test_silence_is_harmless,
]


def ask() -> dialects.Dialect:
    (dialect,) = [each for each in dialects.discover() if each.path == "/v1/ask"]
    return dialect


@pytest.mark.parametrize("contract", DIALECT)
def test_the_dialect_keeps_the_contract(contract: Any) -> None:
    contract(dialect=ask())


@pytest.mark.parametrize("error", [StepFailed("it broke"), InvalidValue("n", "no")])
def test_errors_of_the_dialect_keep_the_contract(error: FirnError) -> None:
    dialect_contract.test_errors_say_what_happened(dialect=ask(), error=error)


def test_the_dialect_is_served() -> None:
    with serve() as live:
        url = f"{live.url}/v1/ask"
        assert httpx.post(url, json={"question": "?"}).json()["answer"] == GREETING
        lines = httpx.post(url, json={"question": "?", "stream": True}).text.splitlines()
        assert "".join(json.loads(line).get("piece", "") for line in lines) == GREETING
        assert json.loads(lines[-1])["done"]
        refused = httpx.post(url, json={"question": 5})
        assert refused.status_code == 400
        assert "question" in refused.json()["error"]


# --- drafter -------------------------------------------------------------------------------

DRAFTER = [
    drafter_contract.test_rows_that_it_was_not_told_of_are_none_of_its_business,
    drafter_contract.test_drafts_are_no_longer_than_asked_for_and_each_token_has_a_kind,
    drafter_contract.test_drafting_twice_changes_nothing,
    drafter_contract.test_rows_do_not_disturb_each_other,
]


@pytest.mark.parametrize("contract", DRAFTER)
def test_the_drafter_keeps_the_contract(contract: Any) -> None:
    contract(drafters.discover()["pairs"]())


# --- route ---------------------------------------------------------------------------------


def test_the_route_keeps_the_contract() -> None:
    add = importlib.import_module("firn.api.routes.whoami").ROUTES
    route_contract.test_it_adds_routes_that_the_app_describes(add_routes=add)


def test_the_route_is_served() -> None:
    with serve() as live:
        model = live.engine.model
        shown = httpx.get(f"{live.url}/v1/whoami").json()
        assert shown == {"model": model.name, "context_length": model.context_length}


# --- extra ---------------------------------------------------------------------------------

EXTRA = [
    extra_contract.test_with_the_settings_of_everybody_it_stands_in_nobodys_way,
    extra_contract.test_a_folder_that_is_not_its_own_is_left_to_others,
]


def extra(config: Config) -> extras.Extra:
    (found,) = [each for each in extras.open_extras(config) if type(each).__name__ == "FreeDisk"]
    return found


@pytest.mark.parametrize("contract", EXTRA)
def test_the_extra_keeps_the_contract(contract: Any, tmp_path: Path) -> None:
    contract(extra=extra(Config()), tmp_path=tmp_path)


def test_the_extra_adds_nothing_where_there_is_no_disk() -> None:
    services = extra_contract.services()
    config = Config(cache=CacheConfig(no_ssd_cache=True))
    assert extra(config).add_to(services, None, None) is services  # type: ignore[arg-type]


# --- all of them, in a server of its own process ----------------------------------------------

FACTS = " ".join(f"The badge number of Dana Okoro{n} is {4100 + 7 * n}." for n in range(60))
QUESTION = f"{FACTS}\n\nWhat is the badge number of Dana Okoro7?"


def test_a_server_runs_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of the package with the new files in it, started as a user would start it."""
    copy = shutil.copytree(Path(firn.__file__).parent, tmp_path / "copy" / "firn")
    for folder in FOLDERS:
        for file in (tmp_path / "src" / "firn" / folder).glob("*.py"):
            shutil.copy(file, copy / folder)
    monkeypatch.setenv("PYTHONPATH", str(copy.parent))
    records = tmp_path / "records.db"
    folder = str(tmp_path / "cache")
    tier = ("--ssd-cache-dir", folder, "--tier", f"sqlite://localhost{records}?spill=all")
    server = ServerProcess(
        "firn-demo",
        *tier,
        "--speculation",
        "pairs",
        "--default-temperature",
        "0",
        log=tmp_path / "log",
    )
    try:
        reply = httpx.post(f"{server.url}/v1/ask", json={"question": QUESTION}, timeout=60).json()
        plain = httpx.post(
            f"{server.url}/v1/chat/completions",
            json={"messages": [{"role": "user", "content": QUESTION}], "speculation": "off"},
            timeout=60,
        ).json()
        shown = httpx.get(f"{server.url}/v1/whoami", timeout=60).json()
        metrics = httpx.get(f"{server.url}/metrics", timeout=60).text
    finally:
        assert server.stop() == 0, (tmp_path / "log").read_text()
    assert reply["answer"] == plain["choices"][0]["message"]["content"]
    assert shown["model"] == plain["model"]
    assert re.search(r"^firn_disk_free_bytes [\d.e+]+$", metrics, re.MULTILINE)
    (n_records,) = sqlite3.connect(records).execute("SELECT count(*) FROM records").fetchone()
    assert n_records > 0
