"""Which folder a model's name stands for: a built-in one, a packaged one, any other.

A name of firn's own wins over a folder of the same name; that folder is served as ./NAME.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from firn.config import converted_dir
from firn.models import loader, packaged


def resolve(name: str) -> Path:
    """May download. Raises SetupError."""
    builtin = resources.files("firn.demo") / "models" / name
    if "/" not in name and isinstance(builtin, Path) and (builtin / "config.json").exists():
        return builtin
    if name in packaged.PACKAGED:
        return packaged.folder_of(packaged.PACKAGED[name], converted_dir())
    return loader.resolve(name)
