"""One call's way through the engine: prompts in the pool, jobs out, tokens in, events out."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from firn.api.asking import offers_tools, refuse_constraints, reply_length, sampling_for
from firn.api.mailroom import Mailbox
from firn.api.prompting import gathered, make_prompt
from firn.api.services import Services
from firn.api.sparse import refuse_sparse
from firn.api.thinking import ThinkBudget
from firn.core.errors import (
    BadRequest,
    InvalidValue,
    QueueFull,
    ShuttingDown,
)
from firn.core.events import (
    AdmissionTimes,
    Admitted,
    Advanced,
    ChoiceDone,
    Ended,
    EngineEvent,
    Event,
    Failed,
    JobDone,
    JobFailed,
    Prefilled,
    Progress,
    PromptLogprobs,
    Resumed,
    Started,
    TextDelta,
    Token,
    TokenLogprob,
)
from firn.core.values import (
    Chat,
    FillInMiddle,
    GenerateRequest,
    Job,
    Namespace,
    Prompt,
    RawText,
    RawTokens,
    RequestId,
    ServedRequest,
    TokenArray,
    ToolChoice,
    Usage,
)
from firn.text.call_check import CallCheck
from firn.text.constraint import constraint
from firn.text.echo import EchoSlice, echoed
from firn.text.formats import PLAIN
from firn.text.lookalikes import CallWatch
from firn.text.reply import ReplyReader

logger = logging.getLogger("firn.api")

NOT_ADMITTED = Admitted(0)
MAX_SCORES = 1 << 18
"""Logprobs of prompts' tokens in one reply, those of the likeliest ones included."""
MANY_SCORES = 1 << 12
"""More of them are not for the asyncio thread to turn into text."""
LONG_REPLY = 4096
"""Characters: a longer one is looked through in the pool."""


@dataclass(slots=True)
class Run:
    """One request of a call while it is in the engine. Owned by its session."""

    id: RequestId
    request: GenerateRequest
    first_choice: int
    readers: list[ReplyReader] = field(default_factory=list)
    budgets: list[ThinkBudget] = field(default_factory=list)
    """One a choice, where thinking is limited."""
    watches: list[CallWatch] = field(default_factory=list)
    """One a choice, where tools were offered."""
    checks: list[CallCheck] = field(default_factory=list)
    """One a choice, where a call may break its schema."""
    unenforced: tuple[str, ...] = ()
    """Places of the request that no grammar holds the reply to."""
    finished: set[int] = field(default_factory=set)
    n_prompt: int = 0
    n_read: int = 0
    """Of the prompt, reused tokens included."""
    echo: str | None = None
    """The prompt's text, where the reply begins with it."""
    ids: TokenArray | None = None
    scores: list[TokenLogprob] = field(default_factory=list)
    """Of the prompt's tokens but the first, where they are shown; `ids` are all of them."""
    found: Admitted = NOT_ADMITTED
    n_drafted: int = 0
    n_accepted: int = 0
    prompt: Prompt | None = None
    reply: list[int] = field(default_factory=list)
    """Tokens of its first choice. Like `prompt`, kept for a trace, or for people who may read it."""
    submitted: bool = False
    done: bool = False


class Session:
    """Owned by the task that answers the call; lives on the asyncio thread.

    `start` checks, tokenizes and queues: until it returns, faults are raised. Then iterate: each
    batch holds what has happened since the last one, and an empty batch says that nothing has for a
    while. The last batch ends in Ended or Failed. `close` may come at any moment, and frees at once
    what is still in the engine.
    """

    def __init__(
        self,
        services: Services,
        requests: Sequence[GenerateRequest],
        *,
        id: str,
        namespace: Namespace,
        new_tool_id: Callable[[], str] = lambda: f"call_{uuid.uuid4().hex[:24]}",
    ) -> None:
        self._services = services
        self._namespace = namespace
        self._new_tool_id = new_tool_id
        self._box: Mailbox | None = None
        self._pending: list[Event] = []
        self._ended = False
        self._runs: dict[RequestId, Run] = {}
        n_choices = 0
        for i, request in enumerate(requests):
            run = Run(RequestId(f"{id}-{i}" if i else id), request, first_choice=n_choices)
            self._runs[run.id] = run
            n_choices += request.n
        self.admitted_at: float | None = None
        self.waits: AdmissionTimes | None = None
        """Of the first of its requests that had its turn."""
        self.first_token_at: float | None = None
        self._on: dict[type[EngineEvent], Callable[[Run, Any, list[Event]], None]] = {
            Token: self._on_token,
            Admitted: self._on_admitted,
            Advanced: self._on_advanced,
            Prefilled: self._on_prefilled,
            PromptLogprobs: self._on_prompt_logprobs,
            ChoiceDone: self._on_choice_done,
            JobDone: self._on_job_done,
            JobFailed: self._on_job_failed,
        }

    @property
    def usage(self) -> Usage:
        """What was used so far."""
        total = Usage(0, 0)
        for run in self._runs.values():
            if not run.submitted:
                continue
            total += Usage(
                n_prompt=run.n_prompt,
                n_completion=sum(reader.n_completion for reader in run.readers),
                n_cached=run.found.n_cached,
                n_reasoning=sum(reader.n_reasoning for reader in run.readers),
                n_drafted=run.n_drafted,
                n_accepted=run.n_accepted,
                n_skipped=run.found.n_skipped,
            )
        return total

    @property
    def n_waiting(self) -> int:
        """Requests that have no row yet."""
        return sum(run.found is NOT_ADMITTED and not run.done for run in self._runs.values())

    @property
    def may_skip(self) -> bool:
        """Whether some of a prompt may be left unread."""
        rules = self._services.sparse
        return any(rules.of(run.request.sparse_keep) for run in self._runs.values())

    @property
    def n_computed(self) -> int:
        """Tokens computed so far: replies, and what was not cached of the prompts taken in."""
        n_reply = sum(r.n_completion for run in self._runs.values() for r in run.readers)
        begun = [run for run in self._runs.values() if run.found is not NOT_ADMITTED]
        n_spared = sum(run.found.n_cached + run.found.n_skipped for run in begun)
        return n_reply + sum(run.n_prompt for run in begun) - n_spared

    @property
    def n_read(self) -> int:
        """Tokens of the prompts that were reused or computed so far."""
        return sum(run.n_read for run in self._runs.values())

    @property
    def over(self) -> bool:
        """The last event has come."""
        return self._ended

    @property
    def n_scores(self) -> int:
        """Logprobs that the reply shows so far, those of the prompts included."""
        total = 0
        for run in self._runs.values():
            if run.request.top_logprobs is not None:
                n_echoed = run.request.n * (0 if run.ids is None else len(run.ids))
                n_reply = sum(reader.n_completion for reader in run.readers)
                total += (1 + run.request.top_logprobs) * (n_echoed + n_reply)
        return total

    @property
    def found(self) -> Sequence[Admitted]:
        """What the cache had for each prompt that was taken in."""
        return [r.found for r in self._runs.values() if r.found is not NOT_ADMITTED]

    @property
    def prompts(self) -> Sequence[tuple[Prompt, Admitted]]:
        """Prompts that were taken in and what the cache had for them; none, where none are kept."""
        runs = self._runs.values()
        return [(r.prompt, r.found) for r in runs if r.prompt and r.found is not NOT_ADMITTED]

    def served(self, *, at_s: float, first_s: float | None) -> Sequence[ServedRequest]:
        """What a trace says of each request so far; nothing, where none is kept."""
        return [
            ServedRequest(
                at_s=at_s,
                prompt=run.prompt,
                reply=tuple(run.reply),
                n_reply=sum(reader.n_completion for reader in run.readers),
                tiers=run.found.tiers,
                first_s=first_s,
                namespace=self._namespace,
            )
            for run in self._runs.values()
            if run.submitted and run.prompt is not None
        ]

    @property
    def unenforced(self) -> Sequence[str]:
        """Places of the requests that their replies are not held to, though they ask for it."""
        return [place for run in self._runs.values() for place in run.unenforced]

    # --- in ------------------------------------------------------------------------------

    async def start(self) -> None:
        services, runs = self._services, self._runs.values()
        for run in runs:
            self._check(run.request)
        mailroom = services.mailroom
        if mailroom.n_calls >= services.limits.max_calls:
            raise QueueFull(mailroom.n_calls)
        self._box = mailroom.open(self._runs, silence_s=services.limits.keep_alive_s)
        jobs = [await self._prepare(run) for run in runs]
        if self.n_scores > MAX_SCORES:
            raise InvalidValue(
                "logprobs",
                f"of {sum(run.n_prompt for run in runs)} prompt tokens are too many for one reply: "
                "ask for fewer of each, for fewer prompts at once, or without echo",
            )
        if mailroom.draining:
            raise ShuttingDown()
        for run, job in zip(runs, jobs, strict=True):
            services.engine.submit(job)
            run.submitted = True
            for choice in range(len(run.budgets)):
                self._watch_budget(run, choice)
        self._pending.append(Started(n_prompt=sum(run.n_prompt for run in runs)))
        for run in runs:
            self._pending.extend(await self._echo(run))

    def _check(self, request: GenerateRequest) -> None:
        """What can be told without a prompt."""
        model = self._services.engine.model
        self._services.check_model(request.model)
        most, asked = self._services.limits.max_request_tokens, request.max_tokens
        if most is not None and asked is not None and asked > most:
            raise InvalidValue("max_tokens", f"must be at most {most} on this server")
        if not model.generates:
            raise BadRequest("This model makes embeddings; it does not generate.", param="model")
        for token, _ in request.sampling.logit_bias:
            if token >= model.vocab_size:
                raise InvalidValue("logit_bias", f"the model has no token {token}")
        if self._services.compile_grammar is None:
            refuse_constraints(request)
        refuse_sparse(request, self._services.sparse)

    async def _prepare(self, run: Run) -> Job:
        run.request = await gathered(self._services, run.request, self._namespace)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._services.pool, self._job, run)

    def _job(self, run: Run) -> Job:
        """Tokenize pool. Touches nothing but this run, which nobody else looks at meanwhile."""
        services, request = self._services, run.request
        model = services.engine.model
        prompt = make_prompt(services, request, self._namespace)
        run.n_prompt = len(prompt)
        if services.keeps_prompts:
            run.prompt = prompt
        if request.echo:
            self._note_echo(run, prompt)
        for note in prompt.notes:
            logger.info("%s %s", run.id, note)
        tail = services.prompts.tail(prompt) if isinstance(request.source, Chat) else ""
        grammar = self._grammar(run, tail)
        run.readers = [self._reader(run, tail, choice) for choice in range(request.n)]
        run.budgets = self._budgets(request)
        if isinstance(request.source, Chat) and offers_tools(request.source):
            run.watches = [CallWatch(request.source.tools) for _ in range(request.n)]
        return Job(
            id=run.id,
            prompt=prompt,
            max_tokens=reply_length(request, prompt, model, services.limits),
            sampling=sampling_for(model, request.sampling),
            n=request.n,
            eos=self._ends(request, grammar),
            top_logprobs=request.top_logprobs,
            prompt_logprobs=run.ids is not None,
            namespace=self._namespace,
            cache=request.cache,
            grammar=grammar,
            speculates=request.speculates,
            # It merely guides guesses: what spells a control token in it does no harm.
            prediction=tuple(services.tokenizer.encode(request.prediction, add_special=False)),
            sparse=services.sparse.of(request.sparse_keep),
        )

    def _ends(self, request: GenerateRequest, grammar: Any) -> frozenset[int]:
        """The tokens that end its replies."""
        # A grammar that is satisfied can only end: nothing is left to go on with.
        if request.ignore_eos and grammar is None:
            return frozenset()
        return self._services.tokenizer.eos | self._services.prompts.ends(request.source)

    def _grammar(self, run: Run, prompt_tail: str) -> Any:
        """The compiled constraint of the request's replies, if any."""
        services, source = self._services, run.request.source
        if services.compile_grammar is None:
            return None
        held = constraint(
            run.request,
            format=services.reply_format,
            tokenizer=services.tokenizer,
            prompt_tail=prompt_tail,
            soften=services.softener(self._namespace),
        )
        run.unenforced = held.left_out
        if held.left_out and isinstance(source, Chat):
            logger.info("%s cannot be held to %s", run.id, ", ".join(held.left_out))
            loose = [
                t for t in source.tools if any(p.startswith(f"{t.param}#") for p in held.left_out)
            ]
            run.checks = [CallCheck(loose) for _ in range(run.request.n)]
        return (
            None
            if held.grammar is None
            else services.compile_grammar(held.grammar, self._namespace)
        )

    def _reader(self, run: Run, prompt_tail: str, choice: int) -> ReplyReader:
        services, request = self._services, run.request
        # A raw completion is shown as it is: nothing in it is a tag of ours.
        chat = request.source if isinstance(request.source, Chat) else None
        return ReplyReader(
            services.tokenizer,
            choice=run.first_choice + choice,
            stop=request.stop,
            format=PLAIN if chat is None else services.reply_format,
            tools=() if chat is None else chat.tools,
            tool_choice=ToolChoice() if chat is None else chat.tool_choice,
            prompt_tail=prompt_tail,
            new_id=self._new_tool_id,
            logprobs=request.top_logprobs is not None,
        )

    def _budgets(self, request: GenerateRequest) -> list[ThinkBudget]:
        limit, closing = request.reasoning.budget_tokens, self._services.reply_format.closing
        if limit is None or not closing or not isinstance(request.source, Chat):
            return []
        tokens = tuple(self._services.tokenizer.encode(closing, add_special=False))
        return [ThinkBudget(limit, tokens) for _ in range(request.n)]

    def _note_echo(self, run: Run, prompt: Prompt) -> None:
        match run.request.source:
            case RawText(text=text) | FillInMiddle(prefix=text):
                run.echo = text
            case RawTokens(ids):
                run.echo = self._services.tokenizer.decode(ids)
            case Chat():
                return
        if run.request.top_logprobs is not None:
            run.ids = prompt.ids

    async def _echo(self, run: Run) -> list[Event]:
        """The prompt, once all that is shown of it is known."""
        if run.echo is None or (run.ids is not None and len(run.scores) < len(run.ids) - 1):
            return []
        slices = [EchoSlice(run.echo)]
        if run.ids is not None:
            work = partial(echoed, self._services.tokenizer, run.echo, run.ids, run.scores)
            slices = await self._services.aside(work, many=self.n_scores > MANY_SCORES)
        run.echo, run.scores = None, []
        choices = range(run.first_choice, run.first_choice + run.request.n)
        return [TextDelta(i, each.text, each.logprobs) for i in choices for each in slices]

    # --- out -----------------------------------------------------------------------------

    def __aiter__(self) -> Session:
        return self

    async def __anext__(self) -> list[Event]:
        events, self._pending = self._pending, []
        if self._ended or self._box is None:
            raise StopAsyncIteration
        while not events:
            deliveries = await self._box.take()
            for request, event in deliveries:
                run = self._runs[request]
                self._on[type(event)](run, event, events)
                if type(event) is PromptLogprobs:
                    events.extend(await self._echo(run))
                if self._ended:
                    break
            if not deliveries:
                return []
        return events

    def close(self) -> None:
        """Idempotent. Whatever has not run to its end is cancelled and forgotten."""
        if self._box is None:
            return
        for run in self._runs.values():
            if run.submitted and not run.done:
                self._services.engine.cancel(run.id)
        self._services.mailroom.close(self._runs, self._box)
        self._box = None

    def _on_token(self, run: Run, token: Token, out: list[Event]) -> None:
        choice = token.choice
        run.n_drafted += token.n_drafted
        run.n_accepted += token.n_accepted
        if choice in run.finished:
            return  # made before the engine heard of the stop
        if self.first_token_at is None:
            self.first_token_at = time.perf_counter()
        if run.prompt is not None and choice == 0:
            run.reply.append(token.id)
        reader = run.readers[choice]
        if run.budgets and run.budgets[choice].skips(token, reader):
            reader.n_completion += 1
            return
        self._say(run, choice, reader.feed(token), out)
        if reader.stopped:  # and has said so
            run.finished.add(choice)
            self._services.engine.stop_choice(run.id, choice)
        elif run.budgets:
            self._watch_budget(run, choice)

    def _say(self, run: Run, choice: int, events: list[Event], out: list[Event]) -> None:
        out.extend(events)
        for fault in run.checks[choice].see(events) if run.checks else ():
            logger.warning("%s %s", run.id, fault)
        text = run.watches[choice].see(events) if run.watches else None
        if text is not None and len(text) > LONG_REPLY:
            self._services.pool.submit(self._note_unread, run.id, run.watches[choice], text)
        elif text is not None:
            self._note_unread(run.id, run.watches[choice], text)

    def _note_unread(self, id: RequestId, watch: CallWatch, text: str) -> None:
        mark = watch.mark(text)
        if mark is not None:
            logger.warning(
                "%s offered tools; the reply has %a, but the parser %s has read no call: "
                "see --tool-call-parser",
                id,
                mark,
                self._services.reply_format.tool or "none",
            )

    def _watch_budget(self, run: Run, choice: int) -> None:
        order = run.budgets[choice].order(run.readers[choice])
        if order is not None:
            self._services.engine.force(run.id, choice, order.tokens, at=order.at)

    def _on_choice_done(self, run: Run, event: ChoiceDone, out: list[Event]) -> None:
        if event.choice not in run.finished:
            run.finished.add(event.choice)
            self._say(run, event.choice, run.readers[event.choice].finish(event.reason), out)

    def _on_admitted(self, run: Run, event: Admitted, out: list[Event]) -> None:
        run.found, run.n_read = event, event.n_cached
        if self.admitted_at is None:
            self.admitted_at, self.waits = time.perf_counter(), event.waits
        out.append(Resumed(event.n_cached))

    def _on_advanced(self, run: Run, event: Advanced, out: list[Event]) -> None:
        run.found = event.admission

    def _on_prefilled(self, run: Run, event: Prefilled, out: list[Event]) -> None:
        run.n_read = event.n_done
        if event.n_done < event.n_total:  # the first token says the rest
            out.append(Progress(event.n_done, event.n_total))

    def _on_prompt_logprobs(self, run: Run, event: PromptLogprobs, out: list[Event]) -> None:
        run.scores.extend(event.logprobs)

    def _on_job_done(self, run: Run, event: JobDone, out: list[Event]) -> None:
        run.done = True
        if all(other.done for other in self._runs.values()):
            self._ended = True
            out.append(Ended(self.usage))

    def _on_job_failed(self, run: Run, event: JobFailed, out: list[Event]) -> None:
        self._ended = True
        out.append(Failed(event.error))
