"""Settings of the dashboard, the log and the trace."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from firn.config.options import option

LogLevel = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True, slots=True)
class LogConfig:
    level: LogLevel = option(
        "info", "How much to log.", flag="--log-level", words={"warn": "warning"}
    )
    record_trace: Path | None = option(
        None,
        "Append a line to this file for each request: time, lengths, salted hashes of blocks, tiers, "
        "first token; no text. `firn cache advise` and `firn bench replay` read it.",
        metavar="FILE",
    )


@dataclass(frozen=True, slots=True)
class PageConfig:
    no_dashboard: bool = option(False, "Serve no page at /, only the server's name and version.")
    show_text: bool = option(
        False,
        "Allow the page and /v1/activity to quote prompts: where one differs from what is stored, "
        "and how stored prefixes begin. A key sees its own prompts, the operator everybody's.",
    )
