"""What `firn models` and `firn pull` do: ask the running server, or search this machine's disk."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import typer
from rich.table import Table
from rich.text import Text

from firn.cli.client import ChatClient, RequestFailed, ServerNotFound
from firn.cli.terminal import confirm, plain_console, size
from firn.config import UsageError
from firn.core.errors import SetupError
from firn.demo.builtin import builtin_folder

if TYPE_CHECKING:
    from firn.models.load.hub import HubRules

STYLES = {"loaded": "green", "loading": "yellow", "draining": "yellow"}


def ls(url: str, api_key: str | None, models_dir: Path | None) -> int:
    try:
        with ChatClient(url, api_key=api_key) as client:
            _show_served(client.served_models())
    except ServerNotFound as error:
        models = local_models(models_dir)
        where = f"in {models_dir}" if models_dir else "on this machine"
        here = "On this machine:" if models else f"There is no model {where} either."
        typer.echo(f"firn: {error.message} {here}", err=True)
        if models:
            _show_local(models)
    return 0


def _show_served(models: Sequence[Mapping[str, Any]]) -> None:
    table = _table("model", "state", "size", "context", "until", "can")
    for model in models:
        state = str(model.get("state") or "loaded")
        name = str(model["id"]) + (" *" if model.get("default") else "")
        until = "pinned" if model.get("pinned") else str(model.get("expires_at") or "")
        can = ", ".join(model.get("capabilities") or ())
        cells = [
            Text(name),
            Text(state, style=STYLES.get(state, "dim")),
            Text(size(int(model.get("bytes") or 0))),
            Text(str(model.get("context_length") or "")),
            Text(until),
            Text(can),
        ]
        table.add_row(*cells)
    plain_console(soft_wrap=False).print(table)
    for model in models:
        if model.get("error"):  # too long for a cell
            plain_console().print(Text(f"{model['id']}: {model['error']}", style="red"))


def change(
    name: str, verb: str, url: str, api_key: str | None, *, keep_alive: str | None = None
) -> int:
    """verb: load or unload."""
    body = None if keep_alive is None else {"keep_alive": keep_alive}
    with ChatClient(url, api_key=api_key) as client:
        model = client.post(f"/v1/models/{quote(name)}/{verb}", body)
    typer.echo(f"{model['id']} is {model['state']}")
    return 0


# --- on disk -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelOnDisk:
    """revisions: to delete from the hub's cache. owner: the program whose folder it is in."""

    name: str
    folder: Path
    nbytes: int
    revisions: tuple[str, ...] = ()
    owner: str = ""


def local_models(models_dir: Path | None) -> list[ModelOnDisk]:
    """The models in the folder; if None, those of packages, those with weights in the hub's cache, and
    those of LM Studio and oMLX."""
    if models_dir is None:
        return [*_packaged_models(), *_hub_models(), *_other_programs_models()]
    from firn.fleet.catalogue import folders

    if not models_dir.is_dir():
        raise SetupError(f"There is no folder {models_dir}.")
    return [ModelOnDisk(name, folder, _nbytes(folder)) for name, folder in folders(models_dir)]


def _packaged_models() -> list[ModelOnDisk]:
    from firn.config import converted_dir
    from firn.models.load.packaged import PACKAGED, made_folder

    made = {name: made_folder(model, converted_dir()) for name, model in PACKAGED.items()}
    return [ModelOnDisk(name, folder, _nbytes(folder)) for name, folder in made.items() if folder]


def _hub_models() -> list[ModelOnDisk]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return []
    models = []
    for repo in sorted(repos, key=lambda repo: str(repo.repo_id)):
        names = {str(file.file_name) for rev in repo.revisions for file in rev.files}
        if repo.repo_type == "model" and any(name.endswith(".safetensors") for name in names):
            revisions = tuple(rev.commit_hash for rev in repo.revisions)
            path = Path(repo.repo_path)
            models.append(ModelOnDisk(repo.repo_id, path, repo.size_on_disk, revisions))
    return models


def _other_programs_models() -> list[ModelOnDisk]:
    from firn.models.load.local import other_programs_models

    return [
        ModelOnDisk(model.name, model.folder, _nbytes(model.folder), owner=model.program)
        for model in other_programs_models()
    ]


def _show_local(models: list[ModelOnDisk]) -> None:
    table = _table("model", "size", "folder")
    for model in models:
        table.add_row(Text(model.name), Text(size(model.nbytes)), Text(str(model.folder)))
    plain_console(soft_wrap=False).print(table)


def rm(name: str, url: str, api_key: str | None, models_dir: Path | None, *, yes: bool) -> int:
    if builtin_folder(name):
        raise SetupError(f"{name} is built in.")
    model = next((model for model in local_models(models_dir) if model.name == name), None)
    if model is None:
        where = f"in {models_dir}" if models_dir else "on this machine"
        raise SetupError(f"There is no model {name} {where}; `firn models ls` lists them.")
    if model.owner:
        raise SetupError(f"{name} belongs to {model.owner}: remove it there ({model.folder}).")
    _refuse_in_use(name, url, api_key)
    question = f"Remove {model.name} ({size(model.nbytes)}, {model.folder})?"
    if not yes and not confirm(question):
        typer.echo("Nothing was removed.")
        return 1
    typer.echo(f"{model.name} is removed: {_remove(model)}")
    return 0


def _remove(model: ModelOnDisk) -> str:
    """Removes the model's files. Returns a text about what that freed."""
    if model.folder.is_symlink():
        target = model.folder.readlink()
        model.folder.unlink()
        return f"it was a link to {target}, which stays"
    if model.revisions:
        from huggingface_hub import scan_cache_dir

        scan_cache_dir().delete_revisions(*model.revisions).execute()
    else:
        shutil.rmtree(model.folder)
    return f"{size(model.nbytes)} freed"


def _refuse_in_use(name: str, url: str, api_key: str | None) -> None:
    """Raises SetupError if a server has the model loaded, and so needs its files."""
    try:
        with ChatClient(url, api_key=api_key) as client:
            served = client.served_models()
    except RequestFailed:
        return
    for model in served:
        state = model.get("state", "loaded")
        if model["id"] in (name, name.split("/")[-1]) and state != "unloaded":
            # Only a server of several models reports a default, and can unload one.
            several = "default" in model
            how = f"`firn models unload {model['id']}`" if several else "stop that server"
            raise SetupError(f"{model['id']} is {state} at {url}; first {how}.")


def pull(name: str, models_dir: Path | None, *, retries: int) -> int:
    from firn.assembly import model_names
    from firn.models.load.hub import HubRules
    from firn.models.load.packaged import PACKAGED

    if not name.strip():
        raise UsageError("which model? Give the id of one on the Hugging Face hub, or smollm2")
    rules = HubRules(retries=retries)
    is_ours = name in PACKAGED or builtin_folder(name) is not None  # no hub has it
    if models_dir is None or is_ours:
        folder = model_names.resolve(name, rules)
    else:
        folder = _fetch_whole(name, models_dir, rules)
    typer.echo(f"{name} is in {folder} ({size(_nbytes(folder))})")
    return 0


def _fetch_whole(name: str, models_dir: Path, rules: HubRules) -> Path:
    """A server that serves this folder sees the model once it is complete; a broken download resumes."""
    from firn.models.load.hub import fetch_into

    folder = models_dir / name
    if folder.exists():
        return fetch_into(name, folder, rules)
    begun = models_dir / f".{name.replace('/', '--')}.partial"
    fetch_into(name, begun, rules)
    folder.parent.mkdir(parents=True, exist_ok=True)
    return begun.rename(folder)


def _nbytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
