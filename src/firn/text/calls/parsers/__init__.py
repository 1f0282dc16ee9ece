"""Tool-call formats, one file for each family. Every file of this folder is loaded for its FORMATS."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

from firn.text.calls.call_parser import CallParser
from firn.text.calls.schema import ToolSchemas
from firn.text.grammar.call_grammar import CallGrammar
from firn.text.grammar.lark import Lark
from firn.text.reply.splitter import ReplySplitter

WriteCall = Callable[[str, Mapping[str, Any]], str]
"""(tool, arguments) -> a call as a model would write it."""


@dataclass(frozen=True, slots=True)
class Clues:
    """What a format is recognised by: the chat template's source and the vocabulary."""

    template: str
    has_token: Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A way in which models write calls.

    opens: the markers at which `parser` takes over. starts: single characters that are such markers at
    the beginning of a reply. tokens: control tokens of the markup, which the splitter must see as text.
    splitter: for a format that shapes the whole reply, not only its calls; `reply` then writes the
    grammar of a reply around calls, an answer, or either, and `closing` ends reasoning.
    grammar: writes the grammar of calls, to enforce them. write: writes a call as text.
    bare: where calls have no marker, a regular expression for replies that call one of these tools.
    example: a reply that calls get_weather with city "Paris" and days 3, and nothing else.
    rank: of several formats that match, the highest wins.
    """

    name: str
    parser: type[CallParser]
    opens: tuple[str, ...]
    example: str
    matches: Callable[[Clues], bool]
    tokens: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    starts: tuple[str, ...] = ()
    splitter: Callable[[ToolSchemas, str], ReplySplitter] | None = None
    grammar: Callable[[CallGrammar], str] | None = None
    reply: Callable[[Lark, str | None, str | None], str] | None = None
    closing: str = ""
    write: WriteCall | None = None
    bare: Callable[[Sequence[str]], str] | None = None
    rank: int = 0


@cache
def formats() -> Mapping[str, ToolFormat]:
    """Every format of this folder, by name."""
    by_name: dict[str, ToolFormat] = {}
    for module in sorted(m.name for m in pkgutil.iter_modules(__path__)):
        for form in importlib.import_module(f"{__name__}.{module}").FORMATS:
            by_name[form.name] = form
    return MappingProxyType(by_name)


@cache
def names() -> Mapping[str, str]:
    """Every name and alias a user may give, with the format's own name."""
    aliases = {alias: f.name for f in formats().values() for alias in f.aliases}
    return MappingProxyType(aliases | {name: name for name in formats()})
