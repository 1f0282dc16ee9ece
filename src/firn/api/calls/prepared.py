"""What the tokenize pool makes of a request: a job for the engine, and how to read its replies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from firn.core.values import Job, RequestId, TokenArray, Tool
from firn.text.reply.reader import ReplyReader


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompt, where the reply begins with it. ids: its tokens, if the reply shows their logprobs."""

    text: str
    ids: TokenArray | None = None


@dataclass(frozen=True, slots=True)
class ThinkLimit:
    """n_tokens: how long a reply may think. closing: what is forced then."""

    n_tokens: int
    closing: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReplyPlan:
    """How a request's replies are read, and what its session must know of the request meanwhile.

    n: how many replies. make_reader: called with `choice`, see `ReplyReader`. tools: those that its
    replies may call. unenforced: parts of the request that no grammar enforces. may_skip: part of the
    prompt may be skipped.
    """

    id: RequestId
    n_prompt: int
    make_reader: Callable[..., ReplyReader]
    n: int = 1
    top_logprobs: int | None = None
    echo: Echo | None = None
    think_limit: ThinkLimit | None = None
    tools: tuple[Tool, ...] = ()
    unenforced: tuple[str, ...] = ()
    may_skip: bool = False

    def n_logprobs(self, n_completion: int) -> int:
        """How many logprobs are shown with this many tokens, those of the prompt included."""
        if self.top_logprobs is None:
            return 0
        ids = self.echo.ids if self.echo else None
        n_echoed = 0 if ids is None else len(ids) * self.n
        return (1 + self.top_logprobs) * (n_echoed + n_completion)


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """The job, with the whole prompt, is forgotten once the engine has it."""

    job: Job
    replies: ReplyPlan
