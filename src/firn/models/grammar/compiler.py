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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from llguidance import LLMatcher, LLTokenizer

from firn.core.errors import BadRequest, FirnError, GrammarFailed, InvalidValue, KeyLimit
from firn.core.values import Grammar, RelaxedSchema
from firn.models.grammar.mask_time import MaskTime, MaskTimes
from firn.models.grammar.relax_schema import ANYTHING
from firn.models.grammar.source import LIMITS, Source, assembled, on_large_stack, one_line
from firn.models.grammar.trial import VocabularyTable
from firn.models.grammar.trial_process import TrialFailed, TrialProcess, VocabularySpec
from firn.models.tokenizer.hf_tokenizer import HfTokenizer

log = logging.getLogger("firn.grammar")

MAX_KEPT_NBYTES = 256 * 2**20
"""Compiled grammars that are kept: an agent sends the same ones with each turn."""
MAX_RELAXED_NBYTES = 32 * 2**20
"""Schemas that are kept in their enforceable form."""
ENTRY_NBYTES = 64 * 1024
"""The least that a compiled grammar takes."""
TOKEN_NBYTES = 32 * 1024
"""The most by which its lexer grows with a token: the states of (a|b)*a(a|b){2000}. Most never grow, but
nothing tells; to compile one again takes milliseconds, after thousands of tokens."""
MAX_SCHEMA_CHARS = 2**18
"""Size of one tool's schema; a longer one is not enforced at all."""
MAX_TEXT_CHARS = 4 * 2**20
FORCED_SHARE = 64
"""Computing forced text takes time in proportion to its length. After n forced tokens, the next are
computed n / FORCED_SHARE tokens later at the earliest, which bounds the cost per token."""
TOO_SLOW = "it takes too much time for each token"
TOO_COSTLY = "it takes too much time or memory to compile; use a simpler one"
NOT_ENFORCED = RelaxedSchema(ANYTHING, ("#",))
_NO_WORD = re.compile(r"\W+")
T = TypeVar("T")
V = TypeVar("V", bound="_Sized")


class Constraint:
    """One choice's state in a grammar. Owner: its row's picker, on the engine thread."""

    def __init__(self, compiled: CompiledGrammar, matcher: LLMatcher) -> None:
        self.matcher = matcher
        self._compiled = compiled
        self.n_tokens = compiled.n_tokens
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
            self._compiled.n_taken += 1
            if self._is_over() or not self._consume(token):
                self.check()
                break
            self._n_rest = max(self._n_rest - 1, 0)
            if self._n_followed < len(self._forced) and token == self._forced[self._n_followed]:
                self._n_followed += 1
            else:
                self._forced, self._n_followed = (), 0
        if self.fault is None and self.matcher.is_stopped():
            self._compiled.has_ended = True

    def _consume(self, token: int) -> bool:
        return self._timed(lambda: bool(self.matcher.consume_token(token)))

    def forced(self, n_most: int) -> Sequence[int]:
        """Up to `n_most` tokens that must come next, as far as the grammar leaves no choice."""
        if self._is_over():
            return ()
        if self._n_followed == len(self._forced) and not self._n_rest:
            self._forced, self._n_followed = self._timed(self.matcher.compute_ff_tokens), 0
            self._n_rest = len(self._forced) // FORCED_SHARE
        return self._forced[self._n_followed : self._n_followed + n_most]

    def permitted(self, draft: Sequence[int]) -> int:
        """How many of a draft's first tokens the grammar allows."""
        if self._is_over():
            return 0
        return int(self._timed(lambda: self.matcher.validate_tokens(list(draft))))

    def fill(self, address: int, nbytes: int) -> None:
        """Write the mask for the next token to this address. Any thread, one at a time."""
        self.look_ahead((), [address], nbytes)

    def look_ahead(self, draft: Sequence[int], addresses: Sequence[int], nbytes: int) -> None:
        """Write the masks for the next token and after each drafted one to these addresses."""
        if self.fault is None and not self._is_refused():
            self._timed(lambda: self._look_ahead(draft, addresses, nbytes))

    def _look_ahead(self, draft: Sequence[int], addresses: Sequence[int], nbytes: int) -> None:
        n_consumed = 0
        for i, address in enumerate(addresses):
            self.matcher.unsafe_compute_mask_ptr(address, nbytes)
            if i < len(draft) and self.matcher.consume_token(draft[i]):
                n_consumed += 1
        self.check()
        if n_consumed:
            self.matcher.rollback(n_consumed)
            self.check()

    def _is_over(self) -> bool:
        """Whether there is nothing to compute any more."""
        return self.fault is not None or self.matcher.is_stopped() or self._is_refused()

    def _is_refused(self) -> bool:
        """Set the fault if the owner's grammars have taken too much time, and this may take more."""
        compiled = self._compiled
        if compiled.mask_time.is_spent and not compiled.is_trusted:
            self.fault = GrammarFailed(compiled.param, TOO_SLOW)
            return True
        return False

    def _timed(self, work: Callable[[], T]) -> T:
        """The result of the work: all streams wait for it, so its owner is charged if it is slow."""
        began = time.thread_time()
        result = work()
        if self._compiled.mask_time.spend(time.thread_time() - began):
            self._compiled.is_slow = True
        return result

    def check(self) -> None:
        """Set the fault if the matcher has failed: it does not raise by itself."""
        if self.fault is None and self.matcher.is_error():
            self._compiled.is_spoiled = True
            why = one_line(self.matcher.get_error())
            self.fault = GrammarFailed(self._compiled.param, why)


class CompiledGrammar:
    """A job's grammar. Shared and never advanced; any thread may start a constraint from it."""

    def __init__(
        self, matcher: LLMatcher, *, n_tokens: int, param: str, nbytes: int, mask_time: MaskTime
    ) -> None:
        self._matcher = matcher
        self.mask_time = mask_time
        """Its owner's."""
        self._compiled_nbytes = nbytes
        self.n_taken = 0
        """Tokens of all replies so far: the shared lexer grows with them, by an unknown amount."""
        self.n_tokens = n_tokens
        self.param = param
        self.is_spoiled = False
        """Set by the first constraint that fails. They all share a lexer, which stays failed."""
        self.is_slow = False
        """Whether a token has taken so long that its owner was charged."""
        self.has_ended = False
        """Whether a reply has reached the grammar's end."""

    @property
    def is_trusted(self) -> bool:
        """Whether its masks are known to be fast: what begins fast may become slow later."""
        return self.has_ended and not self.is_slow

    @property
    def nbytes(self) -> int:
        """At most."""
        return self._compiled_nbytes + self.n_taken * TOKEN_NBYTES

    def start(self) -> Constraint:
        return Constraint(self, self._matcher.deep_copy())


class _Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


class _Kept(Generic[V]):
    """Values by owner and source, of a total size, which may grow. Thread-safe.

    Room is made by the owner who fills the most, with what was used least recently.
    """

    def __init__(self, *, max_nbytes: int) -> None:
        self._lock = threading.Lock()
        self._max_nbytes = max_nbytes
        self._of: dict[str, OrderedDict[Grammar | str, V]] = {}

    def get(self, owner: str, source: Grammar | str) -> V | None:
        with self._lock:
            entries = self._of.get(owner)
            if entries is None or source not in entries:
                return None
            entries.move_to_end(source)
            return entries[source]

    def put(self, owner: str, source: Grammar | str, value: V) -> None:
        with self._lock:
            entries = self._of.setdefault(owner, OrderedDict())
            entries[source] = value
            entries.move_to_end(source)
            sizes = {o: sum(v.nbytes for v in e.values()) for o, e in self._of.items()}
            while sum(sizes.values()) > self._max_nbytes:
                fullest = max(sizes, key=sizes.__getitem__)
                _, dropped = self._of[fullest].popitem(last=False)
                sizes[fullest] -= dropped.nbytes
                if not self._of[fullest]:
                    del self._of[fullest], sizes[fullest]


class Compiler:
    """Owner: the composition root. Thread-safe.

    Whatever a client sends is tried in another process first: it may end the one that compiles it.
    """

    def __init__(
        self, tokenizer: HfTokenizer, *, vocab_size: int, mask_times: MaskTimes | None = None
    ) -> None:
        self._hf = tokenizer
        self._vocab_size = vocab_size
        self._compiled = _Kept[CompiledGrammar](max_nbytes=MAX_KEPT_NBYTES)
        self._relaxed = _Kept[_Relaxed](max_nbytes=MAX_RELAXED_NBYTES)
        self._mask_times = mask_times or MaskTimes()
        self._building = threading.Lock()
        self._parts: _Parts | None = None

    def prepare(self) -> None:
        """Read the vocabulary now, not when it is first needed: a large one takes a second."""
        self._built().trial.start()

    def compile(self, grammar: Grammar, owner: str = "") -> CompiledGrammar:
        """Raises BadRequest, naming the parameter and the place in it; KeyLimit while the owner's
        grammars have taken too much time, for one that is not known to be fast.

        Grammars are kept per owner, so that timing does not reveal what others have sent.
        """
        compiled = self._compiled.get(owner, grammar)
        mask_time = self._mask_times.of(owner)
        if mask_time.is_spent and not (compiled and compiled.is_trusted):
            raise KeyLimit(
                "Grammars of this key have taken too much time for each token; use simpler ones.",
                retry_after_s=mask_time.recovers_in_s,
            )
        if compiled is None or compiled.is_spoiled:
            compiled = self._made(grammar, mask_time)
            self._compiled.put(owner, grammar, compiled)
        return compiled

    def relaxer(self, owner: str) -> Callable[[Sequence[Mapping[str, Any]]], list[RelaxedSchema]]:
        """`relax` for one owner."""
        return lambda schemas: self.relax(schemas, owner)

    def relax(self, schemas: Sequence[Mapping[str, Any]], owner: str = "") -> list[RelaxedSchema]:
        """The schemas of one request as far as they can be enforced, and what was left out of them."""
        texts = [json.dumps(schema) for schema in schemas]
        kept = {text: self._relaxed.get(owner, text) for text in texts}
        known = {text: relaxed.schema for text, relaxed in kept.items() if relaxed is not None}
        for text, relaxed in self._newly_relaxed([t for t in kept if t not in known]):
            known[text] = relaxed
            self._relaxed.put(owner, text, _Relaxed(relaxed, 3 * len(text) + 4096))
        return [known.get(text, NOT_ENFORCED) for text in texts]

    def _newly_relaxed(self, texts: Sequence[str]) -> list[tuple[str, RelaxedSchema]]:
        """Without those that are too large, or too costly."""
        texts = [text for text in texts if len(text) <= MAX_SCHEMA_CHARS]
        if not texts:
            return []
        try:
            reply = self._built().trial.ask({"schemas": list(map(json.loads, texts))})
        except TrialFailed:
            return []
        return [
            (text, RelaxedSchema(schema, tuple(left_out), tuple(faulty)))
            for text, (schema, left_out, faulty) in zip(texts, reply["relaxed"], strict=True)
        ]

    def _made(self, grammar: Grammar, mask_time: MaskTime) -> CompiledGrammar:
        if _n_chars(grammar) > MAX_TEXT_CHARS:
            raise InvalidValue(grammar.param, "the grammar is too large")
        parts = self._built()
        every = [grammar, *(part for _, part in grammar.parts)]
        names = ["", *(name for name, _ in grammar.parts)]
        sources = [Source(n, g.kind, g.text) for n, g in zip(names, every, strict=True)]
        # llguidance tokenizes the text that a grammar forces: text that spells a control token would
        # become that token, which it then refuses.
        forces = not any(map(parts.spells_control, every))
        try:
            reply = parts.trial.ask({"sources": sources, "forces": forces})
        except TrialFailed:
            raise InvalidValue(grammar.param, TOO_COSTLY) from None
        if "refused" in reply:
            raise InvalidValue(every[reply["refused"]].param, reply["message"])
        text = assembled(sources, forces=forces)
        matcher = on_large_stack(
            lambda: LLMatcher(parts.tokenizer, text, log_level=0, limits=LIMITS)
        )
        if matcher.is_error():
            raise InvalidValue(grammar.param, one_line(matcher.get_error()))
        return CompiledGrammar(
            matcher,
            n_tokens=parts.tokenizer.vocab_size,
            param=grammar.param,
            nbytes=reply["nbytes"] + len(text) + ENTRY_NBYTES,
            mask_time=mask_time,
        )

    # --- the vocabulary --------------------------------------------------------------------

    def _built(self) -> _Parts:
        with self._building:
            if self._parts is None:
                vocabulary, tokenizer = self._read_vocabulary()
                control = filter(tokenizer.is_special_token, sorted(self._hf.added))
                names = (self._hf.token_bytes(t).decode("utf-8", "replace") for t in control)
                self._parts = _Parts(
                    tokenizer, TrialProcess(vocabulary), tuple(n for n in names if n)
                )
            return self._parts

    def _read_vocabulary(self) -> tuple[VocabularySpec, LLTokenizer]:
        hf = self._hf
        # generation_config.json may name tokens that the vocabulary does not have.
        eos = sorted(t for t in hf.eos if 0 <= t < hf.n_ids)
        if not eos:
            raise BadRequest("This model has no end token, so its replies cannot be constrained.")
        # Masks must cover all logits; those beyond the tokenizer's vocabulary are never allowed.
        n_vocab = max(self._vocab_size, hf.n_ids)
        if hf.definition is not None:
            try:
                definition = _unpadded(hf.definition)
                tokenizer = LLTokenizer(definition, n_vocab=n_vocab, eos_token=eos)
                if self._agrees(tokenizer):
                    return VocabularySpec(n_vocab, eos, definition=definition), tokenizer
            except ValueError as e:
                log.info("grammars read the tokenizer token by token: %s", e)
        tokens = [hf.token_bytes(i) for i in range(hf.n_ids)]
        special = sorted({*hf.added, *hf.special, *eos})
        table: Any = VocabularyTable(
            tokens,
            special=special,
            eos=eos[0],
            encode=lambda text: hf.encode(text, add_special=False),
        )
        tokenizer = LLTokenizer(table, n_vocab=n_vocab, eos_token=eos)
        return VocabularySpec(n_vocab, eos, tokens=tokens, special=special), tokenizer

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


@dataclass(frozen=True, slots=True)
class _Relaxed:
    schema: RelaxedSchema
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Parts:
    """What depends on the vocabulary. control: the texts of its control tokens."""

    tokenizer: LLTokenizer
    trial: TrialProcess
    control: tuple[str, ...]

    def spells_control(self, grammar: Grammar) -> bool:
        text = grammar.text
        if grammar.kind in ("json_schema", "choice"):  # unescaped
            text = json.dumps(json.loads(text), ensure_ascii=False)
        if any(name in text for name in self.control):
            return True
        if grammar.kind not in ("regex", "lark"):
            return False
        # Expressions can write anything but letters and digits in many ways: compare only those.
        words = _NO_WORD.sub("", text)
        cores = {_NO_WORD.sub("", name) for name in self.control}
        return any(len(core) > 2 and core in words for core in cores)


def _unpadded(definition: str) -> str:
    """The definition without the padding and truncation that transformers may have set in it."""
    parsed = json.loads(definition)
    return json.dumps({**parsed, "padding": None, "truncation": None})


def _n_chars(grammar: Grammar) -> int:
    return len(grammar.text) + sum(len(part.text) for _, part in grammar.parts)
