"""POST /v1/responses/compact: a conversation as its user messages and a summary of the rest.

The model writes the summary, below the whole conversation and its tools, so what is stored of them is
reused. The client keeps the summary unread, as a sealed item, and sends it in place of the rest.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from firn.api.calls.session import Session
from firn.api.dialects._responses_items import Item, seal
from firn.api.dialects._responses_reply import ID_PREFIX, ResponseOptions, usage_object
from firn.api.http.auth import SHARED, Caller
from firn.api.services import Services
from firn.core.errors import StepFailed
from firn.core.events import TextDelta
from firn.core.values import (
    Chat,
    GenerateRequest,
    Message,
    Namespace,
    TextPart,
    ToolChoice,
    ToolMode,
)

INSTRUCTION = """\
Summarise this conversation for yourself. The summary will stand in place of everything but the \
user's own messages, so keep what is needed to go on: the task and how far it is, decisions and their \
reasons, facts and names that were found, what was changed, and what remains to be done. Write the \
summary only."""


async def compacted(
    services: Services, request: GenerateRequest, conversation: Sequence[Item], key_id: Namespace
) -> dict[str, Any]:
    """request: continues the conversation. Raises BadRequest; StepFailed if no summary comes."""
    assert isinstance(request.source, Chat)
    asked = replace(
        request,
        source=replace(
            request.source,
            messages=(*request.source.messages, Message("user", (TextPart(INSTRUCTION),))),
            tool_choice=ToolChoice(ToolMode.NONE),
        ),
    )
    id = uuid.uuid4().hex
    caller = Caller(key_id, key_id if services.access.keys.private else SHARED)
    session = Session(services, [asked], id=f"compact-{id}", caller=caller)
    pieces: list[str] = []
    with closing(session):
        await session.start()
        async for event in session.events():
            if isinstance(event, TextDelta):
                pieces.append(event.text)
    summary = "".join(pieces).strip()
    if not summary:
        raise StepFailed("The model wrote no summary of the conversation.")
    options = ResponseOptions(echo={}, writes=request.cache.write)
    return {
        "id": f"{ID_PREFIX}{id}",
        "object": "response.compaction",
        "created_at": int(time.time()),
        "output": [
            *(
                _kept(item, f"msg_{id}_{i}")
                for i, item in enumerate(conversation)
                if _is_user(item)
            ),
            {"id": f"cmp_{id}", "type": "compaction", "encrypted_content": seal(summary)},
        ],
        "usage": usage_object(session.progress.usage, options),
    }


def _is_user(item: Item) -> bool:
    return item.get("type") == "message" and item.get("role") == "user"


def _kept(item: Item, id: str) -> dict[str, Any]:
    content = item.get("content")
    parts = [{"type": "input_text", "text": content}] if isinstance(content, str) else content
    return {"id": id, "status": "completed", **item, "content": parts or []}
