"""What a session remembers about one request of its call while the request is in the engine."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from firn.api.calls.think_budget import ThinkBudget
from firn.core.events import Admitted, Token, TokenLogprob
from firn.core.values import GenerateRequest, Prompt, RequestId, TokenArray, Usage
from firn.text.reply.reader import ReplyReader
from firn.text.reply.unread_calls import UnreadCalls

NOT_ADMITTED = Admitted(0)


@dataclass(slots=True)
class RunningRequest:
    """Owner: its session. `JobMaker` fills it in before the session reads it."""

    id: RequestId
    request: GenerateRequest
    first_choice: int
    readers: list[ReplyReader] = field(default_factory=list)
    budgets: list[ThinkBudget] = field(default_factory=list)
    """One per choice, if thinking is limited."""
    call_watches: list[UnreadCalls] = field(default_factory=list)
    """One per choice, if tools were offered."""
    unenforced: tuple[str, ...] = ()
    """Parts of the request that no grammar enforces in the reply."""
    finished: set[int] = field(default_factory=set)
    """Choices that have ended."""
    n_prompt: int = 0
    n_read: int = 0
    """Prompt tokens read so far, reused ones included."""
    echo: str | None = None
    """The prompt's text, if the reply begins with it."""
    echoed_ids: TokenArray | None = None
    """The prompt's tokens, if the reply shows their logprobs."""
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    """Those of `echoed_ids`, except the first, as far as they have arrived."""
    admitted: Admitted = NOT_ADMITTED
    n_drafted: int = 0
    n_accepted: int = 0
    prompt: Prompt | None = None
    reply: list[int] = field(default_factory=list)
    """Tokens of its first choice. Like `prompt`, kept only for a trace or for the dashboard."""
    n_dropped: Counter[int] = field(default_factory=Counter)
    """Tokens that arrived after the end of their choice, by choice."""
    submitted: bool = False
    done: bool = False

    def drop(self, token: Token) -> None:
        """Count a token that was computed before the engine learned of the stop. Drafts accepted
        after the stop are not in the reply, and do not count as accepted."""
        self.n_dropped[token.choice] += 1
        self.n_drafted += token.n_drafted
        # The last token of a step follows its draft, and is not one of the accepted tokens.
        self.n_accepted += max(token.n_accepted + 1 - self.n_dropped[token.choice], 0)

    @property
    def is_admitted(self) -> bool:
        """Whether it has left the engine's queue."""
        return self.admitted is not NOT_ADMITTED

    @property
    def n_completion(self) -> int:
        return sum(reader.n_completion for reader in self.readers)

    @property
    def n_computed(self) -> int:
        """Tokens computed so far: its reply, and, once admitted, the prompt minus what was cached
        or skipped."""
        if not self.is_admitted:
            return self.n_completion
        n_not_computed = self.admitted.n_cached + self.admitted.n_skipped
        return self.n_completion + self.n_prompt - n_not_computed

    @property
    def n_logprobs(self) -> int:
        """Logprobs that its replies show so far, those of the prompt included."""
        if self.request.top_logprobs is None:
            return 0
        n_echoed = 0 if self.echoed_ids is None else len(self.echoed_ids) * self.request.n
        return (1 + self.request.top_logprobs) * (n_echoed + self.n_completion)

    @property
    def awaits_prompt_logprobs(self) -> bool:
        """Whether the echo has to wait because not all logprobs that it shows have arrived."""
        ids = self.echoed_ids
        return ids is not None and len(self.prompt_logprobs) < len(ids) - 1

    @property
    def usage(self) -> Usage:
        return Usage(
            n_prompt=self.n_prompt,
            n_completion=self.n_completion,
            n_cached=self.admitted.n_cached,
            n_reasoning=sum(reader.n_reasoning for reader in self.readers),
            n_drafted=self.n_drafted,
            n_accepted=self.n_accepted,
            n_skipped=self.admitted.n_skipped,
        )
