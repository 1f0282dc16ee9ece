"""Grammars in the language of llguidance, for the server and for its trial process."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from llguidance import LLMatcher, LLParserLimits, regex_to_lark

T = TypeVar("T")

STACK_NBYTES = 256 * 2**20
"""The compiler recurses into what it compiles: 64 MiB hold 30,000 members. Unused pages are free."""
MAX_LEXER_STATES = 50_000
"""Of one compiled grammar, at 1 to 2 KiB each; replies add to them."""
LIMITS = LLParserLimits(verbose_errors=False, max_lexer_states=MAX_LEXER_STATES)
WHITESPACE = r" {1,2}|\n {0,64}|\n\t{0,16}"
"""Whitespace between JSON tokens. Bounded, or a confused model might write spaces forever."""
UNFORCED = '%llguidance {"no_forcing": true}\nstart: @main'
MAX_MESSAGE_CHARS = 400


class Source(NamedTuple):
    """A grammar or a part of one. name: what the others call it; kind: see `core.values.Grammar`."""

    name: str
    kind: str
    text: str


def assembled(sources: Sequence[Source], *, forces: bool = True) -> str:
    """The first source is the grammar; it may refer to the others by name.

    forces: text that must come next is tokenized as a whole, not as the model writes it.
    """
    grammars = [(source.name, in_llguidance(source)) for source in sources]
    if not forces:
        grammars = [("", {"lark_grammar": UNFORCED}), ("main", grammars[0][1]), *grammars[1:]]
    return _joined(grammars)


def fault_of(grammar: dict[str, Any]) -> str:
    """What is wrong with a grammar that stands alone; "": nothing."""
    return one_line(str(LLMatcher.validate_grammar(_joined([("", grammar)]), limits=LIMITS)))


def _joined(grammars: Iterable[tuple[str, dict[str, Any]]]) -> str:
    return json.dumps({"grammars": [{"name": n, **g} if n else g for n, g in grammars]})


def in_llguidance(source: Source) -> dict[str, Any]:
    match source.kind:
        case "json_object":
            return {"json_schema": _spaced({"type": "object"})}
        case "json_schema":
            return {"json_schema": _spaced(json.loads(source.text))}
        case "regex":
            return {"lark_grammar": f"start: /{regex_to_lark(source.text, use_ascii='')}/"}
        case "choice":
            words = [json.dumps(word, ensure_ascii=False) for word in json.loads(source.text)]
            return {"lark_grammar": "start: " + " | ".join(words)}
        case _:
            return {"lark_grammar": source.text}


def _spaced(schema: Any) -> Any:
    """The schema with firn's whitespace pattern, unless it has its own."""
    if not isinstance(schema, dict):
        return schema
    options = schema.get("x-guidance")
    own = options if isinstance(options, dict) else {}
    return {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE, **own}}


def one_line(text: str) -> str:
    """A message as one line; for a regular expression's, the line that says what is wrong."""
    for line in text.splitlines():
        if line.startswith("error: "):
            text = line.removeprefix("error: ")
    text = " ".join(text.replace("<non-verbose/>", "").split())
    return text if len(text) <= MAX_MESSAGE_CHARS else text[: MAX_MESSAGE_CHARS - 1] + "…"


def on_large_stack(work: Callable[[], T]) -> T:
    """The result of the work, done in a thread with a stack that is large enough for any grammar."""
    results: list[T] = []
    faults: list[Exception] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as e:  # the caller gets it
            faults.append(e)

    before = threading.stack_size(STACK_NBYTES)
    try:
        thread = threading.Thread(target=run, name="firn-grammar")
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    if faults:
        raise faults[0]
    return results[0]
