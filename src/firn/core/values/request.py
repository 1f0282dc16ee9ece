"""What a client asks for: a prompt in some form, and how to generate its replies. All frozen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from firn.core.values.messages import Chat, Grammar


@dataclass(frozen=True, slots=True)
class RawText:
    """add_special: prepend the tokens that begin a text of this model. parse_special: text that
    spells a control token becomes that token."""

    text: str
    add_special: bool = True
    parse_special: bool = True


@dataclass(frozen=True, slots=True)
class RawTokens:
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FillInMiddle:
    """Write what belongs between two texts. The server adds the control tokens; any that the texts
    spell are plain text, unless `parse_special` is set."""

    prefix: str
    suffix: str
    add_special: bool = True
    parse_special: bool = False


Source = Chat | RawText | RawTokens | FillInMiddle


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one row picks its tokens. temperature 0 is greedy; top_k 0 and top_p 1 are off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class CacheControl:
    """How a request uses the prefix cache. ttl_s None: keep records as long as there is room."""

    read: bool = True
    write: bool = True
    ttl_s: float | None = None


EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""How hard a model may be told to think, in order."""


@dataclass(frozen=True, slots=True)
class Reasoning:
    """enabled None: the model's template decides. budget_tokens None: unbounded."""

    enabled: bool | None = None
    effort: str | None = None
    budget_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Defaults:
    """What applies unless a request says otherwise: the model's defaults, overridden by the
    server's flags. stores: whether what is computed is stored."""

    sampling: Sampling = Sampling()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    thinking_budget: int | None = None
    stores: bool = True

    def reasoning(self, given: Reasoning) -> Reasoning:
        if given.budget_tokens is not None or self.thinking_budget is None:
            return given
        return replace(given, budget_tokens=self.thinking_budget)

    def kwargs(self, given: Mapping[str, Any], reasoning: Reasoning) -> Mapping[str, Any]:
        """A request's template variables, and the defaults of all others except those that
        `reasoning` sets."""
        said: set[str] = set()
        if reasoning.enabled is not None:
            said |= {"enable_thinking", "thinking"}
        if reasoning.effort is not None:
            said.add("reasoning_effort")
        kept = {name: value for name, value in self.template_kwargs.items() if name not in said}
        return {**kept, **given}


PLAIN_DEFAULTS = Defaults()
"""For a server that sets none."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One prompt, `n` replies: the common form of every API's requests."""

    model: str
    source: Source
    sampling: Sampling = Sampling()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    n: int = 1
    top_logprobs: int | None = None
    """None: no logprobs; 0: only the picked token's; k: also those of the k likeliest tokens."""
    ignore_eos: bool = False
    echo: bool = False
    grammar: Grammar | None = None
    reasoning: Reasoning = Reasoning()
    cache: CacheControl = CacheControl()
    speculates: bool = True
    prediction: str = ""
    """What the caller expects the reply to be, or parts of it: a source of drafts."""
    cache_salt: str = ""
    """Separates the cached prefixes of one key's users: see `Prompt.salt`."""
    keep: float | None = None
    """The share of a long uncached prompt that must be read; None: the server's setting."""

    @property
    def reads_all(self) -> bool:
        """Whether it insists that every token of its prompt is read."""
        return self.keep == 1

    def in_full(self) -> GenerateRequest:
        """This request, but every token of its prompt is read."""
        return replace(self, keep=1.0)
