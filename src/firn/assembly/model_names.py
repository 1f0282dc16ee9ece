"""Which folder a model's name stands for: a built-in model's, a packaged one's, or any other.

firn's own names take precedence over folders of the same name, which are served as ./NAME.
"""

from __future__ import annotations

from pathlib import Path

from firn.config import converted_dir
from firn.demo.builtin import builtin_folder
from firn.models.load import loader, packaged
from firn.models.load.hub import HubRules
from firn.models.load.inspect import local_folder


def resolve(name: str, rules: HubRules | None = None) -> Path:
    """May download. Raises SetupError."""
    rules = rules or HubRules()
    if name in packaged.PACKAGED:
        return packaged.folder_of(packaged.PACKAGED[name], converted_dir(), offline=rules.offline)
    return builtin_folder(name) or loader.resolve(name, rules)


def on_this_machine(name: str) -> Path | None:
    """The folder, if nothing has to be fetched or made for it. Raises SetupError: it can be no model."""
    if name in packaged.PACKAGED:
        return packaged.made_folder(packaged.PACKAGED[name], converted_dir())
    return builtin_folder(name) or local_folder(name)
