"""The splitter for harmony, the format of gpt-oss: every part of a reply has a header with its channel.

    <|channel|>analysis<|message|>...<|end|>                                    reasoning
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>...<|return|>                  text

Written by hand, and on text: openai-harmony's parser needs its own vocabulary, which it downloads.
"""

from __future__ import annotations

import re

from firn.text.calls import CallParser, Script
from firn.text.channel_splitter import ChannelSplitter, Kind
from firn.text.json_calls import JsonCallParser, JsonTape
from firn.text.schema import ToolSchemas

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
CONTROL = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)

_RECIPIENT = re.compile(r"to=([^\s<]+)")
_FUNCTIONS = "functions."


class HarmonyCall(JsonCallParser):
    """The body of a message to a function: its arguments."""

    def __init__(self, marker: str, schemas: ToolSchemas, *, known_only: bool = False) -> None:
        self._function = marker
        super().__init__("", schemas, known_only=known_only)

    def script(self) -> Script[None]:
        self.start(self._function)
        char = yield from JsonTape(self.tape).next_char()
        if not char:
            self.arguments("{}")
            return
        yield from self.guarded(self.stream_arguments())


class HarmonySplitter(ChannelSplitter):
    header_end = MESSAGE
    starts = (START, CHANNEL, MESSAGE, CONSTRAIN, "to=", END, CALL, RETURN)
    openers = (START, CHANNEL)
    body_ends = (END, CALL, RETURN)

    def body(self, header: str) -> Kind | CallParser:
        recipient = _RECIPIENT.search(header)
        channel = header.rpartition(CHANNEL)[2].lstrip()
        name = recipient[1] if recipient else ""
        is_function = name.startswith(_FUNCTIONS) or name in self.schemas
        if is_function and self.schemas.tools:
            return HarmonyCall(name.removeprefix(_FUNCTIONS), self.schemas)
        return "reasoning" if channel.startswith("analysis") else "text"
