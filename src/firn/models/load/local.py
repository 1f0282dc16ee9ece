"""Models that other programs have downloaded to this machine: the hub's cache, LM Studio's and oMLX's
folders. Ollama keeps MLX models as one blob for each tensor, in a quantisation of its own: those
cannot be served in place.

Reads directories and small files only; imports no MLX.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model in MLX's format. name: "owner/model", or "model" where a program keeps no owners.
    program: which one keeps it."""

    name: str
    folder: Path
    program: str


def other_programs_models(home: Path | None = None) -> list[LocalModel]:
    """LM Studio's and oMLX's models in MLX's format; not those in llama.cpp's. Of two with one name, the
    first."""
    home = home or Path.home()
    models = [m for root in _lm_studio_roots(home) for m in _models(root, "LM Studio")]
    models += [m for root in _omlx_roots(home) for m in _models(root, "oMLX")]
    by_name = {model.name: model for model in reversed(models)}
    return [by_name[name] for name in sorted(by_name)]


def hub_models(cache: Path | None = None) -> list[LocalModel]:
    """Models in the hub's cache whose newest snapshot holds weights."""
    if cache is None:
        from huggingface_hub.constants import HF_HUB_CACHE

        cache = Path(HF_HUB_CACHE)
    models = []
    for repo in _folders(cache):
        kind, _, name = repo.name.partition("--")
        try:
            snapshot = repo / "snapshots" / (repo / "refs" / "main").read_text().strip()
        except (OSError, UnicodeDecodeError):
            continue
        if kind == "models" and _is_model(snapshot):
            models.append(LocalModel(name.replace("--", "/", 1), snapshot, "the hub"))
    return models


def find(name: str, home: Path | None = None, cache: Path | None = None) -> Path | None:
    """The folder of "owner/model" in another program's, or of "model" there or in the hub's cache.

    None: it is not here, or two owners have a model of that name. "owner/model" in the hub's cache is
    left to the hub's own library.
    """
    wanted, models = name.lower(), other_programs_models(home)
    if "/" not in name:
        models += hub_models(cache)
    matches = {
        m.name.lower(): m.folder
        for m in models
        if wanted in (m.name.lower(), m.name.lower().split("/")[-1])
    }
    return next(iter(matches.values())) if len(matches) == 1 else None


def _lm_studio_roots(home: Path) -> list[Path]:
    """Where LM Studio keeps models: the folder its user has chosen, then its newer and older default."""
    chosen = []
    try:
        pointer = (home / ".lmstudio-home-pointer").read_text(encoding="utf-8").strip()
        chosen.append(Path(pointer) / "models")
    except (OSError, UnicodeDecodeError):
        pass
    return [*chosen, home / ".lmstudio" / "models", home / ".cache" / "lm-studio" / "models"]


def _omlx_roots(home: Path) -> list[Path]:
    """The folders of oMLX's settings, or its default."""
    base = home / ".omlx"
    try:
        model = json.loads((base / "settings.json").read_text(encoding="utf-8"))["model"]
        named = [*(model.get("model_dirs") or ()), model.get("model_dir")]
        chosen = [
            Path(folder).expanduser() for folder in named if isinstance(folder, str) and folder
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError):
        chosen = []
    return [*dict.fromkeys(chosen), base / "models"]


def _models(root: Path, program: str) -> Iterator[LocalModel]:
    """Models in the folder, and one below, in their owners' folders."""
    for outer in _folders(root):
        if _is_model(outer):
            yield LocalModel(outer.name, outer, program)
            continue
        for folder in _folders(outer):
            if _is_model(folder):
                yield LocalModel(f"{outer.name}/{folder.name}", folder, program)


def _is_model(folder: Path) -> bool:
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


def _folders(path: Path) -> list[Path]:
    try:
        return sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))
    except OSError:
        return []
