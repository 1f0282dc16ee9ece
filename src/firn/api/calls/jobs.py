"""Turns a request into a job: checks, renders, tokenizes, and prepares to read the reply."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from firn.api.calls.prompting import gathered, make_prompt
from firn.api.calls.running import RunningRequest
from firn.api.calls.think_budget import ThinkBudget
from firn.api.http.auth import Caller
from firn.api.services import ApiLimits, Services
from firn.core.errors import BadRequest, ContextTooLong, InvalidValue
from firn.core.values import (
    Chat,
    FillInMiddle,
    GenerateRequest,
    Job,
    ModelInfo,
    Prompt,
    RawText,
    RawTokens,
    Sampling,
    ToolChoice,
    ToolMode,
)
from firn.text.grammar.constraint import constraint
from firn.text.reply.formats import PLAIN
from firn.text.reply.reader import ReplyReader
from firn.text.reply.unread_calls import UnreadCalls

logger = logging.getLogger("firn.api")


class JobMaker:
    """Makes the jobs of one call, in the tokenize pool. Owner: its session."""

    def __init__(self, services: Services, caller: Caller, new_tool_id: Callable[[], str]) -> None:
        self._services = services
        self._key_id, self._namespace = caller.key_id, caller.namespace
        self._new_tool_id = new_tool_id

    def check(self, request: GenerateRequest) -> None:
        """Raises BadRequest or ModelNotFound for faults that can be found without the prompt."""
        model = self._services.engine.model
        self._services.check_model(request.model)
        limit = self._services.limits.max_request_tokens
        if limit is not None and (request.max_tokens or 0) > limit:
            raise InvalidValue("max_tokens", f"must be at most {limit} on this server")
        max_rows = self._services.limits.max_rows
        if request.n > max_rows:  # the engine would refuse it only after a stream has begun
            raise InvalidValue("n", f"{request.n} replies exceed the limit of {max_rows}")
        if not model.generates:
            raise BadRequest(
                "This model only computes embeddings; it cannot generate text.", param="model"
            )
        for token, _ in request.sampling.logit_bias:
            if token >= model.vocab_size:
                raise InvalidValue("logit_bias", f"the model has no token {token}")
        for token in request.stop_tokens:
            if token >= model.vocab_size:
                raise InvalidValue("stop_token_ids", f"the model has no token {token}")
        if self._services.compile_grammar is None:
            refuse_constraints(request)
        self._services.preparations.check(request)

    async def make(self, run: RunningRequest) -> Job:
        """The job of a request. Also fills in the run, which nothing else reads meanwhile."""
        async with gathered(self._services, run.request, self._namespace) as whole:
            return await self._services.in_pool(self._key_id, lambda: self._job(run, whole))

    def _job(self, run: RunningRequest, whole: GenerateRequest) -> Job:
        """In the tokenize pool. whole: the run's request with all it refers to."""
        services, request = self._services, run.request
        model = services.engine.model
        prompt = make_prompt(services, whole, self._namespace)
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
            run.call_watches = [UnreadCalls(request.source.tools) for _ in range(request.n)]
        return Job(
            id=run.id,
            prompt=prompt,
            max_tokens=reply_length(request, prompt, model, services.limits),
            sampling=sampling_for(model, request.sampling),
            n=request.n,
            eos=self._eos(request, grammar),
            top_logprobs=request.top_logprobs,
            prompt_logprobs=run.echoed_ids is not None,
            namespace=self._namespace,
            cache=request.cache,
            grammar=grammar,
            speculates=request.speculates,
            prediction=self._prediction(request),
            preparation=services.preparations.of(request),
        )

    def _prediction(self, request: GenerateRequest) -> tuple[int, ...]:
        """It only guides drafts, so a control token in it does no harm."""
        services = self._services
        tokens = services.tokenizer.encode(request.prediction, add_special=False)
        return tuple(tokens[: services.engine.model.context_length])

    def _note_echo(self, run: RunningRequest, prompt: Prompt) -> None:
        match run.request.source:
            case RawText(text=text) | FillInMiddle(prefix=text):
                run.echo = text
            case RawTokens(ids):
                run.echo = self._services.tokenizer.decode(ids)
            case Chat():
                return
        if run.request.top_logprobs is not None:
            run.echoed_ids = prompt.ids

    def _grammar(self, run: RunningRequest, prompt_tail: str) -> object:
        """The compiled constraint on the request's replies; None: there is none."""
        services, source = self._services, run.request.source
        if services.compile_grammar is None:
            return None
        enforced = constraint(
            run.request,
            format=services.reply_format,
            tokenizer=services.tokenizer,
            prompt_tail=prompt_tail,
            relax=services.relaxer(self._namespace),
        )
        left_out = run.unenforced = enforced.left_out
        if left_out and isinstance(source, Chat):
            logger.info("%s: no grammar can enforce %s", run.id, ", ".join(left_out))
        if enforced.grammar is None:
            return None
        return services.compile_grammar(enforced.grammar, self._namespace)

    def _reader(self, run: RunningRequest, prompt_tail: str, choice: int) -> ReplyReader:
        services, request = self._services, run.request
        # A raw completion is shown as it is: it has no markup to split off.
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

    def _eos(self, request: GenerateRequest, grammar: object) -> frozenset[int]:
        """The tokens that end its replies."""
        # A satisfied grammar allows no token but the end of the reply.
        asked = frozenset(request.stop_tokens)
        if request.ignore_eos and grammar is None:
            return asked
        return asked | self._services.tokenizer.eos | self._services.prompts.ends(request.source)


# --- what the server and the model can do: pure ----------------------------------------------


def refuse_constraints(request: GenerateRequest) -> None:
    """For a server that cannot compile grammars. Raises BadRequest if the request needs one."""
    if request.grammar is not None:
        raise BadRequest(
            f"{request.grammar.param}: constrained output is not available on this server.",
            param=request.grammar.param,
        )
    source = request.source
    if isinstance(source, Chat) and source.tool_choice.mode in (ToolMode.REQUIRED, ToolMode.NAMED):
        raise BadRequest(
            "tool_choice: a tool call cannot be enforced on this server; use 'auto'.",
            param="tool_choice",
        )


def offers_tools(chat: Chat) -> bool:
    return bool(chat.tools) and chat.tool_choice.mode is not ToolMode.NONE


def reply_length(
    request: GenerateRequest, prompt: Prompt, model: ModelInfo, limits: ApiLimits
) -> int:
    # [0, n_prompt) prompt   [n_prompt, context_length) room for the reply
    room = model.context_length - len(prompt)
    if room < 1:
        raise ContextTooLong(len(prompt), model.context_length)
    if request.max_tokens is not None:
        return min(request.max_tokens, room)
    return min(limits.max_tokens, limits.max_request_tokens or room, room)


def sampling_for(model: ModelInfo, sampling: Sampling) -> Sampling:
    """The sampling without a top_k that would keep every token."""
    return sampling if sampling.top_k < model.vocab_size else replace(sampling, top_k=0)
