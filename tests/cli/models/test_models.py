"""`firn models`, `firn pull` and `firn doctor` for several models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import Result

from firn.cli.doctor.fleet import fleet_findings
from firn.config import load
from firn.core.errors import SetupError
from firn.fleet.catalogue import folders
from firn.fleet.memory import Room
from firn.models.load import hub
from tests.api.live import serve
from tests.cli import command
from tests.cli.talk.chat_server import Wire, serving
from tests.fleet.fronts import ECHO, Running, config, fronting

GIB = 1 << 30


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    made = config("firn-demo", "some/other", tmp=tmp_path_factory.mktemp("cli"))
    with fronting(made, command=ECHO) as running:
        yield running


def run(*arguments: str, answer: str = "") -> Result:
    return command.invoke(*arguments, env={"COLUMNS": "200"}, input=answer)


def test_listing_loading_and_unloading(front: Running) -> None:
    listed = run("models", "ls", "--url", front.url)
    assert listed.exit_code == 0, listed.output
    rows = [line.split() for line in listed.output.splitlines()]
    assert rows[1][:3] == ["firn-demo", "*", "unloaded"]
    assert "16384" in rows[1]
    loaded = run("models", "load", "other", "--url", front.url, "--keep-alive", "-1")
    assert loaded.output == "other is loaded\n"
    assert front.states()["other"] == "loaded"
    gone = run("models", "unload", "other", "--url", front.url)
    assert gone.output == "other is unloaded\n"
    missing = run("models", "load", "nobody", "--url", front.url)
    assert missing.exit_code == 1
    assert "is not served here" in missing.output


def test_why_a_model_could_not_be_loaded_stands_below_the_table() -> None:
    why = "The weights need 4.6 GiB and only 3.2 GiB are available: close other programs."
    good, bad = {"id": "a", "state": "loaded"}, {"id": "b", "state": "unloaded", "error": why}
    with serving(models={"data": [bad, good]}) as server:
        listed = command.invoke("models", "ls", "--url", server.url, env={"COLUMNS": "60"})
    assert [line.split()[0] for line in listed.output.splitlines()] == ["model", "b", "a", "b:"]
    assert listed.output.endswith(f"\nb: {why}\n")


def test_more_models_than_a_page_of_the_api_has(tmp_path: Path) -> None:
    names = [f"owner/m{i:02}" for i in range(25)]
    with fronting(config(*names, tmp=tmp_path), command=ECHO) as many:
        listed = run("models", "ls", "--url", many.url)
    assert [line.split()[0] for line in listed.output.splitlines()[1:]] == [n[6:] for n in names]


def model_folder(root: Path, name: str) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "model.safetensors").write_bytes(b"\0" * (2 << 20))
    return folder


def test_removing_asks_first(tmp_path: Path, front: Running) -> None:
    folder, more = model_folder(tmp_path, "owner/one"), ["--models-dir", str(tmp_path)]
    more += ["--url", front.url]
    refused = run("models", "rm", "owner/one", *more, answer="n\n")
    assert "Remove owner/one (2.0 MiB" in refused.output
    assert folder.exists()
    done = run("models", "rm", "owner/one", *more, answer="y\n")
    assert done.exit_code == 0, done.output
    assert not folder.exists()
    assert run("models", "rm", "owner/one", *more).exit_code == 1
    assert "built in" in run("models", "rm", "firn-demo", *more).output


def test_what_is_in_use_is_not_removed(tmp_path: Path, front: Running) -> None:
    folder = model_folder(tmp_path, "other")
    run("models", "load", "other", "--url", front.url)
    more = ["--models-dir", str(tmp_path), "--url", front.url, "-y"]
    refused = run("models", "rm", "other", *more)
    assert refused.exit_code == 1
    assert "first `firn models unload other`" in refused.output
    assert folder.exists()
    run("models", "unload", "other", "--url", front.url)


def test_the_only_model_of_a_server_is_not_to_be_unloaded(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, "fake")
    with serve() as live:
        refused = run(
            "models", "rm", "fake", "--models-dir", str(tmp_path), "--url", live.url, "-y"
        )
    assert refused.output == f"firn: fake is loaded at {live.url}; first stop that server.\n"
    assert folder.exists()


@pytest.mark.parametrize("verb", ["load", "unload"])
def test_a_server_of_one_model_says_that_it_is_always_loaded(verb: str) -> None:
    with serve() as live:
        result = run("models", verb, "fake", "--url", live.url)
    assert result.exit_code == 1
    assert result.output == f"firn: {live.url} serves one model, which is always loaded.\n"


def test_of_a_link_only_the_link_is_removed(tmp_path: Path) -> None:
    folder, shelf = model_folder(tmp_path, "elsewhere/one"), tmp_path / "shelf"
    shelf.mkdir()
    (shelf / "one").symlink_to(folder)
    done = run(
        "models", "rm", "one", "--models-dir", str(shelf), "--url", "http://127.0.0.1:9", "-y"
    )
    assert done.output == f"one is removed: it was a link to {folder}, which stays\n"
    assert list(shelf.iterdir()) == []
    assert (folder / "model.safetensors").exists()


def test_without_a_server_the_disk_is_listed(tmp_path: Path) -> None:
    model_folder(tmp_path, "owner/one")
    url = ["--url", "http://127.0.0.1:9"]
    listed = run("models", "ls", "--models-dir", str(tmp_path), *url)
    assert listed.exit_code == 0
    assert "owner/one" in listed.output
    (tmp_path / "empty").mkdir()
    none = run("models", "ls", "--models-dir", str(tmp_path / "empty"), *url)
    assert none.output.endswith(f" There is no model in {tmp_path / 'empty'} either.\n")


def test_a_model_that_comes_with_firn_is_on_no_hub(tmp_path: Path) -> None:
    done = run("pull", "firn-demo", "--models-dir", str(tmp_path), "--download-retries", "0")
    assert done.output.startswith("firn-demo is in ")
    assert list(tmp_path.iterdir()) == []


def test_a_pull_into_a_folder_shows_the_model_when_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that serves the folder must not find half a model."""
    begun: list[list[Path]] = []

    def fetch(name: str, folder: Path, rules: hub.HubRules) -> Path:
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text("{}")
        begun.append([path for _, path in folders(tmp_path)])
        if len(begun) == 1:
            raise SetupError("the connection broke")
        return folder

    monkeypatch.setattr(hub, "fetch_into", fetch)
    arguments = ("pull", "owner/one", "--models-dir", str(tmp_path))
    assert run(*arguments).exit_code == 1
    assert run(*arguments).exit_code == 0
    assert begun == [[], []]
    assert list(folders(tmp_path)) == [("owner/one", tmp_path / "owner" / "one")]
    assert run(*arguments).exit_code == 0, "it is there: only what is new is fetched"


@pytest.mark.parametrize("arguments", [[""], ["owner/name", "--download-retries", "-1"]])
def test_a_pull_of_nothing_is_wrong_usage(arguments: list[str]) -> None:
    result = run("pull", *arguments)
    assert result.exit_code == 2
    assert isinstance(result.exception, SystemExit), "no traceback"


def test_another_kind_of_server_loads_no_models() -> None:
    def page(wire: Wire) -> None:
        wire.refuse(200, "<html>")

    with serving(page) as server:
        result = run("models", "load", "a b?c", "--keep-alive", "1m", "--url", server.url)
    assert (result.exit_code, result.output) == (
        1,
        f"firn: {server.url} does not look like a firn server.\n",
    )
    assert server.paths == ["/v1/models/a%20b%3Fc/load"]


def test_what_cannot_be_pulled_is_one_line() -> None:
    failed = run("pull", "./nowhere")
    assert failed.exit_code == 1
    assert failed.output.startswith("firn: There is no model folder ./nowhere")


def test_doctor_adds_the_set_up(tmp_path: Path) -> None:
    (tmp_path / "firn.toml").write_text(
        "[models.firn-demo]\npinned = true\n[models.firn-demo-hybrid]\n[models.far]\npath='a/far'\n"
    )
    settings = load({}, environ={}, file=tmp_path / "firn.toml")

    def found(budget: float, free: float) -> dict[str, tuple[str, str]]:
        available = Room(int(budget * GIB), free * GIB)
        return {f.topic: (f.mark, f.text) for f in fleet_findings(settings, available)}

    roomy = found(4, 8)
    assert roomy["firn-demo"][0] == roomy["together"][0] == "ok"
    assert "pinned" in roomy["firn-demo"][1]
    assert roomy["far"][0] == "note"
    assert found(0.8, 8)["together"][0] == "note"
    tight = found(0.2, 8)
    assert tight["firn-demo"][0] == tight["together"][0] == "problem"
    assert found(4, 0.1)[""][0] == "note"


def test_doctor_takes_several_models() -> None:
    result = run("doctor", "firn-demo", "firn-demo-hybrid")
    assert "together" in result.output
    assert run("doctor", "firn-demo", "firn-demo-hybrid", "--measure").exit_code == 2
