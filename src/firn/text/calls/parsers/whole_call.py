"""Calls of a format that only the tokenizer's own parser knows: read whole, then handed to it."""

from __future__ import annotations

from collections.abc import Mapping

from firn.text.calls.call_parser import CallParser, NativeParser, NotACall, Script, TextEnded
from firn.text.calls.parsers import ToolFormat
from firn.text.calls.schema import ToolSchemas
from firn.text.prompt.messages import tools_to_template


class WholeCall(CallParser):
    def __init__(
        self, marker: str, schemas: ToolSchemas, *, native: NativeParser, known_only: bool = False
    ) -> None:
        self._native = native
        super().__init__(marker, schemas, known_only=known_only)

    def script(self) -> Script[None]:
        body = yield from self._body()
        parsed = self._parse(body)
        for call in parsed if isinstance(parsed, list) else [parsed]:
            self._emit(call)

    def _body(self) -> Script[str]:
        if self._native.closes:
            try:
                body, _ = yield from self.tape.until(self._native.closes)
            except TextEnded:  # a whole call may lack its closing marker
                if self.marker in self.tape.text[self.tape.pos :]:  # but not if its opener recurs
                    raise NotACall from None
            else:
                return body
        while not self.tape.ended:
            yield
        start, self.tape.pos = self.tape.pos, len(self.tape.text)
        return self.tape.text[start:]

    def _parse(self, body: str) -> object:
        try:
            return self._native.parse(body, tools_to_template(self.schemas.tools))
        except Exception as e:
            # Foreign code: by the port's contract any exception means "not a call".
            raise NotACall from e

    def _emit(self, call: object) -> None:
        if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
            raise NotACall
        arguments = call.get("arguments") or {}
        call_id = call.get("id")
        if not isinstance(arguments, Mapping):
            raise NotACall
        self.whole(call["name"], arguments, call_id if isinstance(call_id, str) else None)


FORMATS = (
    ToolFormat(
        name="whole_call",
        parser=WholeCall,
        opens=(),
        aliases=("native", "mlx_lm", "kimi_k3"),
        example='<call>{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}</call>',
        matches=lambda clues: False,
        rank=-15,
    ),
)
