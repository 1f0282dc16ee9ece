"""Calls as Python: [get_weather(city="Paris")] between control tokens (LFM2), in tags (OLMo), bare."""

from __future__ import annotations

from firn.text.calls import CallParser, NotACall, Script, TextEnded
from firn.text.parsers import Clues, ToolFormat
from firn.text.pythonic import PythonCall, python_calls
from firn.text.schema import Toolbox

CLOSERS = {
    "<|tool_call_start|>": "<|tool_call_end|>",
    "<function_calls>": "</function_calls>",
}


class Pythonic(CallParser):
    def script(self) -> Script[None]:
        try:
            body, _ = yield from self.tape.until(CLOSERS[self.marker])
        except TextEnded:
            body, self.tape.pos = self.tape.text[self.tape.pos :], len(self.tape.text)
        calls = python_calls(body)
        if not calls:
            raise NotACall
        self.emit(calls)

    def emit(self, calls: list[PythonCall]) -> None:
        for call in calls:
            self.checked(call.name)
        for call in calls:
            self.whole(call.name, call.arguments)


class BarePythonic(Pythonic):
    """A list of calls of known tools that is the whole reply."""

    def __init__(self, marker: str, toolbox: Toolbox, *, known_only: bool = True) -> None:
        super().__init__(marker, toolbox, known_only=True)

    def script(self) -> Script[None]:
        yield from self._could_be_a_call()
        while True:
            yield from self.tape.until("]")
            calls = python_calls(self.tape.text[: self.tape.pos])
            if calls:
                self.emit(calls)
                return

    def _could_be_a_call(self) -> Script[None]:
        """[name( with the name of a tool; anything else is text at once."""
        name, _ = yield from self.tape.until("(", limit=128)
        self.checked(name)


def _matches(clues: Clues) -> bool:
    in_template = any(opening in clues.template for opening in CLOSERS)
    return in_template or all(map(clues.has_token, ("<|tool_call_start|>", "<|tool_call_end|>")))


FORMATS = (
    ToolFormat(
        name="pythonic",
        parser=Pythonic,
        opens=tuple(CLOSERS),
        tokens=(*CLOSERS, *CLOSERS.values()),
        aliases=("lfm2", "olmo3"),
        example='<|tool_call_start|>[get_weather(city="Paris", days=3)]<|tool_call_end|>',
        matches=_matches,
    ),
    ToolFormat(
        name="pythonic_bare",
        parser=BarePythonic,
        opens=(),
        starts=("[",),
        aliases=("llama4_pythonic",),
        example='[get_weather(city="Paris", days=3)]',
        matches=lambda clues: "[func_name1(params_name1=" in clues.template,
    ),
)
