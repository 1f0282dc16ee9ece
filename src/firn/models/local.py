"""Models that other programs have brought to this machine: the hub's cache, LM Studio's folder.

Reads directories and small files only; imports no MLX.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Found:
    """A model in MLX's format. name: as its maker and it are called, "owner/model"."""

    name: str
    folder: Path


def lm_studio_models(home: Path | None = None) -> list[Found]:
    """Those of LM Studio that are in MLX's format, not llama.cpp's."""
    found = {f.name: f for root in reversed(_roots(home or Path.home())) for f in _models(root)}
    return [found[name] for name in sorted(found)]


def find(name: str, home: Path | None = None) -> Path | None:
    """The folder of "owner/model", or of "model" where only one maker's is here. None: not there."""
    wanted = name.lower()
    matches = [
        f.folder
        for f in lm_studio_models(home)
        if wanted in (f.name.lower(), f.name.lower().split("/")[1])
    ]
    return matches[0] if len(matches) == 1 else None


def _roots(home: Path) -> list[Path]:
    """Where LM Studio keeps models, newest custom first: it lets its users move everything."""
    places = []
    try:
        pointer = (home / ".lmstudio-home-pointer").read_text(encoding="utf-8").strip()
        places.append(Path(pointer) / "models")
    except (OSError, UnicodeDecodeError):
        pass
    return [*places, home / ".lmstudio" / "models", home / ".cache" / "lm-studio" / "models"]


def _models(root: Path) -> Iterator[Found]:
    for maker in _folders(root):
        for folder in _folders(maker):
            if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
                yield Found(f"{maker.name}/{folder.name}", folder)


def _folders(path: Path) -> list[Path]:
    try:
        return sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))
    except OSError:
        return []
