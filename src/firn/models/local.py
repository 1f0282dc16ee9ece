"""Models that other programs have brought to this machine: the hub's cache, LM Studio's folder.

Reads directories and small files only; imports no MLX.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model in MLX's format. name: as its maker and it are called, "owner/model"."""

    name: str
    folder: Path


def lm_studio_models(home: Path | None = None) -> list[LocalModel]:
    """Those of LM Studio that are in MLX's format, not llama.cpp's."""
    found = {f.name: f for root in reversed(_roots(home or Path.home())) for f in _models(root)}
    return [found[name] for name in sorted(found)]


def hub_models(cache: Path | None = None) -> list[LocalModel]:
    """Those of the hub's cache whose newest snapshot holds weights."""
    if cache is None:
        from huggingface_hub.constants import HF_HUB_CACHE

        cache = Path(HF_HUB_CACHE)
    found = []
    for repo in _folders(cache):
        kind, _, name = repo.name.partition("--")
        try:
            snapshot = repo / "snapshots" / (repo / "refs" / "main").read_text().strip()
        except (OSError, UnicodeDecodeError):
            continue
        if kind == "models" and _is_model(snapshot):
            found.append(LocalModel(name.replace("--", "/", 1), snapshot))
    return found


def find(name: str, home: Path | None = None, cache: Path | None = None) -> Path | None:
    """The folder of LM Studio's "owner/model"; or of "model", the hub's too, where it is clear whose.

    None: it is not here, or two makers have one of that name. The hub's library finds its own ids.
    """
    wanted, models = name.lower(), lm_studio_models(home)
    if "/" not in name:
        models += hub_models(cache)
    matches = {
        f.name.lower(): f.folder
        for f in models
        if wanted in (f.name.lower(), f.name.lower().split("/")[-1])
    }
    return next(iter(matches.values())) if len(matches) == 1 else None


def _roots(home: Path) -> list[Path]:
    """Where LM Studio keeps models, newest custom first: it lets its users move everything."""
    places = []
    try:
        pointer = (home / ".lmstudio-home-pointer").read_text(encoding="utf-8").strip()
        places.append(Path(pointer) / "models")
    except (OSError, UnicodeDecodeError):
        pass
    return [*places, home / ".lmstudio" / "models", home / ".cache" / "lm-studio" / "models"]


def _models(root: Path) -> Iterator[LocalModel]:
    for maker in _folders(root):
        for folder in _folders(maker):
            if _is_model(folder):
                yield LocalModel(f"{maker.name}/{folder.name}", folder)


def _is_model(folder: Path) -> bool:
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


def _folders(path: Path) -> list[Path]:
    try:
        return sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))
    except OSError:
        return []
