"""Prepares a request for the engine: checks, renders, tokenizes, and plans how to read its replies."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from firn.api.calls.prepared import Echo, PreparedRequest, ReplyPlan, ThinkLimit
from firn.api.calls.prompting import gathered, make_prompt
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
    RequestId,
    Sampling,
    ToolChoice,
    ToolMode,
)
from firn.text.grammar.constraint import constraint
from firn.text.reply.formats import PLAIN
from firn.text.reply.reader import ReplyReader

logger = logging.getLogger("firn.api")


class RequestPreparer:
    """Prepares the requests of one call. Owner: its session."""

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
        if self._services.grammars is None:
            refuse_constraints(request)
        self._services.preparations.check(request)

    async def prepare(self, id: RequestId, request: GenerateRequest) -> PreparedRequest:
        """Raises BadRequest."""
        async with gathered(self._services, request, self._namespace) as whole:
            return await self._services.in_pool(self._key_id, lambda: self._prepared(id, whole))

    def _prepared(self, id: RequestId, request: GenerateRequest) -> PreparedRequest:
        """In the tokenize pool. request: with all it refers to, which is not kept."""
        services, model = self._services, self._services.engine.model
        prompt = make_prompt(services, request, self._namespace)
        for note in prompt.notes:
            logger.info("%s %s", id, note)
        chat = request.source if isinstance(request.source, Chat) else None
        tail = services.prompts.tail(prompt) if chat else ""
        grammar, unenforced = self._grammar(request, tail)
        if unenforced and chat:
            logger.info("%s: no grammar can enforce %s", id, ", ".join(unenforced))
        echo = self._echo(request, prompt) if request.echo else None
        job = Job(
            id=id,
            prompt=prompt,
            max_tokens=reply_length(request, prompt, model, services.limits),
            sampling=sampling_for(model, request.sampling),
            n=request.n,
            eos=self._eos(request, grammar),
            top_logprobs=request.top_logprobs,
            prompt_logprobs=echo is not None and echo.ids is not None,
            namespace=self._namespace,
            cache=request.cache,
            grammar=grammar,
            speculates=request.speculates,
            prediction=self._prediction(request),
            preparation=services.preparations.of(request),
        )
        replies = ReplyPlan(
            id,
            len(prompt),
            self._readers(request, tail),
            n=request.n,
            top_logprobs=request.top_logprobs,
            echo=echo,
            think_limit=self._think_limit(request),
            tools=chat.tools if chat and offers_tools(chat) else (),
            unenforced=unenforced,
            may_skip=job.preparation is not None,
        )
        return PreparedRequest(job, replies)

    def _prediction(self, request: GenerateRequest) -> tuple[int, ...]:
        """It only guides drafts, so a control token in it does no harm."""
        services = self._services
        tokens = services.tokenizer.encode(request.prediction, add_special=False)
        return tuple(tokens[: services.engine.model.context_length])

    def _echo(self, request: GenerateRequest, prompt: Prompt) -> Echo | None:
        match request.source:
            case RawText(text=text) | FillInMiddle(prefix=text):
                pass
            case RawTokens(ids):
                text = self._services.tokenizer.decode(ids)
            case Chat():
                return None
        return Echo(text, None if request.top_logprobs is None else prompt.ids)

    def _grammar(
        self, request: GenerateRequest, prompt_tail: str
    ) -> tuple[object, tuple[str, ...]]:
        """The compiled constraint on the request's replies, None without one; and the parts of the
        request that it does not enforce."""
        services = self._services
        if services.grammars is None:
            return None, ()
        enforced = constraint(
            request,
            format=services.reply_format,
            tokenizer=services.tokenizer,
            prompt_tail=prompt_tail,
            relax=services.grammars.relaxer(self._namespace),
        )
        if enforced.grammar is None:
            return None, enforced.left_out
        compiled = services.grammars.compile(enforced.grammar, self._namespace)
        return compiled, enforced.left_out

    def _readers(self, request: GenerateRequest, prompt_tail: str) -> Callable[..., ReplyReader]:
        services = self._services
        # A raw completion is shown as it is: it has no markup to split off.
        chat = request.source if isinstance(request.source, Chat) else None
        return partial(
            ReplyReader,
            services.tokenizer,
            stop=request.stop,
            format=PLAIN if chat is None else services.reply_format,
            tools=() if chat is None else chat.tools,
            tool_choice=ToolChoice() if chat is None else chat.tool_choice,
            prompt_tail=prompt_tail,
            new_id=self._new_tool_id,
            logprobs=request.top_logprobs is not None,
        )

    def _think_limit(self, request: GenerateRequest) -> ThinkLimit | None:
        limit, closing = request.reasoning.budget_tokens, self._services.reply_format.closing
        if limit is None or not closing or not isinstance(request.source, Chat):
            return None
        tokens = self._services.tokenizer.encode(closing, add_special=False)
        return ThinkLimit(limit, tuple(tokens))

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
