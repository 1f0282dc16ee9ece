"""One request of a call while it is in the engine: reads its replies and counts."""

from __future__ import annotations

from collections import Counter

from firn.api.calls.prepared import ReplyPlan
from firn.core.events import (
    Admitted,
    Advanced,
    ChoiceDone,
    EngineEvent,
    Event,
    Failed,
    JobDone,
    JobFailed,
    Prefilled,
    Progress,
    PromptLogprobs,
    Resumed,
    Token,
    TokenLogprob,
)
from firn.core.values import RequestId, Usage

NOT_ADMITTED = Admitted(0)


class RunningRequest:
    """Owner: its session."""

    def __init__(self, plan: ReplyPlan, *, first_choice: int) -> None:
        """first_choice: the number of its first reply among those of the call."""
        self.plan = plan
        self.choices = range(first_choice, first_choice + plan.n)
        self.readers = [plan.make_reader(choice=choice) for choice in self.choices]
        self.finished: set[int] = set()
        """Choices that have ended."""
        self.admitted = NOT_ADMITTED
        self.n_read = 0
        """Prompt tokens read so far, reused ones included."""
        self.prompt_logprobs: list[TokenLogprob] = []
        """Those of the echo, except the first, as far as they have arrived."""
        self.echoed = False
        """Whether the reply has begun with the prompt, if it does."""
        self.done = False
        self._n_drafted = 0
        self._n_accepted = 0
        self._n_dropped: Counter[int] = Counter()
        """Tokens that arrived after the end of their choice, by choice."""

    # --- events --------------------------------------------------------------------------

    def feed(self, event: EngineEvent) -> list[Event] | None:
        """What comes of it for the client; None: it arrived after the end of its choice."""
        if type(event) is Token:
            return self._read(event)
        match event:
            case Admitted():
                self.admitted, self.n_read = event, event.n_cached
                return [Resumed(event.n_cached)]
            case Advanced():
                self.admitted = event.admission
            case Prefilled():
                self.n_read = event.n_done
                if event.n_done < event.n_total:  # the first token shows that the prompt is done
                    return [Progress(event.n_done, event.n_total)]
            case PromptLogprobs():
                self.prompt_logprobs.extend(event.logprobs)
            case ChoiceDone() if event.choice in self.finished:
                return None
            case ChoiceDone():
                self.finished.add(event.choice)
                return self.readers[event.choice].finish(event.reason)
            case JobDone():
                self.done = True
            case JobFailed():
                return [Failed(event.error)]
        return []

    def _read(self, token: Token) -> list[Event] | None:
        if token.choice in self.finished:
            self._drop(token)
            return None
        self._n_drafted += token.n_drafted
        self._n_accepted += token.n_accepted
        reader = self.readers[token.choice]
        events = reader.feed(token)
        if reader.stopped:  # its last event is ChoiceFinished
            self.finished.add(token.choice)
        return events

    def _drop(self, token: Token) -> None:
        """Count a token that was computed before the engine learned of the stop. Drafts accepted
        after the stop are not in the reply, and do not count as accepted."""
        self._n_dropped[token.choice] += 1
        self._n_drafted += token.n_drafted
        # The last token of a step follows its draft, and is not one of the accepted tokens.
        self._n_accepted += max(token.n_accepted + 1 - self._n_dropped[token.choice], 0)

    # --- state ---------------------------------------------------------------------------

    @property
    def id(self) -> RequestId:
        return self.plan.id

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
        return self.n_completion + self.plan.n_prompt - n_not_computed

    @property
    def n_held_logprobs(self) -> int:
        """Logprobs that wait for their text."""
        return sum(reader.n_held_logprobs for reader in self.readers)

    @property
    def may_echo(self) -> bool:
        """Whether the reply can begin with the prompt now: all logprobs that it shows have arrived."""
        echo = self.plan.echo
        if echo is None or self.echoed:
            return False
        return echo.ids is None or len(self.prompt_logprobs) >= len(echo.ids) - 1

    @property
    def usage(self) -> Usage:
        return Usage(
            n_prompt=self.plan.n_prompt,
            n_completion=self.n_completion,
            n_cached=self.admitted.n_cached,
            n_reasoning=sum(reader.n_reasoning for reader in self.readers),
            n_drafted=self._n_drafted,
            n_accepted=self._n_accepted,
            n_skipped=self.admitted.n_skipped,
        )
