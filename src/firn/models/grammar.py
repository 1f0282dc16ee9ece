"""Grammars to constraints: llguidance over the model's vocabulary. Only `masks` also imports it.

A `Compiler` lives as long as the model and is used from the tokenize pool. A `CompiledGrammar` is shared
and never advanced; each choice starts a `Constraint` from it, which the engine thread owns.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark

from firn.core.errors import BadRequest, FirnError, InvalidValue, StepFailed
from firn.core.values import Grammar, SoftenedSchema
from firn.models.schema_depth import TOO_DEEP, is_too_deep
from firn.models.schema_faults import is_endless, locate
from firn.models.soften import ANYTHING, OutOfTime, soften
from firn.models.tokenizer import HfTokenizer

log = logging.getLogger("firn.grammar")

MAX_KEPT = 64
"""Compiled grammars kept: an agent sends the same ones with each turn."""
MAX_KEPT_CHARS = 8 * 2**20
"""Total size of their texts; the compiled forms are several times larger."""
MAX_SOFTENED = 1024
"""Tool schemas kept in their enforceable form."""
MAX_SOFTENED_CHARS = 8 * 2**20
"""Total size of their texts."""
MAX_SCHEMA_CHARS = 2**18
"""Size of one tool's schema; a longer one is not enforced at all."""
SOFTEN_S = 2.0
"""Time to find out what can be enforced for all tools of one request."""
LOCATE_S = 1.0
"""Time to find which part of a refused schema is at fault; the error names the part found by then."""
MAX_TEXT_CHARS = 4 * 2**20
MAX_MESSAGE_CHARS = 400
FORCED_SHARE = 64
"""Computing forced text takes time in proportion to its length. After n forced tokens, the next are
computed n / FORCED_SHARE tokens later at the earliest, which bounds the cost per token."""
WHITESPACE = r" {1,2}|\n {0,64}|\n\t{0,16}"
"""Whitespace between JSON tokens. Bounded, or a confused model might write spaces forever."""
UNFORCED = '%llguidance {"no_forcing": true}\nstart: @main'
LIMITS = LLParserLimits(verbose_errors=False)
_NO_WORD = re.compile(r"\W+")
_NOT_ENFORCED = SoftenedSchema(ANYTHING, ("#",))
_Key = tuple[str, Grammar | str]
"""Owner, and what was compiled: a grammar, or the text of a schema."""
V = TypeVar("V")


class Constraint:
    """One choice's state in a grammar. Owner: its row's picker, on the engine thread."""

    def __init__(self, matcher: LLMatcher, n_tokens: int) -> None:
        self.matcher = matcher
        self.n_tokens = n_tokens
        """How many tokens its masks cover: at least the model's vocabulary."""
        self.fault: FirnError | None = None
        """Set once and never cleared: this choice can no longer be held to its grammar."""
        self._forced: Sequence[int] = ()
        self._n_followed = 0
        """How many of the forced tokens were taken since they were computed."""
        self._n_rest = 0
        """Tokens to take before they may be computed again."""

    def take(self, tokens: Sequence[int]) -> None:
        """Advance by the tokens that were picked. Tokens after the grammar's end are ignored."""
        for token in tokens:
            if self.matcher.is_stopped() or not self.matcher.consume_token(token):
                self.check()
                break
            self._n_rest = max(self._n_rest - 1, 0)
            if self._n_followed < len(self._forced) and token == self._forced[self._n_followed]:
                self._n_followed += 1
            else:
                self._forced, self._n_followed = (), 0

    def forced(self, n_most: int) -> Sequence[int]:
        """Up to `n_most` tokens that must come next, as far as the grammar leaves no choice."""
        if self.fault is not None or self.matcher.is_stopped():
            return ()
        if self._n_followed == len(self._forced) and not self._n_rest:
            self._forced, self._n_followed = self.matcher.compute_ff_tokens(), 0
            self._n_rest = len(self._forced) // FORCED_SHARE
        return self._forced[self._n_followed : self._n_followed + n_most]

    def permitted(self, draft: Sequence[int]) -> int:
        """How many of a draft's first tokens the grammar allows."""
        if self.fault is not None or self.matcher.is_stopped():
            return 0
        return int(self.matcher.validate_tokens(list(draft)))

    def look_ahead(self, draft: Sequence[int], addresses: Sequence[int], nbytes: int) -> None:
        """Write the masks for the next token and after each drafted one to these addresses."""
        n_consumed = 0
        for i, address in enumerate(addresses):
            self.matcher.unsafe_compute_mask_ptr(address, nbytes)
            if i < len(draft) and self.matcher.consume_token(draft[i]):
                n_consumed += 1
        self.check()
        if n_consumed:
            self.matcher.rollback(n_consumed)
            self.check()

    def check(self) -> None:
        """Set the fault if the matcher has failed: it does not raise by itself."""
        if self.fault is None and self.matcher.is_error():
            why = _one_line(self.matcher.get_error())
            self.fault = StepFailed(f"The reply could not be constrained to its grammar: {why}")


class CompiledGrammar:
    """A job's grammar. Shared and never advanced; any thread may start a constraint from it."""

    def __init__(self, matcher: LLMatcher, n_tokens: int) -> None:
        self._matcher = matcher
        self._n_tokens = n_tokens

    def start(self) -> Constraint:
        return Constraint(self._matcher.deep_copy(), self._n_tokens)


class _RecentlyUsed(Generic[V]):
    """Values by owner and source, the least recently used dropped first. Thread-safe."""

    def __init__(self, *, max_entries: int, max_chars: int) -> None:
        self._lock = threading.Lock()
        self._entries: OrderedDict[_Key, tuple[V, int]] = OrderedDict()
        self._max_entries, self._max_chars = max_entries, max_chars
        self._n_chars = 0

    def get(self, key: _Key) -> V | None:
        with self._lock:
            if key not in self._entries:
                return None
            self._entries.move_to_end(key)
            return self._entries[key][0]

    def put(self, key: _Key, value: V, *, n_chars: int) -> None:
        with self._lock:
            _, n_before = self._entries.get(key, (None, 0))
            self._n_chars += n_chars - n_before
            self._entries[key] = (value, n_chars)
            while len(self._entries) > self._max_entries or self._n_chars > self._max_chars:
                _, (_, n_dropped) = self._entries.popitem(last=False)
                self._n_chars -= n_dropped


class Compiler:
    """Owner: the composition root. Thread-safe."""

    def __init__(self, tokenizer: HfTokenizer, *, vocab_size: int) -> None:
        self._hf = tokenizer
        self._vocab_size = vocab_size
        self._compiled = _RecentlyUsed[CompiledGrammar](
            max_entries=MAX_KEPT, max_chars=MAX_KEPT_CHARS
        )
        self._softened = _RecentlyUsed[SoftenedSchema](
            max_entries=MAX_SOFTENED, max_chars=MAX_SOFTENED_CHARS
        )
        self._building = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._control: tuple[str, ...] = ()
        self._control_words: set[str] = set()

    def prepare(self) -> None:
        """Read the vocabulary now, not when it is first needed: a large one takes a second."""
        self._vocabulary()

    def compile(self, grammar: Grammar, owner: str = "") -> CompiledGrammar:
        """Raises BadRequest, naming the parameter and the place in it.

        Grammars are kept per owner, so that timing does not reveal what others have sent.
        """
        key = (owner, grammar)
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = CompiledGrammar(self._matcher(grammar), self._vocabulary().vocab_size)
            self._compiled.put(key, compiled, n_chars=_n_chars(grammar))
        return compiled

    def softener(self, owner: str) -> Callable[[Mapping[str, Any]], SoftenedSchema]:
        """`soften` for the tools of one request, which share one time limit."""
        left_s = SOFTEN_S

        def soften_next(schema: Mapping[str, Any]) -> SoftenedSchema:
            nonlocal left_s
            began = time.thread_time()
            softened = self.soften(schema, owner, time_s=left_s)
            left_s -= time.thread_time() - began
            return softened

        return soften_next

    def soften(
        self, schema: Mapping[str, Any], owner: str = "", *, time_s: float = SOFTEN_S
    ) -> SoftenedSchema:
        """The schema as far as it can be enforced, and what was left out of it.

        time_s: this thread's CPU time. A schema that takes longer is not enforced, and not kept.
        """
        text = json.dumps(schema)
        if len(text) > MAX_SCHEMA_CHARS:
            return _NOT_ENFORCED
        key = (owner, text)
        softened = self._softened.get(key)
        if softened is not None:
            return softened
        if is_too_deep(schema):
            return _NOT_ENFORCED
        try:
            softened = soften(schema, self._schema_fault, time_s=time_s)
        except OutOfTime:
            return _NOT_ENFORCED
        self._softened.put(key, softened, n_chars=len(text))
        return softened

    def _matcher(self, grammar: Grammar) -> LLMatcher:
        every = [("", grammar), *grammar.parts]
        if _n_chars(grammar) > MAX_TEXT_CHARS:
            raise InvalidValue(grammar.param, "the grammar is too large")
        for _, part in every:
            if part.kind == "json_schema" and is_too_deep(json.loads(part.text)):
                raise InvalidValue(part.param, f"the schema is not supported: {TOO_DEEP}")
        vocabulary = self._vocabulary()
        sources = [(name, _source(g)) for name, g in every]
        # llguidance tokenizes the text that a grammar forces: text that spells a control token would
        # become that token, which it then refuses.
        if any(self._spells_control(g) for _, g in every):
            sources = [("", {"lark_grammar": UNFORCED}), ("main", sources[0][1]), *sources[1:]]
        matcher = LLMatcher(vocabulary, _assemble(sources), log_level=0, limits=LIMITS)
        if matcher.is_error():
            for _, part in grammar.parts:
                self._refuse_alone(part)
            self._refuse(grammar, matcher.get_error())
        self._refuse_dead_ends(grammar, matcher)
        return matcher

    def _spells_control(self, grammar: Grammar) -> bool:
        text = grammar.text
        if grammar.kind in ("json_schema", "choice"):  # unescaped
            text = json.dumps(json.loads(text), ensure_ascii=False)
        if any(name in text for name in self._control):
            return True
        if grammar.kind not in ("regex", "lark"):
            return False
        # Expressions can write anything but letters and digits in many ways: compare only those.
        words = _NO_WORD.sub("", text)
        return any(len(core) > 2 and core in words for core in self._control_words)

    def _refuse_alone(self, part: Grammar) -> None:
        """Raise if this part has a fault by itself."""
        fault = self._fault(_source(part))
        if fault:
            self._refuse(part, fault)

    def _refuse(self, grammar: Grammar, fault: str) -> None:
        at = ""
        if grammar.kind == "json_schema":
            pointer, fault = self._located(json.loads(grammar.text), fault)
            at = f" at #{pointer}"
        names = {"json_schema": "schema", "json_object": "schema", "lark": "grammar"}
        name = names.get(grammar.kind, grammar.kind)
        raise InvalidValue(grammar.param, f"the {name} is not supported{at}: {_one_line(fault)}")

    def _located(self, schema: Any, fault: str) -> tuple[str, str]:
        until = time.thread_time() + LOCATE_S

        def fault_of(part: Any) -> str:
            return self._schema_fault(part) if time.thread_time() < until else ""

        return locate(schema, fault, fault_of)

    def _refuse_dead_ends(self, grammar: Grammar, matcher: LLMatcher) -> None:
        """Raise for a well-formed grammar that no text satisfies."""
        for part in (grammar, *(g for _, g in grammar.parts)):
            if part.kind == "json_schema" and is_endless(json.loads(part.text)):
                raise InvalidValue(part.param, "every value of this schema would contain itself")
        first = matcher.deep_copy()
        allowed = np.frombuffer(first.compute_bitmask(), dtype=np.uint8)
        if first.is_error():
            self._refuse(grammar, first.get_error())
        if not allowed.any() or (first.is_stopped() and not first.is_accepting()):
            raise InvalidValue(grammar.param, "no text can satisfy this grammar")

    def _schema_fault(self, schema: Any) -> str:
        if is_too_deep(schema):
            return TOO_DEEP
        return self._fault({"json_schema": schema})

    def _fault(self, source: dict[str, Any]) -> str:
        return str(LLMatcher.validate_grammar(_assemble([("", source)]), limits=LIMITS))

    # --- the vocabulary --------------------------------------------------------------------

    def _vocabulary(self) -> LLTokenizer:
        with self._building:
            if self._tokenizer is None:
                tokenizer = self._read_vocabulary()
                control = filter(tokenizer.is_special_token, sorted(self._hf.added))
                names = (self._hf.token_bytes(t).decode("utf-8", "replace") for t in control)
                self._control = tuple(n for n in names if n)
                self._control_words = {_NO_WORD.sub("", name) for name in self._control}
                self._tokenizer = tokenizer
            return self._tokenizer

    def _read_vocabulary(self) -> LLTokenizer:
        eos = sorted(self._hf.eos)
        if not eos:
            raise BadRequest("This model has no end token, so its replies cannot be constrained.")
        # Masks must cover all logits; those beyond the tokenizer's vocabulary are never allowed.
        n_vocab = max(self._vocab_size, self._hf.n_ids)
        definition = self._hf.definition
        if definition is not None:
            try:
                tokenizer = LLTokenizer(_unpadded(definition), n_vocab=n_vocab, eos_token=eos)
                if self._agrees(tokenizer):
                    return tokenizer
            except ValueError as e:
                log.info("grammars read the tokenizer token by token: %s", e)
        return LLTokenizer(_TokenTable(self._hf), n_vocab=n_vocab, eos_token=eos)  # type: ignore[arg-type]

    def _agrees(self, tokenizer: LLTokenizer) -> bool:
        """Whether it gives tokens the same bytes as they have in a reply's text."""
        for token in range(self._hf.n_ids):
            theirs = tokenizer.decode_bytes([token])
            if theirs and not tokenizer.is_special_token(token):
                ours = self._hf.token_bytes(token)
                if theirs != ours:
                    log.info("llguidance reads token %d as %r, not %r", token, theirs, ours)
                    return False
        return True


class _TokenTable:
    """A tokenizer as a list of byte strings, for definitions that llguidance misreads."""

    is_tokenizer_wrapper = True

    def __init__(self, hf: HfTokenizer) -> None:
        self._hf = hf
        self.eos_token_id = min(hf.eos)
        self.bos_token_id = None
        self.tokens = [hf.token_bytes(i) for i in range(hf.n_ids)]
        self.special_token_ids = sorted(hf.added | hf.special | hf.eos)

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        return self._hf.encode(text, add_special=False)


def _unpadded(definition: str) -> str:
    """The definition without the padding and truncation that transformers may have set in it."""
    parsed = json.loads(definition)
    return json.dumps({**parsed, "padding": None, "truncation": None})


def _n_chars(grammar: Grammar) -> int:
    return len(grammar.text) + sum(len(part.text) for _, part in grammar.parts)


# --- llguidance's languages ----------------------------------------------------------------


def _assemble(sources: Iterable[tuple[str, dict[str, Any]]]) -> str:
    """The first source is the grammar; it may refer to the others by name."""
    grammars = [{"name": name, **source} if name else source for name, source in sources]
    return json.dumps({"grammars": grammars})


def _source(grammar: Grammar) -> dict[str, Any]:
    match grammar.kind:
        case "json_object":
            return {"json_schema": _spaced({"type": "object"})}
        case "json_schema":
            return {"json_schema": _spaced(json.loads(grammar.text))}
        case "regex":
            return {"lark_grammar": f"start: /{regex_to_lark(grammar.text, use_ascii='')}/"}
        case "choice":
            words = [json.dumps(word, ensure_ascii=False) for word in json.loads(grammar.text)]
            return {"lark_grammar": "start: " + " | ".join(words)}
        case "lark":
            return {"lark_grammar": grammar.text}


def _spaced(schema: Any) -> Any:
    """The schema with firn's whitespace pattern, unless it has its own."""
    if not isinstance(schema, dict):
        return schema
    options = schema.get("x-guidance")
    own = options if isinstance(options, dict) else {}
    return {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE, **own}}


def _one_line(text: str) -> str:
    """A message as one line; for a regular expression's, the line that says what is wrong."""
    for line in text.splitlines():
        if line.startswith("error: "):
            text = line.removeprefix("error: ")
    text = " ".join(text.split())
    return text if len(text) <= MAX_MESSAGE_CHARS else text[: MAX_MESSAGE_CHARS - 1] + "…"
