"""What `firn doctor` finds: values, which it prints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Mark = Literal["ok", "note", "problem"]
STYLES: dict[Mark, tuple[str, str]] = {
    "ok": ("", ""),
    "note": ("•", "yellow"),
    "problem": ("✗", "bold red"),
}


@dataclass(frozen=True, slots=True)
class Finding:
    topic: str
    text: str
    mark: Mark = "ok"
