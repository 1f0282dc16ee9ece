"""`firn cache`: what users see of a folder and do to it, also while servers use it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import tarfile
import threading
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from firn.cache.admin.inventory import ModelNote, note_model, prefixes, records_of, take_inventory
from firn.cache.parts import Part
from firn.cache.storage.container import Name, load
from firn.cache.storage.faults import Refused, TierFault
from firn.cache.storage.seal import load_seal
from firn.cache.tiers._folder import Disk, path_of
from firn.cache.tiers.ssd import SsdTier
from firn.core.keys import root_key
from firn.core.values import Namespace
from tests.cache.tiers.records import (
    FINGERPRINT,
    LAYOUT,
    Folder,
    Record,
    beside,
    chain,
    record,
)
from tests.cli import command
from tests.cli.talk.chat_server import serving
from tests.faulty_tier import put

MIB = 1 << 20
OTHER_MODEL = b"\7" * 32
Cache = Callable[..., Result]


def store(folder: Path, *records: Record, **more: Any) -> Folder:
    tier = Folder(folder, **more)
    tier.scan()
    note_model(folder, FINGERPRINT, ModelNote("tiny-model", "/no/such/folder"))
    for one in records:
        tier.write(one)
    return tier


TRUNK = chain(6)
BRANCH = record(range(900, 908), parent=TRUNK[3])
STATES = [beside(TRUNK[1], Part.STATE), beside(TRUNK[5], Part.STATE)]
FOREIGN_TO_IT = record(range(50), fingerprint=OTHER_MODEL, namespace="other")
ALL = [*TRUNK, BRANCH, *STATES, FOREIGN_TO_IT]


def key(one: Record, n: int = 12) -> str:
    return one.header.key.hex()[:n]


# --- ls, show, stats -----------------------------------------------------------------------


def test_ls(folder: Path, cache: Cache) -> None:
    store(folder, *ALL)
    result = cache("ls")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    columns = "model fingerprint namespace records tokens size last used"
    assert lines[0].split() == columns.split()
    tiny = next(line for line in lines if line.startswith("tiny-model"))
    assert FINGERPRINT.hex()[:12] in tiny
    assert " 9 " in tiny
    assert " 56 " in tiny
    assert "just now" in tiny
    assert any(line.startswith("-") and OTHER_MODEL.hex()[:12] in line for line in lines)
    assert f"{key(TRUNK[3])}  tokens [0, 32)  4 blocks" in result.output
    assert f"{key(TRUNK[5])}  tokens [32, 48)  2 blocks" in result.output
    assert f"{key(BRANCH)}  tokens [32, 40)  1 block" in result.output
    assert "largest prefixes" not in cache("ls", "--top", 0).output


def test_ls_of_nothing(cache: Cache, folder: Path) -> None:
    result = cache("ls")
    assert result.exit_code == 0
    assert "Nothing is stored" in result.output
    assert not folder.exists(), "looking changes nothing"


def test_looking_changes_nothing(folder: Path, cache: Cache) -> None:
    store(folder, *ALL)
    damaged = folder / path_of(str(ALL[0].name))
    put(damaged, damaged.read_bytes()[:50])
    (folder / "tmp" / "someone's").write_bytes(b"x")
    before = {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in folder.rglob("*")}
    for words in (["ls"], ["stats"], ["stats", "--json"], ["show", key(TRUNK[2])], ["verify"]):
        assert cache(*words).exception is None or words == ["verify"]
    assert {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in folder.rglob("*")} == before


def test_show(folder: Path, cache: Cache) -> None:
    store(folder, *ALL)
    result = cache("show", key(TRUNK[5], 8))
    assert result.exit_code == 0, result.output
    for text in (
        TRUNK[5].header.key.hex(),
        TRUNK[4].header.key.hex(),
        "[40, 48)",
        "tiny-model",
        LAYOUT,
        "layer 0: BF16 (1, 2, 8, 16), BF16 (1, 2, 8, 16)",
        "layer 1: U32 (1, 2, 8, 4), empty, F16 (1, 2, 8, 1)",
        "layer 2: F32 (0, 4), U8 (3,)",
        "pages:",
        "state:",
        "tokens: 40, 41, 42",
    ):
        assert text in result.output
    whole = cache("show", key(TRUNK[5]), "--whole").output
    assert "tokens: 0, 1, 2" in whole


def test_show_decodes_with_a_tokenizer(folder: Path, cache: Cache) -> None:
    from firn.models.load.loader import load_tokenizer

    model = resources.files("firn.demo") / "models" / "firn-demo"
    assert isinstance(model, Path)
    ids = load_tokenizer(model).encode("A glacier is made of old snow.", add_special=False)
    text = record([*ids, 1 << 63, (1 << 63) + 5, *ids])
    store(folder, text)
    result = cache("show", key(text), "--model", model)
    assert "old snow.<image: 2 tokens>" in result.output
    note_model(folder, FINGERPRINT, ModelNote("firn-demo", str(model)))
    assert "old snow." in cache("show", key(text)).output, "the folder that the server had"
    assert "no text:" in cache("show", key(text), "--model", folder).output


@pytest.mark.parametrize("text", ["zz", "0123456789abcdef", ""])
def test_a_key_that_is_none_or_many(folder: Path, cache: Cache, text: str) -> None:
    store(folder, *ALL)
    result = cache("show", text)
    assert result.exit_code == 1
    assert result.stderr.startswith("firn: ")
    assert "Traceback" not in result.output


def test_stats(folder: Path, cache: Cache) -> None:
    tier = store(folder, *ALL)
    bad = folder / path_of(str(FOREIGN_TO_IT.name))
    put(bad, bad.read_bytes()[:-1])
    assert not tier.holds(FOREIGN_TO_IT)
    result = cache("stats", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert found["records"] == 9
    assert found["parts"]["pages"]["records"] == 7
    assert found["parts"]["state"]["records"] == 2
    assert found["tokens"] == 56
    assert found["limit_bytes"] == 64 * MIB
    assert found["quarantine"]["files"] == 1
    assert found["orphans"] == found["locked"] == found["unusable"] == 0
    assert found["bytes_written_last_24_hours"] > 1000
    text = cache("stats").output
    assert "of 64.0 MiB" in text
    assert "pages 7" in text
    assert cache("stats", "--ssd-cache-dir", folder / "none").exit_code == 0


def test_stats_where_the_numbers_cannot_be_read(folder: Path, cache: Cache) -> None:
    (folder / "firn.lock").mkdir(parents=True)
    result = cache("stats", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["limit_bytes"] is None


# --- where ---------------------------------------------------------------------------------


WHERE = "held in memory, stored in ssd; next: used, or evicted"


def test_a_running_server_says_where_a_block_is(folder: Path, cache: Cache) -> None:
    """The first digits are enough where the folder has it; a block of memory alone needs all."""
    store(folder, *ALL)
    whole = key(TRUNK[2], 64)
    answer = {"node": whole, "tokens": 24, "bytes": 3 << 20, "where": {"pages": WHERE}}
    with serving(models=answer) as server:
        for text in (whole[:10], whole, "ab" * 32):
            result = cache("where", text, "--url", server.url)
            assert result.exit_code == 0, result.output
            assert server.asked[-1] == f"/v1/cache/tree/{whole if text in whole else text}"
    lines = [line.strip().split(None, 1) for line in result.output.splitlines()]
    assert lines == [["key", whole], ["prefix", "24 tokens, 3.0 MiB"], ["pages", WHERE]]


def test_a_server_that_does_not_know_says_so(folder: Path, cache: Cache) -> None:
    with serving(models={"enabled": False, "why": "switched off"}) as server:
        result = cache("where", "ab" * 32, "--url", server.url)
        assert result.exit_code == 1
        assert "has no prefix cache: switched off" in result.output
    with serving(models={"data": []}) as server:
        result = cache("where", "ab" * 32, "--url", server.url)
        assert "does not look like a firn server" in result.output
    result = cache("where", "ab" * 32, "--url", server.url)
    assert "No server answers" in result.output


# --- verify, gc, clear ---------------------------------------------------------------------


def test_verify(folder: Path, cache: Cache) -> None:
    store(folder, TRUNK[0])
    assert "1 record is good, 0 damaged." in cache("verify").output
    store(folder, *ALL)
    good = cache("verify")
    assert good.exit_code == 0
    assert "10 records are good, 0 damaged." in good.output
    body = folder / path_of(str(TRUNK[0].name))
    put(body, body.read_bytes()[:-1] + b"\0")
    head = folder / path_of(str(TRUNK[1].name))
    put(head, b"junk")
    for _ in range(2):
        bad = cache("verify")
        assert bad.exit_code == 1
        assert f"damaged: {path_of(str(TRUNK[0].name))}: bad checksum" in bad.output
        assert "8 records are good, 2 damaged." in bad.output
    moved = cache("verify", "--quarantine")
    assert moved.exit_code == 1
    assert len(list((folder / "quarantine").iterdir())) == 2
    assert cache("verify").exit_code == 0


def test_verify_drops_what_no_prompt_can_reach(folder: Path, cache: Cache) -> None:
    tier = store(folder, *ALL)
    tier.delete(TRUNK[3])
    lost = [TRUNK[4], TRUNK[5], BRANCH, STATES[1]]
    assert json.loads(cache("stats", "--json").output)["orphans"] == 3, "blocks"
    told = cache("verify")
    assert told.exit_code == 0, "nothing is damaged"
    assert "4 records that no prompt can reach." in told.output
    assert all(tier.holds(r) for r in lost)
    assert "4 records that no prompt can reach, deleted." in cache("verify", "--quarantine").output
    assert [tier.holds(r) for r in ALL] == [r not in (*lost, TRUNK[3]) for r in ALL]
    assert "no prompt can reach" not in cache("verify").output


def test_verify_deletes_nothing_while_the_disk_cannot_be_read(
    folder: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = store(folder, *ALL)

    def failing(self: Disk, fd: int, buffer: memoryview) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(Disk, "read", failing)
        told = cache("verify", "--quarantine")
    assert told.exit_code == 1
    assert f"cannot be read: {path_of(str(ALL[0].name))}: I/O error" in told.output
    assert "0 damaged" in told.output
    assert all(tier.holds(one) for one in ALL)


def test_gc(folder: Path, cache: Cache) -> None:
    tier = store(folder, *chain(20, nbytes=100_000))
    result = cache("gc", "--ssd-cache-max-gb", 0.001)
    assert result.exit_code == 0, result.output
    assert "freed" in result.output
    tier.scan()
    assert tier.usage().nbytes <= 2**30 // 1000
    assert take_inventory(folder).orphans == []
    assert cache("gc").exit_code == 2
    assert cache("gc", "--ssd-cache-max-gb", 1, "--ssd-cache-dir", folder / "none").exit_code == 1


def test_clear_all(folder: Path, cache: Cache) -> None:
    tier = store(folder, *ALL)
    refused = cache("clear", input="n\n")
    assert refused.exit_code == 1
    assert "Delete 10 files" in refused.output
    assert tier.holds(TRUNK[0])
    assert cache("clear", input="y\n").exit_code == 0
    assert not any(tier.holds(r) for r in ALL)
    tier.write(TRUNK[0])
    assert tier.holds(TRUNK[0]), "the server goes on"


def test_clear_without_anybody_to_ask(folder: Path, cache: Cache) -> None:
    tier = store(folder, *ALL)
    refused = cache("clear")
    assert refused.exit_code == 2
    assert "firn: nobody is there to answer; --yes does without the question\n" in refused.output
    assert cache("clear", input="n\n").exit_code == 1
    assert all(tier.holds(r) for r in ALL)


def test_clear_a_model_or_a_namespace(folder: Path, cache: Cache) -> None:
    tier = store(folder, *ALL)
    assert cache("clear", "--model", "none", "--yes").exit_code == 0
    assert all(tier.holds(r) for r in ALL)
    namespace = FOREIGN_TO_IT.header.namespace[:10]
    assert cache("clear", "--namespace", namespace, "--yes").exit_code == 0
    assert [tier.holds(r) for r in ALL] == [True] * 9 + [False]
    tier.write(FOREIGN_TO_IT)
    assert cache("clear", "--model", "tiny-model", "--yes").exit_code == 0
    assert [tier.holds(r) for r in ALL] == [False] * 9 + [True]
    assert cache("clear", "--model", OTHER_MODEL.hex()[:6], "--yes").exit_code == 0
    assert not any(tier.holds(r) for r in ALL)


def test_a_folder_that_cannot_be_changed_is_named(
    folder: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise TierFault("read-only: Read-only file system")

    store(folder, *TRUNK)
    path = folder / path_of(str(TRUNK[5].name))
    path.write_bytes(path.read_bytes()[:-1])
    monkeypatch.setattr(SsdTier, "evict_to", fail)
    monkeypatch.setattr(SsdTier, "delete", fail)
    for arguments in (
        ["gc", "--ssd-cache-max-gb", "0"],
        ["clear", "--yes"],
        ["clear", "--yes", "--model", "tiny-model"],
        ["verify", "--quarantine"],
    ):
        result = cache(*arguments)
        assert result.exit_code == 1
        assert result.stderr == f"firn: {folder}: read-only: Read-only file system\n"


# --- export and import ---------------------------------------------------------------------


def test_a_prefix_travels(folder: Path, cache: Cache, tmp_path: Path) -> None:
    store(folder, *ALL)
    file = tmp_path / "prefix.firn"
    result = cache("export", key(TRUNK[5]), file)
    assert result.exit_code == 0, result.output
    assert "48 tokens in 7 records" in result.output
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    other = tmp_path / "other"
    result = cache("import", file, "--ssd-cache-dir", other)
    assert result.exit_code == 0, result.output
    assert "7 records stored" in result.output
    assert "7 were there already" in cache("import", file, "--ssd-cache-dir", other).output
    tier = Folder(other)
    tier.scan()
    assert [tier.holds(r) for r in ALL] == [r in (*TRUNK, STATES[1]) for r in ALL]


def test_an_archive_is_plain_tar(folder: Path, cache: Cache, tmp_path: Path) -> None:
    store(folder, *TRUNK)
    file = tmp_path / "prefix.firn"
    cache("export", key(TRUNK[2]), file)
    with tarfile.open(file) as tar:
        names = tar.getnames()
    assert names == [f"{r.header.key.hex()}.pages.safetensors" for r in TRUNK[:3]]


def test_a_broken_archive_is_refused(folder: Path, cache: Cache, tmp_path: Path) -> None:
    store(folder, *TRUNK)
    file = tmp_path / "prefix.firn"
    cache("export", key(TRUNK[5]), file)
    raw = bytearray(file.read_bytes())
    raw[raw.index(TRUNK[4].buffers[0]) + 100] ^= 1
    spoilt = tmp_path / "spoilt"
    spoilt.write_bytes(raw)
    cut = tmp_path / "cut"
    cut.write_bytes(file.read_bytes()[: len(raw) // 2])
    junk = tmp_path / "junk"
    junk.write_bytes(b"not an archive" * 100)
    empty = tmp_path / "empty"
    empty.write_bytes(bytes(10240))
    for path in (spoilt, cut, junk, empty, tmp_path / "missing"):
        other = tmp_path / f"cache of {path.name}"
        result = cache("import", path, "--ssd-cache-dir", other)
        assert result.exit_code == 1, path
        assert result.stderr.startswith("firn: ")
        assert len(result.stderr.splitlines()) == 1
        tier = Folder(other)
        tier.scan()
        assert [tier.holds(r) for r in TRUNK] == [path is spoilt] * 4 + [False] * 2 or path is cut
        assert tier.usage().n_quarantined == 0


def test_a_chain_with_a_hole_is_not_exported(folder: Path, cache: Cache, tmp_path: Path) -> None:
    tier = store(folder, *TRUNK)
    tier.delete(TRUNK[2])
    result = cache("export", key(TRUNK[5]), tmp_path / "x")
    assert result.exit_code == 1
    assert "not stored any more" in result.stderr
    assert not (tmp_path / "x").exists()


def test_import_keeps_to_the_limit_of_the_servers(
    folder: Path, cache: Cache, tmp_path: Path
) -> None:
    store(folder, *chain(10, nbytes=200_000))
    file = tmp_path / "prefix.firn"
    cache("export", key(chain(10, nbytes=200_000)[9]), file)
    other = tmp_path / "other"
    server = Folder(other, MIB)
    server.scan()
    result = cache("import", file, "--ssd-cache-dir", other)
    assert result.exit_code == 1
    assert "full" in result.stderr
    server.scan()
    assert server.usage().nbytes <= MIB


def test_import_into_another_namespace(folder: Path, cache: Cache, tmp_path: Path) -> None:
    store(folder, *TRUNK, *STATES)
    file, other = tmp_path / "prefix.firn", tmp_path / "other"
    cache("export", key(TRUNK[5]), file)
    assert cache("import", file, "--ssd-cache-dir", other, "--namespace", "shared").exit_code == 0
    found = take_inventory(other)
    (group,) = found.by_model()
    assert group.namespace == "shared"
    root = root_key(fingerprint=FINGERPRINT, layout=LAYOUT, namespace=Namespace("shared"))
    assert all(b.tag.root == root for b in group.blocks)
    last = max(group.blocks, key=lambda b: b.end)
    own: list[Record] = []
    for one in TRUNK:
        above = own[-1] if own else None
        own.append(record(one.header.tokens.tolist(), parent=above, namespace="shared"))
    keys = [one.header.key for one in own]
    assert [b.tag.key for b in found.chain(last)] == keys, "as a server computes them there"
    tier = Folder(other).tier
    for name, one in zip(keys, TRUNK, strict=True):
        loaded = load(tier, Name(name, Part.PAGES))
        assert loaded.header.tokens.tolist() == one.header.tokens.tolist()
        assert [bytes(b) for b in loaded.buffers] == one.buffers
    loaded = load(tier, Name(keys[-1], Part.STATE))
    assert [bytes(b) for b in loaded.buffers] == STATES[1].buffers


def test_an_encrypted_folder(folder: Path, cache: Cache, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(os.urandom(32))
    secret.chmod(0o600)
    store(folder, *TRUNK, seal=load_seal(secret))
    assert "6 encrypted with another key" in cache("ls").output
    assert "Not checked: 6 encrypted" in cache("verify").output
    assert cache("export", key(TRUNK[5]), tmp_path / "x").exit_code == 1
    assert "encrypted with another key" in cache("show", key(TRUNK[5])).output
    assert "6 records are good" in cache("verify", "--ssd-cache-key-file", secret).output
    file, plain = tmp_path / "prefix.firn", tmp_path / "plain"
    assert cache("export", key(TRUNK[5]), file, "--ssd-cache-key-file", secret).exit_code == 0
    assert cache("import", file, "--ssd-cache-dir", plain).exit_code == 0
    tier = Folder(plain)
    assert all(tier.holds(r) for r in TRUNK)


# --- a folder in use -----------------------------------------------------------------------


def test_every_command_on_a_folder_in_use(folder: Path, cache: Cache, tmp_path: Path) -> None:
    tier = store(folder, *TRUNK, limit_nbytes=2 * MIB)
    stop = threading.Event()
    wrong: list[BaseException] = []

    def serve() -> None:
        try:
            i = 0
            while not stop.is_set():
                i += 1
                with contextlib.suppress(Refused):  # its parent was cleared away
                    for one in chain(4, first=1000 * (1 + i % 50), nbytes=30_000):
                        tier.write(one)
                        tier.holds(one)
        except BaseException as e:
            wrong.append(e)

    server = threading.Thread(target=serve)
    server.start()
    try:
        for command in (
            ["ls"], ["stats"], ["verify"], ["gc", "--ssd-cache-max-gb", 0.001], ["ls"],
            ["clear", "--yes"], ["stats", "--json"], ["verify", "--quarantine"],
        ):  # fmt: skip
            result = cache(*command)
            assert result.exit_code == 0, result.output
    finally:
        stop.set()
        server.join()
    assert not wrong
    assert tier.usage().counts.get("damaged", 0) == 0


# --- the values ----------------------------------------------------------------------------


def test_prefixes_draw_runs_together(folder: Path) -> None:
    store(folder, *ALL)
    found = take_inventory(folder)
    group = found.by_model()[0]
    (tree,) = prefixes(group.blocks, top=5)
    assert [b.tag.key for b in tree.blocks] == [r.header.key for r in TRUNK[:4]]
    assert tree.nbytes == group.nbytes
    assert {b.blocks[-1].tag.key for b in tree.branches} == {TRUNK[5].header.key, BRANCH.header.key}


def test_what_a_resume_needs(folder: Path) -> None:
    store(folder, *ALL)
    found = take_inventory(folder)
    names = records_of(found.chain(found.find(key(TRUNK[4]))))
    assert names == [
        TRUNK[0].name, TRUNK[1].name, STATES[0].name, TRUNK[2].name, TRUNK[3].name, TRUNK[4].name,
    ]  # fmt: skip


def test_the_folder_may_come_from_the_environment(folder: Path) -> None:
    store(folder, *TRUNK)
    environ = {"FIRN_SSD_CACHE_DIR": str(folder), "COLUMNS": "200"}
    result = command.invoke("cache", "ls", env=environ)
    assert "tiny-model" in result.output
