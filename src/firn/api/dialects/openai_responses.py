"""POST /v1/responses, and the routes to stored responses."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from firn.api.calls.prompting import count_tokens, decoded_request
from firn.api.dialects import JsonRoute, ReplyHead, RouteRequest, _openai, _openai_chat
from firn.api.dialects import _responses_items as items
from firn.api.dialects._other_servers import Lacking, refuse_missing
from firn.api.dialects._responses_compact import compacted
from firn.api.dialects._responses_reply import (
    ID_PREFIX,
    ResponseBuilder,
    ResponseEncoder,
    ResponseOptions,
)
from firn.api.dialects._responses_store import ResponseStore, StoredResponse
from firn.api.dialects._template_kwargs import template_kwargs
from firn.api.http import fields, large_json, sse
from firn.api.http.errors import openai_error
from firn.api.services import Services
from firn.core.bounds import INT_MAX
from firn.core.errors import BadRequest, Cancelled, FirnError, InvalidValue
from firn.core.events import Event
from firn.core.units import MIB
from firn.core.values import (
    PLAIN_DEFAULTS,
    Chat,
    Defaults,
    GenerateRequest,
    Message,
    Namespace,
    TextPart,
)

ELSEWHERE: Mapping[str, Lacking] = {
    "logprobs": Lacking("use top_logprobs, or include message.output_text.logprobs", (False,)),
    "max_completion_tokens": Lacking("use max_output_tokens"),
    "max_tokens": Lacking("use max_output_tokens"),
    "messages": Lacking("use input"),
    "n": Lacking("a response has one choice; use /v1/chat/completions", (1,)),
    "response_format": Lacking("use text.format"),
    "stop_sequences": Lacking("use stop", ([],)),
    "system": Lacking("use instructions"),
}
"""Options of other APIs, by what they are called in this one."""
LOGPROBS = "message.output_text.logprobs"
SEALED_REASONING = "reasoning.encrypted_content"
MAX_ECHO_NBYTES = 2 * MIB
"""A stream repeats it several times, on the thread that serves all calls."""
PAGE = 20
MAX_PAGE = 100


class OpenAIResponses:
    """Owner of the stored responses, for as long as the app lives."""

    path = "/v1/responses"
    summary = "Responses, in OpenAI's dialect"
    tool_id_prefix = "call_"
    stream_headers = sse.HEADERS
    inline_nbytes = 0
    """A small body may continue a long stored conversation."""

    def __init__(self, defaults: Defaults = PLAIN_DEFAULTS) -> None:
        self._defaults = defaults
        self._store = ResponseStore()

    def decode(self, body: Mapping[str, Any], *, namespace: Namespace) -> ResponsesCall:
        members = fields.Fields(body)
        own = items.input_items(members)
        previous = members.string("previous_response_id")
        tools = items.tools(members)
        include = items.included(members)
        reasoning = self._defaults.reasoning(_openai_chat.reasoning(members))
        request = GenerateRequest(
            model=members.string("model") or "",
            source=Chat(
                messages=self._messages(members, own, previous, namespace),
                tools=tools.all,
                tool_choice=items.tool_choice(members, tools),
                template_kwargs=self._defaults.kwargs(template_kwargs(members), reasoning),
            ),
            sampling=_openai.sampling(members, self._defaults.sampling),
            max_tokens=members.integer("max_output_tokens", low=1),
            stop=_openai.stop_strings(members),
            stop_tokens=_openai.stop_tokens(members),
            top_logprobs=_top_logprobs(members, include),
            ignore_eos=members.boolean("ignore_eos", False),
            grammar=items.grammar(members),
            reasoning=reasoning,
            **_openai.extensions(members, self._defaults),
        )
        stream, background = members.boolean("stream", False), members.boolean("background", False)
        stored = members.boolean("store", True)
        if background and (stream or not stored):
            raise InvalidValue("background", "needs store, and cannot be combined with stream")
        options = ResponseOptions(
            echo=_echo(members, request, previous, stored=stored),
            summarises=items.wants_summary(members),
            with_encrypted_content=SEALED_REASONING in include,
            custom_tools=tools.custom,
            namespaced=tools.namespaced,
            with_logprobs=request.top_logprobs is not None,
            writes=request.cache.write,
        )
        _refuse(members)
        _check_echo(options.echo)
        keep = self._keeper(namespace, _json_bytes(own), previous) if stored else _forget
        ignored = (*members.unread(), *tools.left_out)
        return ResponsesCall((request,), stream, background, ignored, options, keep)

    def _earlier(self, previous: str | None, namespace: Namespace) -> list[items.Item]:
        """The items of the responses that this one continues."""
        stored = () if previous is None else self._store.conversation(namespace, previous)
        return [item for response in stored for item in (*response.input(), *response.output())]

    def _messages(
        self,
        body: fields.Fields,
        own: list[items.Item],
        previous: str | None,
        namespace: Namespace,
    ) -> tuple[Message, ...]:
        """Instructions apply to one response only; the items of earlier responses remain."""
        before = [("previous_response_id", item) for item in self._earlier(previous, namespace)]
        named = [(f"input[{i}]", item) for i, item in enumerate(own)]
        instructions = body.get("instructions")
        if isinstance(instructions, list):
            before = [*_listed(instructions, "instructions"), *before]
        find_item = cache(partial(self._store.item, namespace))
        messages = items.messages([*before, *named], find_item)
        if instructions is not None and not isinstance(instructions, list):
            text = fields.string(instructions, "instructions")
            messages.insert(0, Message("system", (TextPart(text),)))
        if not messages:
            raise InvalidValue("input", "must have at least 1 element")
        return tuple(messages)

    def _keeper(
        self, namespace: Namespace, own: bytes, previous: str | None
    ) -> Callable[[ResponseBuilder], None]:
        begun = False

        def keep(reply: ResponseBuilder) -> None:
            nonlocal begun
            stored = StoredResponse(
                id=reply.id,
                request=reply.head.request,
                previous=previous,
                is_running=reply.is_running,
                items=own,
                outputs=json.dumps(reply.output).encode(),
                response=json.dumps(_without_output(reply.body())).encode(),
                item_ids=frozenset(item["id"] for item in reply.output),
            )
            if begun:
                self._store.update(namespace, stored)
            else:
                self._store.put(namespace, stored)
            begun = True

        return keep

    def render_error(self, error: FirnError) -> dict[str, Any]:
        shown = openai_error(error)
        if error.param == "messages":  # what other layers call the prompt in errors
            shown["error"]["param"] = "input"
        return shown

    def schema(self) -> dict[str, Any]:
        return _schema()

    # --- further routes --------------------------------------------------------------------

    def routes(self, services: Services) -> tuple[JsonRoute, ...]:
        async def get(route_request: RouteRequest) -> bytes:
            if route_request.query.get("stream", "false").lower() not in ("false", "0"):
                raise InvalidValue("stream", "a stored response cannot be streamed; leave it out")
            return self._stored(route_request).body()

        async def delete(route_request: RouteRequest) -> Mapping[str, Any]:
            dropped = self._store.drop(route_request.namespace, route_request.path["response_id"])
            if dropped.is_running:
                services.event_router.fail(dropped.request, Cancelled())
            return {"id": dropped.id, "object": "response", "deleted": True}

        async def cancel(route_request: RouteRequest) -> bytes:
            stored = self._stored(route_request)
            if not stored.is_running:
                raise BadRequest("This response has ended: there is nothing to cancel.")
            services.event_router.fail(stored.request, Cancelled())
            return await services.in_pool(route_request.namespace, lambda: _cancel(stored))

        async def input_items(route_request: RouteRequest) -> bytes:
            stored = self._stored(route_request)
            return await services.in_pool(
                route_request.namespace,
                lambda: _json_of(_page(stored, route_request.query)),
            )

        async def count(route_request: RouteRequest) -> Mapping[str, Any]:
            request = await decoded_request(services, self, route_request)
            n_tokens = await count_tokens(services, request, route_request.namespace)
            return {"object": "response.input_tokens", "input_tokens": n_tokens}

        def compaction(
            body: Mapping[str, Any], namespace: Namespace
        ) -> tuple[GenerateRequest, list[items.Item]]:
            if body.get("stream"):
                raise InvalidValue("stream", "a compaction is not streamed")
            given = {**body, "input": body.get("input") or [], "store": False}
            (request,) = self.decode(given, namespace=namespace).requests
            members = fields.Fields(given)
            earlier = self._earlier(members.string("previous_response_id"), namespace)
            return request, [*earlier, *items.input_items(members)]

        async def compact(route_request: RouteRequest) -> Mapping[str, Any]:
            key_id, body = route_request.namespace, route_request.body
            request, conversation = await services.in_pool(key_id, lambda: compaction(body, key_id))
            return await compacted(services, request, conversation, key_id)

        path = f"{self.path}/{{response_id}}"
        return (
            JsonRoute("GET", path, "A stored response", get),
            JsonRoute("DELETE", path, "Forget a response", delete),
            JsonRoute("POST", f"{path}/cancel", "Stop a response that is being generated", cancel),
            JsonRoute("GET", f"{path}/input_items", "The input items of a response", input_items),
            JsonRoute(
                "POST",
                f"{self.path}/input_tokens",
                "How many tokens a prompt has",
                count,
                schema=_schema(),
            ),
            JsonRoute(
                "POST",
                f"{self.path}/compact",
                "A conversation as its user messages and a summary of the rest",
                compact,
                schema=_schema() | {"required": []},
                computes=True,
            ),
        )

    def _stored(self, route_request: RouteRequest) -> StoredResponse:
        return self._store.get(route_request.namespace, route_request.path["response_id"])


DIALECT = OpenAIResponses


def _check_echo(echo: Mapping[str, Any]) -> None:
    """Raises BadRequest for what a reply could not repeat, or only in seconds."""
    if len(_json_bytes(echo)) > MAX_ECHO_NBYTES:
        raise BadRequest(
            f"Instructions, tools, metadata and other fields that every response repeats take more "
            f"than {MAX_ECHO_NBYTES >> 20} MiB together."
        )


def _without_output(body: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name != "output"}


def _json_bytes(value: object) -> bytes:
    """The value as JSON. Raises BadRequest for NaN and infinity, which a reply could not repeat."""
    try:
        return json.dumps(value, allow_nan=False).encode()
    except ValueError:
        raise BadRequest("A number in the body is infinite or NaN.") from None


def _forget(reply: ResponseBuilder) -> None:
    """In place of a keeper, for `store: false`."""


def _listed(given: list[object], param: str) -> list[tuple[str, items.Item]]:
    listed: list[tuple[str, items.Item]] = []
    for i, value in enumerate(given):
        item = fields.mapping(value, f"{param}[{i}]")
        listed.append((f"{param}[{i}]", {"type": "message", **item}))
    return listed


def _top_logprobs(body: fields.Fields, include: frozenset[str]) -> int | None:
    top = body.integer("top_logprobs", low=0, high=_openai.MAX_TOP_LOGPROBS)
    return (top or 0) if top or LOGPROBS in include else None


def _refuse(body: fields.Fields) -> None:
    """Refuse fields that would change the answer, and skip those that have no effect here."""
    for name in ("conversation", "prompt"):
        if body.get(name) is not None:
            raise InvalidValue(name, "is not supported; send the items, or previous_response_id")
    body.skip("truncation")  # a conversation that is too long is refused
    body.skip("prompt_cache_options", "moderation", "access_programs", "image")
    _openai.skip_inert(body)
    refuse_missing(body, ELSEWHERE)


def _echo(
    body: fields.Fields, request: GenerateRequest, previous: str | None, *, stored: bool
) -> dict[str, Any]:
    """What a response repeats of its request, with defaults for whatever the request leaves out."""
    metadata = body.get("metadata")
    return {
        "instructions": body.get("instructions"),
        "max_output_tokens": request.max_tokens,
        "metadata": {} if metadata is None else fields.mapping(metadata, "metadata"),
        "parallel_tool_calls": request.source.tool_choice.parallel
        if isinstance(request.source, Chat)
        else True,
        "previous_response_id": previous,
        "reasoning": {"effort": request.reasoning.effort, "summary": None}
        | (body.get("reasoning") or {}),
        "background": body.boolean("background", False),
        "store": stored,
        "temperature": request.sampling.temperature,
        "text": _shown_text(body.get("text") or {}),
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": [_shown_tool(tool) for tool in body.get("tools") or ()],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": request.sampling.top_p,
        "truncation": "disabled",
        "user": body.string("user"),
        "presence_penalty": request.sampling.presence_penalty,
        "frequency_penalty": request.sampling.frequency_penalty,
        "max_tool_calls": body.integer("max_tool_calls", low=1),
        "service_tier": "default",
        "safety_identifier": body.string("safety_identifier"),
        "prompt_cache_key": body.string("prompt_cache_key"),
    }


def _shown_tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """A tool with every member that clients expect of a function."""
    if tool.get("type") != "function":
        return tool
    shown = {"description": None, "parameters": None, **tool}
    return shown | {"strict": bool(tool.get("strict"))}


def _shown_text(text: Mapping[str, Any]) -> dict[str, Any]:
    """How the text is formatted: a schema is enforced whether it is called strict or not."""
    format = text.get("format") or {"type": "text"}
    if format["type"] == "json_schema":
        format = {"description": None, "strict": True, **format}
    return {**text, "format": format}


def _cancel(stored: StoredResponse) -> bytes:
    """What its client had it repeat may be large."""
    shown: dict[str, Any] = json.loads(stored.body())
    return _json_of(shown | {"status": "cancelled"})


def _json_of(answer: Mapping[str, Any]) -> bytes:
    return large_json.dumps(answer, large_json.COMPACT, piece_items=1)


def _page(stored: StoredResponse, query: Mapping[str, str]) -> dict[str, Any]:
    limit = fields.page_limit(query, default=PAGE, high=MAX_PAGE)
    order = fields.one_of(query.get("order", "desc"), "order", ("asc", "desc"))
    suffix = stored.id.removeprefix(ID_PREFIX)
    listed = [{"id": f"in_{suffix}_{i}"} | item for i, item in enumerate(stored.input())]
    if order == "desc":
        listed.reverse()
    if "after" in query:
        ids = [item["id"] for item in listed]
        listed = listed[ids.index(query["after"]) + 1 :] if query["after"] in ids else []
    page = listed[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else "",
        "last_id": page[-1]["id"] if page else "",
        "has_more": len(listed) > len(page),
    }


@dataclass(frozen=True, slots=True)
class ResponsesCall:
    requests: tuple[GenerateRequest, ...]
    stream: bool
    background: bool
    ignored: tuple[str, ...]
    options: ResponseOptions
    keep: Callable[[ResponseBuilder], None]

    def encoder(self, head: ReplyHead) -> ResponseEncoder:
        return ResponseEncoder(head, self.options, self.keep)

    def fold(self, head: ReplyHead, events: Iterable[Event]) -> dict[str, Any]:
        reply = ResponseBuilder(head, self.options)
        for event in events:
            reply.take(event)
        self.keep(reply)
        return reply.body()


# --- schema --------------------------------------------------------------------------------


def _schema() -> dict[str, Any]:
    properties = _openai.common_schema()
    for name in ("max_tokens", "max_completion_tokens", "n"):
        del properties[name]
    optional = {"type": ["object", "null"]}
    text_or_items = {"type": ["string", "array"], "items": {"type": "object"}}
    boolean = {"type": ["boolean", "null"]}
    properties |= {
        "input": text_or_items,
        "instructions": {"type": ["string", "array", "null"], "items": {"type": "object"}},
        "previous_response_id": {"type": ["string", "null"]},
        "max_output_tokens": {
            "type": ["integer", "null"],
            "minimum": 1,
            "maximum": INT_MAX,
        },
        "tools": {"type": ["array", "null"], "items": {"type": "object"}},
        "tool_choice": {"type": ["string", "object", "null"]},
        "parallel_tool_calls": boolean,
        "text": optional,
        "reasoning": optional,
        "enable_thinking": boolean,
        "thinking_budget": {"type": ["integer", "null"], "minimum": 0},
        "chat_template_kwargs": optional,
        "top_logprobs": {"type": ["integer", "null"], "minimum": 0, "maximum": 20},
        "include": {"type": ["array", "null"], "items": {"type": "string"}},
        "metadata": optional,
        "store": boolean,
        "background": boolean,
        "user": {"type": ["string", "null"]},
    }
    return {
        "type": "object",
        "required": ["input"],
        "properties": properties,
        "example": {"input": "Hello", "max_output_tokens": 16},
    }
