"""What launchd and systemd run: `python -m firn.cli.service.start SETTINGS serve ...`.

It is `firn serve ...` with the variables of a settings file, which may be secrets. They are set before
anything is imported that reads them. Where the supervisor does not look after logs, this does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from firn.cli import main
from firn.core.errors import SetupError
from firn.host.services.log_file import LogFile
from firn.host.services.service import ServiceSettings

WRONG_SETTINGS = 78
"""EX_CONFIG of sysexits.h: a supervisor shows it."""


def start(arguments: Sequence[str]) -> None:
    path, *command = arguments
    try:
        settings = ServiceSettings.read(Path(path))
    except SetupError as e:
        print(f"firn: {e.message}", file=sys.stderr)
        raise SystemExit(WRONG_SETTINGS) from e
    os.environ.update(settings.environment)
    if settings.log:
        LogFile(Path(settings.log)).watch()
    sys.argv = ["firn", *command]
    main()


if __name__ == "__main__":
    start(sys.argv[1:])
