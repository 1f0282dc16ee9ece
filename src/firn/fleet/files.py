"""What a model's folder reveals before the model is loaded. Reads only small files, without MLX."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firn.config import converted_dir
from firn.core.errors import SetupError
from firn.demo.builtin import builtin_folder
from firn.fleet.catalogue import ModelSpec
from firn.models.load.local import find
from firn.models.load.packaged import PACKAGED, made_folder, no_such_model
from firn.models.load.recognise import context_length, is_vision, scoring_settings
from firn.text.prompt.rerank import NAMED
from firn.text.reply.formats import reads_calls

THINKING = ("<think>", "<|channel|>", "enable_thinking", "reasoning_effort")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a folder reveals about its model. None or empty: unknown, or not on this machine."""

    architecture: str | None = None
    context_length: int | None = None
    capabilities: tuple[str, ...] = ()


def folder_of(spec: ModelSpec) -> Path | None:
    """The model's folder; None: it would have to be downloaded or converted first."""
    name = spec.path
    if name in PACKAGED:
        return made_folder(PACKAGED[name], converted_dir())
    if builtin := builtin_folder(name):
        return builtin
    path = Path(os.path.expanduser(name))
    if path.exists():
        return path
    in_cache = _in_hub_cache(name) if _is_hub_id(name) else None
    return in_cache or find(name)


def check(spec: ModelSpec) -> None:
    """Raises SetupError if there is no such model and none could be downloaded."""
    name = spec.path
    if not (name in PACKAGED or builtin_folder(name) or _is_hub_id(name) or find(name)):
        path = Path(os.path.expanduser(name))
        if not path.exists():
            raise no_such_model(name)
        if not (path / "config.json").exists():
            raise SetupError(f"{name} has no config.json: it is not a model folder.")


def _is_hub_id(name: str) -> bool:
    return not name.startswith((".", "/", "~")) and name.count("/") == 1


def _in_hub_cache(name: str) -> Path | None:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except Exception:  # the model's process will report it
        return None


def read_facts(folder: Path | None) -> ModelFacts:
    if folder is None:
        return ModelFacts()
    config = _json(folder / "config.json")
    if not config:
        return ModelFacts()
    reranks = NAMED in folder.name.lower() or scoring_settings(folder) is not None
    embeds = (folder / "modules.json").exists() and not reranks
    template = _template(folder)
    can = {
        "completion": not embeds,
        "chat": template != "",
        "vision": is_vision(config),
        "tools": reads_calls(template, _added_tokens(folder)),
        "thinking": any(word in template for word in THINKING),
        "embeddings": embeds,
        "rerank": reranks,
    }
    return ModelFacts(
        str(config.get("model_type") or "") or None,
        context_length(config),
        tuple(name for name, able in can.items() if able),
    )


def _template(folder: Path) -> str:
    """The sources of its chat templates; some models have another for chats with tools."""
    files = (folder / "chat_template.jinja", *folder.glob("additional_chat_templates/*.jinja"))
    try:
        return "\n".join(file.read_text(encoding="utf-8") for file in files)
    except (OSError, UnicodeDecodeError):
        pass
    for name in ("tokenizer_config.json", "chat_template.json"):
        template = _json(folder / name).get("chat_template")
        if template:
            return template if isinstance(template, str) else json.dumps(template)
    return ""


def _added_tokens(folder: Path) -> frozenset[str]:
    added = _json(folder / "tokenizer_config.json").get("added_tokens_decoder")
    tokens = added.values() if isinstance(added, dict) else ()
    return frozenset(str(token.get("content")) for token in tokens if isinstance(token, dict))


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
