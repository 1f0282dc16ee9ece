"""The `firn` command. Imports only what `main` needs to survive an early Ctrl-C.

`commands` names all commands, and each imports its work when it runs; those of several files have a
folder. `client` and `terminal` are for all of them.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper


def main() -> None:
    # A character that the terminal cannot show becomes a question mark. Undecodable input is kept,
    # and reported where it would be sent.
    streams = ((sys.stdin, "surrogateescape"), (sys.stdout, "replace"), (sys.stderr, "replace"))
    for stream, errors in streams:
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors=errors)
    with _ctrl_c_ends_the_process():
        from typer.main import get_command

        from firn.cli.commands import make_cli
        from firn.host.shutdown import end

        command = get_command(make_cli())
    try:
        command()
    except SystemExit as exit:
        if "mlx.core" in sys.modules:
            end(exit.code)
        raise


@contextmanager
def _ctrl_c_ends_the_process() -> Iterator[None]:
    """Lets Ctrl-C end the process immediately and without a traceback: nothing needs cleaning up.

    If Ctrl-C is ignored, as in a background job, it stays ignored.
    """
    raises = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if raises:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    yield
    if raises:
        signal.signal(signal.SIGINT, signal.default_int_handler)
