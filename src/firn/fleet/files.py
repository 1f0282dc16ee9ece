"""What a model's folder tells of it before it is loaded. Reads small files only, and never MLX."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firn.config import converted_dir
from firn.demo.builtin import builtin_folder
from firn.fleet.catalogue import ModelSpec
from firn.models.recognise import context_length, is_vision

THINKING = ("<think>", "<|channel|>", "enable_thinking", "reasoning_effort")


@dataclass(frozen=True, slots=True)
class Facts:
    """None and empty: the folder does not say, or is not on this machine."""

    architecture: str | None = None
    context_length: int | None = None
    capabilities: tuple[str, ...] = ()


def folder_of(spec: ModelSpec) -> Path | None:
    """Where it lies; None: it would have to be fetched or made first."""
    name = spec.path
    made = sorted(converted_dir().glob(f"{name}-*-*/config.json")) if "/" not in name else []
    if builtin := builtin_folder(name):
        return builtin
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if made:
        return made[-1].parent
    return _in_hub_cache(name) if name.count("/") == 1 else None


def _in_hub_cache(name: str) -> Path | None:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except Exception:  # whatever is wrong with it, the model's process will say
        return None


def read_facts(folder: Path | None) -> Facts:
    if folder is None:
        return Facts()
    config = _json(folder / "config.json")
    if not config:
        return Facts()
    pools = (folder / "modules.json").exists()
    template = _template(folder)
    can = {
        "completion": not pools,
        "chat": template != "",
        "vision": is_vision(config),
        "tools": "tools" in template,
        "thinking": any(word in template for word in THINKING),
        "embeddings": pools,
    }
    return Facts(
        str(config.get("model_type") or "") or None,
        context_length(config),
        tuple(name for name, able in can.items() if able),
    )


def _template(folder: Path) -> str:
    try:
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        pass
    for name in ("tokenizer_config.json", "chat_template.json"):
        found = _json(folder / name).get("chat_template")
        if found:
            return json.dumps(found)
    return ""


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
