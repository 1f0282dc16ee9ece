"""Makes the prompt of a request, in the tokenize pool."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

from firn.api.dialects import Dialect, RouteRequest
from firn.api.http.auth import SHARED
from firn.api.services import Services
from firn.core.errors import BadRequest, ContextTooLong
from firn.core.keys import packed_tokens
from firn.core.values import (
    Chat,
    GenerateRequest,
    MessagePart,
    Namespace,
    PicturePart,
    Prompt,
    Source,
)


def make_prompt(services: Services, request: GenerateRequest, owner: Namespace) -> Prompt:
    """In the tokenize pool. Raises BadRequest. owner: whose pictures these are."""
    try:
        prompt = services.prompts.make(_owned(request.source, owner), reasoning=request.reasoning)
    except UnicodeEncodeError:
        raise BadRequest(
            "The prompt contains an unpaired surrogate, which is not valid text.", param="messages"
        ) from None
    except RecursionError:
        raise BadRequest("The prompt is nested too deeply.", param="messages") from None
    if request.cache_salt:
        prompt = replace(prompt, salt=request.cache_salt)
    packed_tokens(prompt)  # remembered with the prompt, so that the engine's thread need not do it
    return prompt


def _owned(source: Source, owner: Namespace) -> Source:
    """The source with its pictures marked as the owner's, unless callers share them."""
    if owner == SHARED or not isinstance(source, Chat):
        return source

    def owned(part: MessagePart) -> MessagePart:
        return replace(part, owner=owner) if isinstance(part, PicturePart) else part

    if not any(isinstance(part, PicturePart) for m in source.messages for part in m.parts):
        return source
    messages = tuple(replace(m, parts=tuple(map(owned, m.parts))) for m in source.messages)
    return replace(source, messages=messages)


@asynccontextmanager
async def gathered(
    services: Services, request: GenerateRequest, owner: Namespace
) -> AsyncIterator[GenerateRequest]:
    """The request with all it refers to: pictures from their addresses, texts of documents.

    Not to be kept when the context has ended.
    """
    async with AsyncExitStack() as held:
        for gather in services.gathers:
            request = await held.enter_async_context(gather(request, owner))
        yield request


async def decoded_request(
    services: Services, dialect: Dialect, route_request: RouteRequest
) -> GenerateRequest:
    """The only request of a body. Decoded in the pool, since a long conversation takes a while."""
    body, namespace = route_request.body, route_request.namespace
    call = await services.in_pool(namespace, lambda: dialect.decode(body, namespace=namespace))
    (request,) = call.requests
    return request


async def prompt_of(services: Services, request: GenerateRequest, owner: Namespace) -> Prompt:
    """For routes that generate nothing. Raises what `make_prompt` does."""
    async with gathered(services, request, owner) as whole:
        return await services.in_pool(owner, lambda: make_prompt(services, whole, owner))


async def count_tokens(services: Services, request: GenerateRequest, owner: Namespace) -> int:
    """The length of its prompt, even if it is too long to be answered."""
    services.check_model(request.model)
    try:
        return len(await prompt_of(services, request, owner))
    except ContextTooLong as error:
        return error.n_prompt
