"""Llama 3's <|python_tag|>: a JSON call, name.call(key="value"), or code; and calls without the tag."""

from __future__ import annotations

from firn.text.calls.call_parser import NotACall, Script
from firn.text.calls.json_calls import JsonTape
from firn.text.calls.parsers import Clues, ToolFormat
from firn.text.calls.parsers.bare_json import BareJson, bare_call, bare_calls, write_bare
from firn.text.calls.python_calls import python_calls
from firn.text.grammar.call_grammar import CallGrammar

TAG = "<|python_tag|>"
ENDS = ("<|eom_id|>", "<|eot_id|>")
CODE_TOOLS = ("python", "ipython", "code_interpreter")


class PythonTag(BareJson):
    def script(self) -> Script[None]:
        if self.marker != TAG:
            yield from super().script()
            return
        char = yield from JsonTape(self.tape).next_char()
        if char in ("{", "["):
            yield from self.guarded(self.run_of_calls(), *ENDS)
        else:
            yield from self._code()

    def _code(self) -> Script[None]:
        """The rest of the reply: there is no closing tag."""
        while not self.tape.ended:
            yield
        text = self.tape.text[self.tape.pos :]
        self.tape.pos = len(self.tape.text)
        for end in ENDS:
            text = text.removesuffix(end)
        # A model may repeat the tag: parsing from each one would take quadratic time.
        calls = [] if TAG in text else python_calls(text)
        names = [c.name.removesuffix(".call") for c in calls]
        if calls and all(name in self.schemas for name in names):
            for name, call in zip(names, calls, strict=True):
                self.whole(name, call.arguments)
            return
        for tool in CODE_TOOLS:
            if tool in self.schemas:
                self.whole(tool, {"code": text})
                return
        raise NotACall


def _matches(clues: Clues) -> bool:
    return TAG in clues.template or (
        clues.has_token(TAG) and "tool_calls" in clues.template and "ipython" in clues.template
    )


def _grammar(g: CallGrammar) -> str:
    """With the tag or without: the same model writes both."""
    calls = bare_calls(g)
    if g.before is None:
        return f"({g.lark.mark(TAG)})? {calls}"
    return f"({g.opening(TAG)} {calls} | {calls})"


FORMATS = (
    ToolFormat(
        name="python_tag",
        parser=PythonTag,
        opens=(TAG,),
        starts=("{", "["),
        tokens=(TAG,),
        aliases=("llama", "llama3", "llama3.1"),
        example='<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}',
        matches=_matches,
        grammar=_grammar,
        bare=bare_call,
        write=lambda name, arguments: TAG + write_bare(name, arguments),
    ),
)
