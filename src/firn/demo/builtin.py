"""Where the built-in models are."""

from __future__ import annotations

from importlib import resources
from pathlib import Path


def builtin_folder(name: str) -> Path | None:
    """The folder of a built-in model; None for any other name."""
    folder = resources.files("firn.demo") / "models" / name
    is_ours = "/" not in name and isinstance(folder, Path) and (folder / "config.json").exists()
    return folder if is_ours and isinstance(folder, Path) else None
