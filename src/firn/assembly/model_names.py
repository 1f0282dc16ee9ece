"""Which folder a model's name stands for: a built-in one, a packaged one, any other.

A name of firn's own wins over a folder of the same name; that folder is served as ./NAME.
"""

from __future__ import annotations

from pathlib import Path

from firn.config import converted_dir
from firn.demo.builtin import builtin_folder
from firn.models import loader, packaged
from firn.models.hub import HubRules


def resolve(name: str, rules: HubRules | None = None) -> Path:
    """May download. Raises SetupError."""
    if name in packaged.PACKAGED:
        return packaged.folder_of(packaged.PACKAGED[name], converted_dir())
    return builtin_folder(name) or loader.resolve(name, rules or HubRules())
