"""What the engine is given, and what is known about it in the end. All frozen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NewType

from firn.core.values.prompt import Prompt
from firn.core.values.request import CacheControl, Sampling

RequestId = NewType("RequestId", str)
Namespace = NewType("Namespace", str)
"""Who owns a record: derived by the server from the API key, never taken from a request."""


@dataclass(frozen=True, slots=True)
class Job:
    """One request as the engine sees it: tokens in, tokens out. max_tokens 0: only read the prompt."""

    id: RequestId
    prompt: Prompt
    max_tokens: int
    sampling: Sampling = Sampling()
    n: int = 1
    eos: frozenset[int] = frozenset()
    top_logprobs: int | None = None
    prompt_logprobs: bool = False
    """Whether to return logprobs of the prompt too. All of it is then computed, nothing reused."""
    namespace: Namespace = Namespace("")
    cache: CacheControl = CacheControl()
    grammar: Any = None
    """A compiled constraint (see `models.grammar`); opaque to the engine."""
    speculates: bool = True
    """Whether tokens may be drafted ahead of the model, which then verifies them."""
    prediction: tuple[int, ...] = ()
    """What the caller expects the reply to contain: a source of drafts."""
    preparation: Any = None
    """What the engine's preparer may do with the prompt, before it is read; opaque to the engine.
    None: nothing."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request. `n_cached` is a part of `n_prompt`."""

    n_prompt: int
    n_completion: int
    n_cached: int = 0
    n_reasoning: int = 0
    n_drafted: int = 0
    """Tokens that were drafted; `n_accepted` of them were accepted, as a part of `n_completion`."""
    n_accepted: int = 0
    n_skipped: int = 0
    """Tokens of the prompt that were not read: the reply is approximate."""

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.n_prompt + other.n_prompt,
            self.n_completion + other.n_completion,
            self.n_cached + other.n_cached,
            self.n_reasoning + other.n_reasoning,
            self.n_drafted + other.n_drafted,
            self.n_accepted + other.n_accepted,
            self.n_skipped + other.n_skipped,
        )


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """A request that has ended, for a trace.

    at_s: its arrival, as a Unix time. reply: the tokens of its first choice; n_reply: the number of
    tokens in all choices. tiers: reused tokens by the tier they came from. first_s: seconds until
    its first token; None: it had none.
    """

    at_s: float
    prompt: Prompt
    reply: Sequence[int]
    n_reply: int
    tiers: tuple[tuple[str, int], ...]
    first_s: float | None
    namespace: Namespace
