"""Ollama's pull, delete, copy and create at the front, with Ollama's own client."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import ollama
import pytest

from firn.fleet import downloads
from tests.fleet.fronts import ECHO, Running, config, fronting

HUB = """
import pathlib, sys
name, folder = sys.argv[1], pathlib.Path(sys.argv[3])
if "missing" in name:
    sys.exit("firn: %s could not be fetched from the hub: 404" % name)
(folder / name).mkdir(parents=True)
(folder / name / "config.json").write_text("{}")
"""
"""What `firn pull NAME --models-dir DIR` does, without a hub."""


@pytest.fixture
def front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    monkeypatch.setattr(downloads, "PULL", (sys.executable, "-c", HUB))
    shelf = tmp_path / "models"
    (shelf / "first").mkdir(parents=True)
    (shelf / "first" / "config.json").write_text("{}")
    made = config("firn-demo", tmp=tmp_path, **{"fleet.models_dir": str(shelf)})
    with fronting(made, command=ECHO) as running:
        yield running


def names(front: Running) -> set[str]:
    return {str(model.model).removesuffix(":latest") for model in front.ollama().list().models}


def test_a_model_is_pulled_used_and_deleted(front: Running, tmp_path: Path) -> None:
    client = front.ollama()
    statuses = [progress.status for progress in client.pull("owner/new", stream=True)]
    assert statuses[0] == "pulling owner/new"
    assert statuses[-1] == "success"
    assert "owner/new" in names(front)
    messages = [{"role": "user", "content": "Hi"}]
    body = {"model": "owner/new", "messages": messages}
    assert front.plain.post("/v1/chat/completions", json=body).status_code == 200
    assert front.states()["owner/new"] == "loaded"
    assert client.delete("owner/new").status == "success"
    assert "owner/new" not in names(front)
    assert [path.name for path in (tmp_path / "models").iterdir() if path.name != "owner"] == [
        "first"
    ]
    assert list((tmp_path / "models" / "owner").iterdir()) == []


def test_what_is_here_is_not_pulled_again(front: Running) -> None:
    assert front.ollama().pull("first").status == "success"
    assert front.ollama().pull("firn-demo").status == "success"


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "owner/../../x", "nobody", ".a/b"])
def test_only_ids_of_the_hub_are_pulled(front: Running, name: str) -> None:
    with pytest.raises(ollama.ResponseError) as raised:
        front.ollama().pull(name)
    assert raised.value.status_code == 400


def test_a_failed_pull_says_why(front: Running) -> None:
    with pytest.raises(ollama.ResponseError, match="could not be fetched from the hub: 404"):
        front.ollama().pull("owner/missing")
    with pytest.raises(ollama.ResponseError, match="could not be fetched from the hub: 404"):
        list(front.ollama().pull("owner/missing", stream=True))


@pytest.mark.parametrize(("name", "status"), [("gpt-4o", 404), ("nobody", 404), ("firn-demo", 400)])
def test_a_delete_removes_only_what_it_names_in_the_folder(
    front: Running, tmp_path: Path, name: str, status: int
) -> None:
    """`gpt-4o` stands for the default model in requests."""
    with pytest.raises(ollama.ResponseError) as raised:
        front.ollama().delete(name)
    assert raised.value.status_code == status
    assert (tmp_path / "models" / "first").exists()


def test_copies_and_modelfiles_are_refused_with_what_to_do_instead(front: Running) -> None:
    with pytest.raises(ollama.ResponseError, match="--alias"):
        front.ollama().copy("first", "second")
    with pytest.raises(ollama.ResponseError, match="pull one"):
        front.ollama().create("mine", from_="first")


def test_only_the_operator_adds_and_removes(tmp_path: Path) -> None:
    made = config(
        "firn-demo", "firn-demo-hybrid", tmp=tmp_path,
        **{"server.api_keys": ["alice"], "server.admin_keys": ["root"]},
    )  # fmt: skip
    with fronting(made, command=ECHO) as front:
        for method, path in (("POST", "/api/pull"), ("DELETE", "/api/delete")):
            content = json.dumps({"model": "firn-demo"})
            headers = {"x-api-key": "alice", "content-type": "application/json"}
            answer = httpx.request(method, front.url + path, content=content, headers=headers)
            assert answer.status_code == 403
        headers["x-api-key"] = "root"
        pulled = httpx.post(f"{front.url}/api/pull", content='{"model": "a/b"}', headers=headers)
        assert pulled.status_code == 404
        assert "--models-dir" in pulled.json()["error"]
