"""From a request to its prompt, in the tokenize pool; what JSON can hold and no text is a 400."""

from __future__ import annotations

import asyncio

from firn.api.services import Services
from firn.core.errors import BadRequest, ContextTooLong, InvalidValue
from firn.core.values import GenerateRequest, Middle, Prompt, RawTokens


def make_prompt(services: Services, request: GenerateRequest) -> Prompt:
    """Takes its time: not for the asyncio thread."""
    source = request.source
    try:
        if isinstance(source, Middle):
            if services.infill is None:
                raise InvalidValue("suffix", "this model has no tokens for filling in the middle")
            source = RawTokens(services.infill.ids(source.prefix, source.suffix))
        return services.prompts.make(source, reasoning=request.reasoning)
    except UnicodeEncodeError:
        raise BadRequest(
            "The prompt has an unpaired surrogate, which is no text.", param="messages"
        ) from None
    except RecursionError:
        raise BadRequest("The prompt is nested too deeply.", param="messages") from None


async def prompt_of(services: Services, request: GenerateRequest) -> Prompt:
    """As a reply to it would begin, for those who generate nothing."""
    if services.fetch_images is not None:
        request = await services.fetch_images(request)
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(services.pool, make_prompt, services, request)


async def count_tokens(services: Services, request: GenerateRequest) -> int:
    """What the template makes of it, also where that is too long to be answered."""
    services.check_model(request.model)
    try:
        return len(await prompt_of(services, request))
    except ContextTooLong as error:
        return error.n_prompt
