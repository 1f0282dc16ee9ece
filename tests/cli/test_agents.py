"""`firn agents`: settings that agents can read, with values from the server or a model folder."""

from __future__ import annotations

import json
import shlex
import tomllib
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from typer.testing import Result

from firn.api.http.auth import Keys
from firn.api.routes.agents import AGENTS, ServedModel
from firn.api.services import ApiLimits
from firn.cli.agents import agents
from firn.cli.options.parameters import DEFAULT_URL
from tests.api.live import serve
from tests.cli import command
from tests.zoo import ZOO, write_folder

PAGE = Path(__file__).parents[2] / "docs" / "clients.md"
LARGE = ServedModel("Qwen3-8B-4bit", "http://127.0.0.1:8000", 40960)


def run(*arguments: str, **environ: str) -> Result:
    removed = {"FIRN_URL": None, "FIRN_API_KEY": None}
    return command.invoke("agents", *arguments, env=removed | environ)


def shell(text: str) -> dict[str, str]:
    words = (shlex.split(line)[1] for line in text.splitlines() if line.startswith("export "))
    return dict(word.split("=", 1) for word in words)


@pytest.mark.parametrize("agent", AGENTS)
def test_the_docs_show_what_is_printed(agent: str) -> None:
    assert AGENTS[agent].render(LARGE) in PAGE.read_text(encoding="utf-8")


def test_the_help_names_every_agent() -> None:
    words = run("--help").stdout.replace(",", " ").replace(".", " ").split()
    assert set(AGENTS) <= set(words)


def test_the_server_is_asked() -> None:
    with serve(context_length=65536) as live:
        said = shell(run("claude", "--url", live.url).stdout)
        assert said["ANTHROPIC_BASE_URL"] == live.url
        assert said["ANTHROPIC_MODEL"] == "fake"
        assert said["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "65536"
        assert said["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "16384"
        codex = tomllib.loads(run("codex", "--url", f"{live.url}/v1/").stdout)
        assert codex["model"] == "fake"
        assert codex["model_context_window"] == 65536
        assert codex["model_auto_compact_token_limit"] < 65536 - 8192
        assert codex["model_providers"]["firn"]["base_url"] == f"{live.url}/v1"
        opencode = json.loads(run("opencode", FIRN_URL=live.url).stdout)
        entry = opencode["provider"]["firn"]["models"]["fake"]
        assert entry["limit"] == {"context": 65536, "output": 16384}
        assert opencode["model"] == "firn/fake"
        aider = run("aider", "--url", live.url).stdout
        assert '"max_input_tokens": 65536' in aider
        assert f"--openai-api-base {live.url}/v1" in aider


def test_the_hint_repeats_what_was_given_and_is_left_out_of_an_eval(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "my model"
    write_folder("llama", folder)
    agents("claude", str(folder), url="http://h:1/v1", api_key=None)
    assert "eval" not in capsys.readouterr().err, "stdout is no terminal: something takes it"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    agents("claude", str(folder), url="http://h:1/v1", api_key=None)
    command = f"firn agents claude '{folder}' --url http://h:1/v1"
    assert f'firn: run `eval "$({command})"`, then claude\n' in capsys.readouterr().err
    agents("codex", str(folder), url=DEFAULT_URL, api_key=None)
    assert "firn: put this into ~/.codex/config.toml\n" in capsys.readouterr().err


def test_a_servers_limit_of_replies_is_heeded() -> None:
    with serve(context_length=65536, limits=ApiLimits(max_request_tokens=2000)) as live:
        said = shell(run("claude", "--url", live.url).stdout)
        assert said["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "2000"
        (shown,) = live.openai().models.list().data
        assert shown.model_dump()["max_tokens"] == 2000


def test_a_key_is_named_and_never_shown() -> None:
    with serve(keys=Keys(["s3cret"])) as live:
        refused = run("claude", "--url", live.url)
        assert refused.exit_code == 1
        assert "requires an API key" in refused.output
        for agent in AGENTS:
            result = run(agent, "--url", live.url, FIRN_API_KEY="s3cret")
            assert result.exit_code == 0, result.output
            assert "s3cret" not in result.output
            assert "FIRN_API_KEY" in result.stdout


@pytest.mark.parametrize("agent", AGENTS)
def test_a_key_that_the_settings_will_not_find_is_pointed_out(agent: str) -> None:
    """They read it from FIRN_API_KEY, and so does the command that the hint suggests."""
    note = "firn: the settings read the key from FIRN_API_KEY, which is not set to this key"
    with serve(keys=Keys(["s3cret"])) as live:
        given = (agent, "--url", live.url, "--api-key", "s3cret")
        for environ in ({}, {"FIRN_API_KEY": "another"}):
            result = run(*given, **environ)
            assert result.exit_code == 0, result.output
            assert note in result.stderr
            assert "s3cret" not in result.output
        assert note not in run(*given, FIRN_API_KEY="s3cret").stderr
        assert note not in run(*given[:3], FIRN_API_KEY="s3cret").stderr


def test_a_folder_is_read_instead(tmp_path: Path) -> None:
    write_folder("llama", tmp_path / "my model")
    n_tokens = ZOO["llama"].config.get("max_position_embeddings", 32768)
    result = run("claude", str(tmp_path / "my model"))
    said = shell(result.stdout)
    assert said["ANTHROPIC_MODEL"] == "my model"
    assert said["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == str(n_tokens)
    assert said["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:8000"


def test_a_model_that_sees_says_so() -> None:
    seeing = ServedModel("m", "http://h", 8192, vision=True)
    render = AGENTS["opencode"].render
    entry = json.loads(render(seeing))["provider"]["firn"]["models"]["m"]
    assert entry["modalities"]["input"] == ["text", "image"]
    assert (
        "modalities" not in json.loads(render(LARGE))["provider"]["firn"]["models"]["Qwen3-8B-4bit"]
    )


@pytest.mark.parametrize("name", ['a "b" $c', "it's", "org/name", "ü"])
def test_odd_names_do_no_harm(name: str) -> None:
    odd = ServedModel(name, "http://h:1", 65536)
    assert shell(AGENTS["claude"].render(odd))["ANTHROPIC_MODEL"] == name
    assert tomllib.loads(AGENTS["codex"].render(odd))["model"] == name
    assert name in json.loads(AGENTS["opencode"].render(odd))["provider"]["firn"]["models"]
    words: Any = shlex.split(AGENTS["aider"].render(odd).splitlines()[-1])
    assert words[2] == f"openai/{name}"
    qwen = json.loads(AGENTS["qwen"].render(odd))
    assert qwen["model"]["name"] == qwen["modelProviders"]["openai"][0]["id"] == name
    assert yaml.safe_load(AGENTS["continue"].render(odd))["models"][0]["model"] == name


def test_agents_that_are_set_up_in_a_file_get_the_whole_of_it() -> None:
    (entry,) = json.loads(AGENTS["qwen"].render(LARGE))["modelProviders"]["openai"]
    assert entry["baseUrl"] == "http://127.0.0.1:8000/v1"
    assert entry["generationConfig"] == {"contextWindowSize": 40960}
    (model,) = yaml.safe_load(AGENTS["continue"].render(LARGE))["models"]
    assert model["apiBase"] == "http://127.0.0.1:8000/v1"
    options = {"contextLength": 40960, "maxTokens": 10240}
    assert model["defaultCompletionOptions"] == options


def test_a_machine_without_firn_gets_the_settings_from_the_server() -> None:
    with serve(context_length=65536) as live:
        answer = httpx.get(f"{live.url}/v1/agents/claude")
        assert answer.headers["content-type"].startswith("text/plain")
        said = shell(answer.text)
        assert said["ANTHROPIC_BASE_URL"] == live.url
        assert said["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "65536"
        every = httpx.get(f"{live.url}/v1/agents", params={"url": "https://firn.example/x/"}).json()
        assert [agent["id"] for agent in every["agents"]] == list(AGENTS)
        assert every["agents"][1]["where"] == "put this into ~/.codex/config.toml"
        assert 'base_url = "https://firn.example/x/v1"' in every["agents"][1]["settings"]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/agents/emacs", 404),
        ("/v1/agents?model=another", 404),
        ("/v1/agents/claude?url=javascript:alert(1)", 400),
        ("/v1/agents/claude?url=http://h/%22%0Aexport%20X=1", 400),
    ],
)
def test_what_the_server_cannot_answer_is_a_4xx(path: str, status: int) -> None:
    with serve() as live:
        assert httpx.get(live.url + path).status_code == status


def test_the_servers_settings_name_the_key_and_never_show_it() -> None:
    with serve(keys=Keys(["s3cret"])) as live:
        assert httpx.get(f"{live.url}/v1/agents").status_code == 401
        answer = httpx.get(f"{live.url}/v1/agents", headers={"x-api-key": "s3cret"})
        assert "s3cret" not in answer.text
        for agent in answer.json()["agents"]:
            assert "FIRN_API_KEY" in agent["settings"]


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        ([], 2, "firn: name the agent; choose one of claude, codex, opencode"),
        (["emacs"], 2, "firn: unknown agent 'emacs'; choose one of claude, codex"),
        (["claude", "--url", "http://127.0.0.1:1"], 1, "firn: No server answers at"),
        (["claude", "/not/there"], 1, "firn: "),
        (["claude", "owner/not-here"], 1, "firn: owner/not-here is not on this machine"),
    ],
)
def test_faults_are_one_line(arguments: list[str], code: int, line: str) -> None:
    result = run(*arguments)
    assert result.exit_code == code
    assert result.output.startswith(line)
    assert result.output.count("\n") == 1


def test_what_will_not_do_is_pointed_out() -> None:
    with serve(context_length=8192) as live:
        assert "has a context of 8192 tokens" in run("codex", "--url", live.url).stderr
