"""`firn service` on the command line, with fake supervisors."""

from __future__ import annotations

import os
import plistlib
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from tools import service_round

from firn.cli.service.commands import _absolute, _check
from firn.core.errors import SetupError
from firn.host.services.service import START, ServiceSettings
from tests import one_blas


def firn(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("FIRN_", "XDG_"))}
    environ |= {"HOME": str(home), "PATH": f"{home / 'bin'}:/usr/bin:/bin", "HF_TOKEN": "hf_secret"}
    return subprocess.run(
        [sys.executable, "-m", "firn", "service", *arguments],
        capture_output=True, text=True, env=environ, cwd=home, timeout=100,
    )  # fmt: skip


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home folder with fake supervisor programs that record how they were called."""
    (tmp_path / "bin").mkdir()
    for name in ("systemctl", "launchctl"):
        path = tmp_path / "bin" / name
        # launchctl knows no service: what was booted out is gone.
        path.write_text(
            f'#!/bin/sh\necho "$@" >> "{tmp_path}/calls"\necho ActiveState=active\n[ "$1" != print ]\n'
        )
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return tmp_path


def test_install_status_and_uninstall(home: Path) -> None:
    assert firn(home, "status").returncode == 1
    done = firn(home, "install", "firn-demo", "--port", "8123")
    assert done.returncode == 0, done.stderr
    (written,) = [p for p in home.rglob("*firn*") if p.suffix in (".service", ".plist")]
    if written.suffix == ".plist":
        words = plistlib.loads(written.read_bytes())["ProgramArguments"]
    else:
        (line,) = [x for x in written.read_text().splitlines() if x.startswith("ExecStart=")]
        words = [w.strip('"') for w in line.removeprefix("ExecStart=").split(" ")]
    assert words[1:3] == ["-m", "firn.cli.service.start"]
    assert words[4:] == ["serve", "firn-demo", "--port", "8123"]
    settings = Path(words[3])
    assert ServiceSettings.read(settings).environment["HF_TOKEN"] == "hf_secret"
    assert settings.stat().st_mode & 0o077 == 0
    assert "HF_TOKEN" in done.stdout
    assert "hf_secret" not in done.stdout + written.read_text()
    assert (home / "calls").exists()
    if sys.platform == "linux":
        assert "active" in firn(home, "status").stdout
    assert firn(home, "restart").returncode == 0
    assert firn(home, "uninstall").returncode == 0
    assert firn(home, "restart").stderr.startswith("firn: ")
    assert not written.exists()
    again = firn(home, "uninstall")
    assert again.returncode == 1
    assert again.stderr.startswith("firn: ")


def started(settings: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """What a supervisor runs."""
    return subprocess.run(
        [sys.executable, "-m", START, str(settings), *command],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip


def test_a_service_starts_with_its_own_variables(tmp_path: Path) -> None:
    settings = tmp_path / "service.json"
    values = ServiceSettings({"FIRN_PORT": "8765"}, str(tmp_path / "server.log"))
    settings.write_bytes(values.as_json())
    done = started(settings, "config", "show")
    assert done.returncode == 0, done.stderr
    (line,) = [x for x in done.stdout.splitlines() if x.split()[:1] == ["server.port"]]
    assert "8765" in line


@pytest.mark.parametrize("text", ["", "[]", '{"environment": 1, "log": ""}'])
def test_a_service_with_damaged_settings_says_so(tmp_path: Path, text: str) -> None:
    settings = tmp_path / "service.json"
    for path in (settings, tmp_path / "none.json"):
        settings.write_text(text)
        done = started(path, "config", "show")
        assert done.returncode == 78
        assert done.stderr.startswith(f"firn: {path}"), "one line"
        assert done.stderr.count("\n") == 1


def test_wrong_arguments_are_refused_before_anything_is_written(home: Path) -> None:
    done = firn(home, "install", "--prot", "8123")
    assert done.returncode != 0
    assert done.stderr.strip()
    assert not list(home.rglob("*.service"))


def test_variables_that_do_not_reach_the_service_are_not_checked(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FIRN_PORT", "none")
    monkeypatch.setenv("FIRN_CONFIG", str(home / "none.toml"))
    _check(("--port", "8123"))
    with pytest.raises(SetupError, match="--prot"):
        _check(("--prot", "8123"))


def test_paths_are_meant_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    words = _absolute(("./m", "models", "owner/name", "--port", "1"))
    assert words == (str(tmp_path / "m"), str(tmp_path / "models"), "owner/name", "--port", "1")


def test_a_path_may_be_new_or_behind_an_equals_sign(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    words = (
        "--ssd-cache-dir",
        "new",
        "--config=firn.toml",
        "--adapter",
        "~/lora",
        "--draft-model=./d",
    )
    new, config, lora, draft = (
        f"{tmp_path}/new",
        f"{tmp_path}/firn.toml",
        "/home/me/lora",
        f"{tmp_path}/d",
    )
    assert _absolute(words) == (
        "--ssd-cache-dir", new, f"--config={config}", "--adapter", lora, f"--draft-model={draft}"
    )  # fmt: skip


def test_only_paths_are_taken_for_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if there are folders of the same names here."""
    monkeypatch.chdir(tmp_path)
    for name in ("qwen", "8000", "64", "firn-demo", "smollm2"):
        (tmp_path / name).mkdir()
    words = (
        "firn-demo",
        "smollm2",
        "--served-model-name",
        "qwen",
        "--port=8000",
        "--max-num-seqs",
        "64",
        "--offline",
        "qwen",
    )
    assert _absolute(words) == (*words[:-1], str(tmp_path / "qwen"))


@pytest.mark.skipif(sys.platform != "linux", reason="the stand-in is for systemd")
def test_a_round_with_a_real_server(
    home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What the workflow does on a Mac."""
    stand_in = home / "bin" / "systemctl"
    program = Path(__file__).with_name("systemctl.py")
    stand_in.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{program}" "$@"\n')
    one_blas.remember(home / ".cache")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("SYSTEMCTL_HOME", str(home))
    monkeypatch.setenv("PATH", f"{home / 'bin'}:{os.environ['PATH']}")
    for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code = service_round.main(["--port", str(port)])
    told = capfd.readouterr()
    assert code == 0, f"{told.out}\n{told.err}\n{(home / 'log').read_text()}"
    assert "after the restart: a reply of" in told.out
    assert not (home / "pid").exists()
    expected = firn(home, "install", "firn-demo")
    assert expected.returncode == 0
    assert service_round.main(["--port", str(port)]) == 1, "somebody's own service is left alone"
    assert firn(home, "uninstall").returncode == 0
