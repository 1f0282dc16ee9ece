"""The port to a tool-call parser that comes with the tokenizer: a function of a whole call."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

ParseCall = Callable[[str, Sequence[dict[str, Any]]], object]
"""(the text between the markers, the tools as OpenAI writes them) -> a call, or a list of calls.

A call is {"name": ..., "arguments": {...}}, with an "id" where the model gave one. Any exception
means that the text is not a call.
"""


@dataclass(frozen=True, slots=True)
class NativeParser:
    """`closes` is "" for a format whose calls run to the end of the reply."""

    name: str
    opens: str
    closes: str
    parse: ParseCall

    @property
    def tokens(self) -> list[str]:
        """Every text in the markers that may be a control token."""
        tokens = [self.opens, self.closes]
        for marker in (self.opens, self.closes):
            tokens += re.findall(r"<[^<>]*>", marker)
        return [t for t in tokens if t]
