"""`firn cache` with odd arguments, odd folders and narrow terminals."""

from __future__ import annotations

from pathlib import Path

import pytest

from firn.cache.admin.inventory import ModelNote, note_model, take_inventory
from tests.cache.tiers.records import FINGERPRINT
from tests.cli.cache.test_cache import ALL, TRUNK, Cache, key, store


def test_a_folder_that_is_not_there_is_not_called_good(cache: Cache, folder: Path) -> None:
    result = cache("verify")
    assert result.exit_code == 1
    assert result.output == f"firn: There is no cache folder {folder}.\n"
    folder.write_text("a file")
    for command in (["ls"], ["stats"], ["show", "00"]):
        result = cache(*command)
        assert (result.exit_code, result.output) == (1, f"firn: {folder} is not a folder.\n")


@pytest.mark.parametrize("size", ["inf", "nan", "1e300", "-1"])
def test_gc_to_a_size_that_is_none(folder: Path, cache: Cache, size: str) -> None:
    store(folder, *ALL)
    result = cache("gc", "--ssd-cache-max-gb", size)
    assert result.exit_code == 2
    assert isinstance(result.exception, SystemExit), "no traceback"
    assert len(take_inventory(folder).files) == len(ALL)


@pytest.mark.parametrize("flag", ["--model", "--namespace"])
def test_an_empty_name_does_not_choose_everything(folder: Path, cache: Cache, flag: str) -> None:
    store(folder, *ALL)
    result = cache("clear", "--yes", flag, "")
    assert (result.exit_code, result.output) == (
        2,
        f"firn: {flag}: is empty; leave it out to choose all\n",
    )
    assert len(take_inventory(folder).files) == len(ALL)


def test_import_into_a_namespace_that_no_server_has(
    folder: Path, cache: Cache, tmp_path: Path
) -> None:
    """`firn cache ls` shows 12 digits of a namespace, and a server would never look under those."""
    store(folder, *ALL)
    file, other = tmp_path / "prefix.firn", tmp_path / "other"
    assert cache("export", key(TRUNK[5]), file).exit_code == 0
    result = cache("import", file, "--ssd-cache-dir", other, "--namespace", "0123456789ab")
    assert result.exit_code == 2
    assert "all 32 digits" in result.output
    assert not other.exists()


def test_a_failed_import_says_whose_fault_it_is(folder: Path, cache: Cache, tmp_path: Path) -> None:
    store(folder, *ALL)
    file, other = tmp_path / "prefix.firn", tmp_path / "notes.txt"
    other.write_text("no export")
    assert cache("export", key(TRUNK[5]), file).exit_code == 0
    for aim, place, named in ((other, folder, other), (file, other / "sub", other / "sub")):
        result = cache("import", aim, "--ssd-cache-dir", place)
        assert result.exit_code == 1
        assert result.output.startswith(f"firn: {named}: ")
        assert result.output.count("\n") == 1


@pytest.mark.parametrize("columns", [None, "80", "60"])
def test_a_long_name_takes_nothing_from_the_numbers(
    folder: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch, columns: str | None
) -> None:
    """In a pipe, lines are as long as needed; in a terminal, the name is folded."""
    name = "mlx-community/Qwen3-Coder-30B-A3B-Instruct-4bit-DWQ"
    store(folder, *ALL)
    note_model(folder, FINGERPRINT, ModelNote(name, "/no/such/folder"))
    monkeypatch.delenv("COLUMNS")
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    output = cache("ls").output
    assert "…" not in output
    assert "just now" in output
    if columns != "60":
        assert FINGERPRINT.hex()[:12] in output
        assert f"{key(TRUNK[3])}  tokens [0, 32)  4 blocks" in output
    if columns is None:
        assert name in output.splitlines()[1]
        assert "with what follows), just now" in output


def test_an_export_replaces_nothing_but_a_file(folder: Path, cache: Cache, tmp_path: Path) -> None:
    store(folder, *ALL)
    link, aim = tmp_path / "stdout", tmp_path / "terminal"
    aim.write_text("somebody's")
    link.symlink_to(aim)
    for place in (link, tmp_path):
        result = cache("export", key(TRUNK[5]), place)
        assert result.exit_code == 1
        assert result.output == f"firn: {place} is not a regular file; give a new file name.\n"
    assert link.is_symlink()
    assert aim.read_text() == "somebody's"
    assert cache("export", key(TRUNK[5]), aim).exit_code == 0, "an older export"


def test_a_folder_that_is_encrypted_from_now_on(folder: Path, cache: Cache, tmp_path: Path) -> None:
    """A server with a key does not read unencrypted records, but they can be listed and cleared."""
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(range(32)))
    secret.chmod(0o600)
    store(folder, *TRUNK)
    with_key = ("--ssd-cache-key-file", secret)
    assert " 6 " in cache("ls", *with_key).output
    assert "0 records are good" in cache("verify", *with_key).output
    assert "6 of another format or not encrypted" in cache("verify", *with_key).output
    result = cache("export", key(TRUNK[5]), tmp_path / "x", *with_key)
    assert (result.exit_code, result.output.startswith("firn: not encrypted")) == (1, True)
    environ = {"FIRN_SSD_CACHE_KEY_FILE": str(secret)}
    assert cache("clear", "--yes", "--model", "tiny-model", env=environ).exit_code == 0
    assert take_inventory(folder).files == ()
