"""The `firn` command. Nothing is imported here but what `main` needs to survive an early Ctrl-C."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper


def main() -> None:
    # A terminal that cannot show a character gets a question mark; bytes that are no text are found
    # out about where they would be sent.
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
    """At once and without a traceback: nothing has begun that would have to be put in order.

    Where Ctrl-C is ignored, as for a job in the background, it stays so.
    """
    raises = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if raises:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    yield
    if raises:
        signal.signal(signal.SIGINT, signal.default_int_handler)
