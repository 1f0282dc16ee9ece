"""`firn doctor --tier`: a store is tried out, and everything that is wrong with it is one line.

Slow: one test starts the real command, which measures which way of multiplying is the fastest.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from firn.cache.storage.faults import TierFault
from firn.cache.storage.store_address import StoreAddress
from firn.cache.storage.store_probe import StoreReport
from firn.cache.tiers import TierOptions
from firn.cli.doctor.findings import Finding
from firn.cli.doctor.store import describe_store, store_findings
from tests import stores

needs_redis = pytest.mark.skipif(bool(stores.why_no_redis()), reason=stores.why_no_redis() or "-")
needs_s3 = pytest.mark.skipif(bool(stores.why_no_s3()), reason=stores.why_no_s3() or "-")
QUICK, PATIENT = "deadline_s=0.6", "deadline_s=60"
"""For stores that should fail, and for those that should not: the machine may be busy."""
ADDRESS = StoreAddress("s3", TierOptions("s3://bucket"), "s3://bucket", "proved")
WELL = StoreReport(answer_s=0.001, write_s=0.01, read_s=0.02, same_bytes=True, writes_once=True)


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in stores.CREDENTIALS.items():
        monkeypatch.setenv(name, value)


def look(address: str) -> list[Finding]:
    """All findings except that it was slow: the machine may be busy."""
    return [f for f in store_findings([address]) if "slow to answer" not in f.text]


@needs_redis
def test_redis() -> None:
    import redis

    with stores.redis_server("--requirepass", "secret-word") as server:
        place = f"127.0.0.1:{server.port}/0"
        (well,) = look(f"redis://:secret-word@{place}?{PATIENT}")
        assert (well.topic, well.mark) == ("store", "ok")
        assert well.text.startswith(f"redis://{place} answers in ")
        assert redis.Redis(port=server.port, password="secret-word").dbsize() == 0, "all is gone"
        (wrong,) = look(f"redis://:wrong-word@{place}?{PATIENT}")
        assert wrong.mark == "problem"
        assert "cannot be queried: no permission" in wrong.text
        assert "Are the credentials right?" in wrong.text
        assert "wrong-word" not in wrong.text
    (gone,) = look(f"redis://{place}?{QUICK}")
    assert gone.mark == "problem"
    assert "cannot be queried: unreachable" in gone.text


@needs_redis
def test_a_full_redis() -> None:
    with stores.redis_server("--maxmemory", "1mb") as server:
        (full,) = look(f"redis://127.0.0.1:{server.port}/0?{PATIENT}")
        assert full.mark == "problem"
        assert "cannot be written to: full" in full.text


@needs_s3
def test_s3_without_a_bucket_and_with_one() -> None:
    with stores.s3_server() as server:
        address = f"s3://{stores.BUCKET}/x?endpoint=http://127.0.0.1:{server.port}&{PATIENT}"
        (no_bucket,) = look(address)
        assert no_bucket.mark == "problem"
        assert "cannot be written to: no such bucket" in no_bucket.text
        stores.make_bucket(server.port)
        (well,) = look(address)
        assert (well.mark, well.text.startswith(f"s3://{stores.BUCKET}/x answers")) == ("ok", True)


@needs_s3
def test_an_s3_server_that_ignores_conditions_lies_or_forbids() -> None:
    with stores.BadS3() as bad:
        address = f"s3://{stores.BUCKET}?endpoint=http://127.0.0.1:{bad.port}"
        ok, note = look(f"{address}&{PATIENT}")
        assert (ok.mark, note.mark) == ("ok", "note")
        assert "ignores conditional writes" in note.text
        assert bad.objects == {}, "all is gone"
        bad.mood = "lies"
        _, lies, _ = look(f"{address}&{PATIENT}")
        text = "It does not return the bytes that were written to it."
        assert lies == Finding("", text, "problem")
        for mood, text in (("forbids", "no permission"), ("stalls", "too slow")):
            bad.mood = mood
            (failed,) = look(f"{address}&{QUICK}")
            assert failed.mark == "problem"
            assert f"cannot be queried: {text}" in failed.text


@pytest.mark.parametrize("address", ["http://host/x", "s3://bucket?colour=red"])
def test_an_address_that_is_none(address: str) -> None:
    (wrong,) = look(address)
    assert wrong.mark == "problem"


def test_words() -> None:
    assert [f.mark for f in describe_store(ADDRESS, WELL)] == ["ok"]
    slow = StoreReport(answer_s=0.5, write_s=1, read_s=1, same_bytes=True, writes_once=True)
    assert "slow to answer" in list(describe_store(ADDRESS, slow))[1].text
    failed = StoreReport("delete", TierFault("store failed"))
    assert [f.text for f in describe_store(ADDRESS, failed)] == [
        "s3://bucket cannot delete: store failed"
    ]


@needs_redis
def test_the_command(tmp_path: Path) -> None:
    with stores.redis_server() as server:
        well, gone = f"redis://127.0.0.1:{server.port}/0", "redis://127.0.0.1:1/0"
        command = [sys.executable, "-m", "firn", "doctor", "--ssd-cache-dir", str(tmp_path)]
        told = subprocess.run(
            [*command, "--tier", f"{well}?{PATIENT}", "--tier", gone],
            capture_output=True,
            text=True,
            env=os.environ | {"COLUMNS": "300"},
        )
    assert f"{well} answers in" in told.stdout
    assert f"{gone} cannot be queried: unreachable" in told.stdout
    assert (told.returncode, told.stderr) == (1, "")
