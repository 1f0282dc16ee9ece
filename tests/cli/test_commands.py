"""The command line: flags become a Config, faults become one line and an exit code."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from firn import __version__
from firn.config import OPTIONS, Config
from firn.core.errors import SetupError
from tests.cli import command
from tests.locked import as_a_user, locked

CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("FIRN_")}


class Recorder:
    """Stands in for the server: keeps the Config it was started with."""

    def __init__(self, *, result: int = 0, error: Exception | None = None) -> None:
        self.configs: list[Config] = []
        self._result = result
        self._error = error

    def __call__(self, config: Config) -> int:
        self.configs.append(config)
        if self._error is not None:
            raise self._error
        return self._result


def firn(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """The real command in its own process."""
    script = "from firn.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        env=CLEAN | environ,
        stdin=subprocess.DEVNULL,
        timeout=60,
    )


def test_serve_builds_the_config_from_flags() -> None:
    start = Recorder()
    arguments = [
        "serve", "some/model", "--host", "::1", "--port", "0", "--served-model-name", "m",
        "--api-key", "a", "--api-key", "b,c", "--max-tokens", "7", "--max-concurrency", "2",
        "--max-queue", "0", "--prefill-chunk", "64", "--adapter", "lora", "--trust-remote-code",
        "--log-level", "debug",
    ]  # fmt: skip
    result = command.invoke(*arguments, start=start)
    assert result.exit_code == 0, result.output
    (config,) = start.configs
    assert config.model.path == "some/model"
    assert config.server.host == "::1"
    assert config.server.port == 0
    assert config.server.served_model_name == "m"
    assert config.server.api_keys == ("a", "b,c")
    assert config.engine.max_tokens == 7
    assert config.engine.max_concurrency == 2
    assert config.engine.max_queue == 0
    assert config.engine.prefill_chunk == 64
    assert config.model.adapter == Path("lora")
    assert config.model.trust_remote_code is True
    assert config.log.level == "debug"
    given = {key for key, origin in config.origins.items() if origin.kind == "flag"}
    assert given == {
        "model.path", "model.adapter", "model.trust_remote_code", "server.host", "server.port",
        "server.served_model_name", "server.api_keys", "engine.max_tokens",
        "engine.max_concurrency", "engine.max_queue", "engine.prefill_chunk", "log.level",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("flag", "key", "value"),
    [
        ("--no-ssd-cache", "cache.no_ssd_cache", True),
        ("--ssd-cache", "cache.no_ssd_cache", False),
        ("--share-cache", "cache.share_cache", True),
        ("--no-share-cache", "cache.share_cache", False),
    ],
)
def test_a_switch_and_its_opposite(flag: str, key: str, value: bool) -> None:
    start = Recorder()
    environ = {"FIRN_NO_SSD_CACHE": "true", "FIRN_SHARE_CACHE": "true"}
    result = command.invoke("serve", flag, start=start, env=environ)
    assert result.exit_code == 0, result.output
    assert start.configs[0].get(key) is value


def test_serve_without_arguments_is_the_defaults() -> None:
    start = Recorder()
    result = command.invoke("serve", start=start, env=dict.fromkeys(_variables()))
    assert result.exit_code == 0
    assert start.configs == [Config()]
    assert result.output == ""


def _variables() -> list[str]:
    return [item.env for item in OPTIONS]


def test_a_switch_can_be_turned_off_again() -> None:
    start = Recorder()
    environ = {"FIRN_TRUST_REMOTE_CODE": "1"}
    for flags in ([], ["--no-trust-remote-code"]):
        assert command.invoke("serve", *flags, start=start, env=environ).exit_code == 0
    assert [config.model.trust_remote_code for config in start.configs] == [True, False]


def test_the_servers_exit_code_is_the_commands() -> None:
    assert command.invoke("serve", start=Recorder(result=3)).exit_code == 3


def test_a_setup_error_is_one_line() -> None:
    start = Recorder(error=SetupError("the model\nis missing"))
    result = command.invoke("serve", start=start)
    assert result.exit_code == 1
    assert result.output == "firn: the model is missing\n"


@pytest.mark.parametrize(
    ("arguments", "warned"),
    [
        (["--host", "0.0.0.0"], True),
        (["--host", "::"], True),
        (["--host", "0.0.0.0", "--api-key", "k"], False),
        (["--host", "127.0.0.2"], False),
        (["--host", "localhost"], False),
    ],
)
def test_an_open_server_is_pointed_out(arguments: list[str], warned: bool) -> None:
    result = command.invoke("serve", *arguments, start=Recorder())
    assert result.exit_code == 0
    assert ("anyone who reaches" in result.output) == warned


def test_a_mistyped_variable_is_pointed_out() -> None:
    run = command.invoke("serve", start=Recorder(), env={"FIRN_PROT": "1"})
    assert "did you mean FIRN_PORT?" in run.output
    shown = command.invoke("config", "show", "--json", env={"FIRN_PROT": "1"})
    assert "did you mean FIRN_PORT?" in shown.stderr
    assert json.loads(shown.stdout)["server.port"]["value"] == 8000


def test_every_option_is_in_the_help() -> None:
    shown = firn("serve", "--help-all", COLUMNS="80").stdout
    for item in OPTIONS:
        if item.flag is None:
            continue
        assert re.search(rf"^  {item.flag}( |$)", shown, re.MULTILINE), "no name is cut"
        by_rule = f"FIRN_{item.flag.removeprefix('--').replace('-', '_').upper()}"
        assert item.env == by_rule or item.env in " ".join(shown.split())
    assert "--config" in shown
    assert "--specprefill" not in shown  # another server's option: recognised, but not offered
    assert max(map(len, shown.splitlines())) <= 80


def test_the_help_begins_with_the_common_options() -> None:
    for words in (("serve",), ("config", "show")):
        shown = firn(*words, "--help", COLUMNS="80").stdout
        lines = shown.splitlines()
        assert len(lines) < 80
        for flag in ("--port", "--api-key", "--ssd-cache-dir", "--help-all", "--config"):
            assert any(line.startswith(f"  {flag} ") for line in lines), flag
        assert "--cpu-dtype" not in shown
        assert "<bool>" not in shown
        assert all(len(line) <= 80 for line in lines)


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        (["serve", "--port", "70000"], 2, "firn: --port: 70000 is too large; the maximum is 65535"),
        (["config", "show", "--api-key", ""], 2, "firn: --api-key: is empty"),
        (["serve", "--config", ""], 2, "firn: --config: is empty"),
        (["serve", "~nobody-here/m"], 1, "firn: There is no model folder ~nobody-here/m"),
        (["serve", "--config", "/none.toml"], 1, "firn: /none.toml: cannot be read: No such file"),
        (["serve", "--api-key-file", "/none"], 1, "firn: /none: the API keys cannot be read"),
    ],
)
def test_faults_are_one_line_in_a_real_process(arguments: list[str], code: int, line: str) -> None:
    run = firn(*arguments)
    assert run.returncode == code
    assert run.stdout == ""
    assert run.stderr.startswith(line)
    assert run.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "--prot", "1"],
        ["srve"],
        ["serve", "a", "--port"],
        ["chat", "--max-tokens", "x"],
        ["chat", "hi", "--model", "m", "--temperature", "inf"],
        ["chat", "hi", "--model", "m", "--temperature", "nan"],
    ],
)
def test_wrong_usage_exits_2_without_a_traceback(arguments: list[str]) -> None:
    run = firn(*arguments)
    assert run.returncode == 2
    assert "Traceback" not in run.stderr
    assert run.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["cache", "ls"], "/firn: Permission denied"),
        (["cache", "verify"], "/firn: Permission denied"),
        (["models", "ls", "--url", "http://127.0.0.1:9"], "/hub: Permission denied"),
        (["serve", "~/model"], "/model: Permission denied"),
        (["doctor"], "/firn: Permission denied. Prompts are kept in memory only"),
    ],
)
def test_a_home_that_may_not_be_looked_into(
    tmp_path: Path, arguments: list[str], told: str
) -> None:
    """As in a container that does not run as the user it was built for."""
    with locked(tmp_path / "home") as home:
        words = [word.replace("~", str(home)) for word in arguments]
        run = subprocess.run(
            [*as_a_user(), sys.executable, "-m", "firn", *words],
            capture_output=True,
            text=True,
            env=CLEAN
            | {"HOME": str(home), "XDG_CACHE_HOME": "", "COLUMNS": "300"}
            | {"HF_HUB_CACHE": f"{home}/hub"},
            timeout=60,
        )
    assert run.returncode == 1
    (line,) = (line for line in (run.stdout + run.stderr).splitlines() if str(home) in line)
    assert told in line
    assert "Traceback" not in run.stderr


def test_a_user_without_a_home_is_told_what_to_set() -> None:
    """As in a container whose user has no entry in /etc/passwd."""
    script = (
        "import os, pwd\n"
        "def unknown(uid): raise KeyError(uid)\n"
        "pwd.getpwuid = unknown; os.environ.pop('HOME', None)\n"
        "from firn.cli import main; main()"
    )
    command = [sys.executable, "-c", script, "cache", "ls"]
    run = subprocess.run(
        command, capture_output=True, text=True, env=CLEAN | {"XDG_CACHE_HOME": ""}, timeout=60
    )
    assert run.returncode == 1
    assert run.stderr == "firn: This user has no home folder; set HOME or XDG_CACHE_HOME.\n"


@pytest.mark.parametrize("ignored", [False, True])
def test_ctrl_c_while_the_command_is_still_being_imported(ignored: bool) -> None:
    """It ends the process without a traceback; a background job ignores it, as it should."""
    script = (
        "import os, signal, sys\n"
        f"if {ignored}: signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "class CtrlC:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name in ('typer', 'firn.cli.service'): os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, CtrlC())\n"
        "from firn.cli import main; main()"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, "--version"], capture_output=True, text=True, env=CLEAN
    )
    assert run.stderr == ""
    assert run.returncode == (0 if ignored else -signal.SIGINT)


def test_a_bad_variable_exits_1() -> None:
    run = firn("serve", FIRN_PORT="abc")
    assert run.returncode == 1
    assert run.stderr == "firn: FIRN_PORT: 'abc' is not a whole number\n"


def test_version_and_bare_command() -> None:
    assert firn("--version").stdout == f"firn {__version__}\n"
    bare = firn()
    assert bare.returncode == 0
    assert all(name in bare.stdout for name in ("serve", "chat", "doctor", "config"))


def test_config_show_prints_every_value_with_its_origin(tmp_path: Path) -> None:
    file = tmp_path / "firn.toml"
    file.write_text("[engine]\nmax_queue = 3\n")
    arguments = ["--config", str(file), "--port", "9", "--api-key", "hunter2"]
    run = firn("config", "show", *arguments, COLUMNS="300", FIRN_LOG_LEVEL="error")
    assert run.returncode == 0
    rows = {line.split()[0]: line.split()[1:] for line in run.stdout.splitlines()[1:]}
    assert set(rows) == {item.key for item in OPTIONS}
    assert rows["server.port"] == ["9", "flag", "--port", "FIRN_PORT"]
    assert rows["engine.max_queue"] == ["3", "file", str(file), "FIRN_MAX_QUEUE"]
    assert rows["log.level"] == ["error", "env", "FIRN_LOG_LEVEL", "FIRN_LOG_LEVEL"]
    assert rows["engine.prefill_chunk"] == ["auto", "default", "FIRN_PREFILL_CHUNK"]
    assert rows["server.api_keys"][0] == "***"
    assert "hunter2" not in run.stdout


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a full device")
def test_a_full_disk_behind_stdout_is_one_line() -> None:
    script = f"{shlex.quote(sys.executable)} -m firn config show > /dev/full"
    run = subprocess.run(["sh", "-c", script], capture_output=True, text=True, env=CLEAN)
    assert (run.returncode, run.stderr) == (1, "firn: the output: No space left on device\n")


def test_config_show_as_json() -> None:
    keys = ["--api-key", "hunter2", "--api-key", "x", "--adapter", "a"]
    run = firn("config", "show", "--json", *keys)
    values = json.loads(run.stdout)
    assert list(values) == [item.key for item in OPTIONS]
    assert values["server.api_keys"]["value"] == ["***", "***"]
    assert values["server.port"] == {
        "value": 8000, "origin": "default", "flag": "--port", "env": "FIRN_PORT",
    }  # fmt: skip
    assert values["model.adapter"]["value"] == "a"
    assert values["model.path"]["flag"] is None
    assert "hunter2" not in run.stdout


def test_serve_without_mlx_says_what_to_install(tmp_path: Path) -> None:
    """As on Linux after a plain `pip install firn`: there is an mlx package, but no mlx.core."""
    script = (
        "import sys, types\n"
        "from firn.cli import main\n"
        "class NoMlx:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'firn.app':\n"
        "            raise ModuleNotFoundError(\"No module named 'mlx.core'\", name='mlx.core')\n"
        "sys.meta_path.insert(0, NoMlx())\n"
        "main()\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, "serve"], capture_output=True, text=True, env=CLEAN
    )
    assert run.returncode == 1
    assert run.stderr.startswith("firn: MLX is not installed for this machine")
    assert run.stderr.count("\n") == 1


# --- one name for one thing ----------------------------------------------------------------


def test_every_command_that_has_the_cache_folder_calls_it_alike() -> None:
    commands = [["serve"], ["config", "show"], ["doctor"]]
    commands += [["cache", name] for name in ("ls", "show", "stats", "verify", "gc", "clear")]
    commands += [["cache", "export"], ["cache", "import"]]
    for words in commands:
        shown = command.invoke(*words, "--help", env={"COLUMNS": "300"}).output
        assert "--ssd-cache-dir" in shown, words
        assert " --dir" not in shown
        assert " --key-file" not in shown


@pytest.mark.parametrize("how", ["flag", "variable", "file", "variable for the file"])
def test_the_cache_folder_is_found_as_the_server_finds_it(tmp_path: Path, how: str) -> None:
    folder = tmp_path / "kv"
    file = tmp_path / "firn.toml"
    file.write_text(f'[cache]\nssd_cache_dir = "{folder}"\n')
    arguments, environ = ["cache", "ls"], dict[str, str]()
    match how:
        case "flag":
            arguments += ["--ssd-cache-dir", str(folder)]
        case "variable":
            environ["FIRN_SSD_CACHE_DIR"] = str(folder)
        case "file":
            arguments += ["--config", str(file)]
        case _:
            environ["FIRN_CONFIG"] = str(file)
    run = command.run(*arguments, **environ)
    assert run.returncode == 0, run.stderr
    assert run.stdout == f"Nothing is stored in {folder}.\n"


def test_doctor_looks_at_the_disk_of_the_cache(tmp_path: Path) -> None:
    result = command.invoke("doctor", "--ssd-cache-dir", str(tmp_path), env={"COLUMNS": "300"})
    assert f"free at {tmp_path}" in result.output
