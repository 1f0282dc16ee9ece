"""`firn serve`: warnings before the server starts, and the call that starts it."""

from __future__ import annotations

import os
from collections.abc import Callable

import typer

from firn.config import Config, unknown_variables
from firn.core.errors import SetupError
from firn.host.mac import is_translated
from firn.host.machine import is_loopback, most_descriptors

MLX_LM_FILES = 4096
"""mlx-lm sets this limit when it is imported, and fails if it cannot."""


def serve(config: Config, *, start: Callable[[Config], int] | None = None) -> int:
    for line in unknown_variables(os.environ):
        typer.echo(f"firn: {line}", err=True)
    if not config.server.api_keys and not is_loopback(config.server.host):
        typer.echo(
            f"firn: anyone who reaches {config.server.host} can use this server; "
            "--api-key or --api-key-file would restrict it",
            err=True,
        )
    return (start or _app(config))(config)


def _app(config: Config) -> Callable[[Config], int]:
    """The function that serves one model, or several. One needs MLX here, which may be missing."""
    if most_descriptors() < MLX_LM_FILES:
        raise SetupError(
            f"mlx-lm needs a limit of {MLX_LM_FILES} open files, and this user's is "
            f"{most_descriptors()}; raise it (ulimit -Hn {MLX_LM_FILES})"
        )
    if config.has_front:
        if config.model.tensor_parallel:
            raise SetupError("--tensor-parallel serves one model; several were given")
        from firn.fleet.server import serve as serve_fleet

        return serve_fleet
    try:
        if config.model.tensor_parallel:
            from firn.ranks.serve import serve as serve_shared

            return serve_shared
        from firn.app import serve as serve_model
    except ImportError as error:
        if (error.name or "").split(".")[0] == "mlx":
            from firn.cli.doctor.examine import INSTALL_HINT, ROSETTA

            if is_translated():
                raise SetupError(ROSETTA) from error
            raise SetupError(
                f"MLX is not installed for this machine; {INSTALL_HINT} ({error})"
            ) from error
        raise
    return serve_model
