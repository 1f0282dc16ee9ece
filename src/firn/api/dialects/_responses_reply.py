"""A response of the Responses API while it is generated: its items, its state, its stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from firn.api.dialects import ReplyHead, _openai
from firn.api.dialects._content_blocks import (
    BlockClosed,
    BlockEvent,
    BlockGrown,
    BlockOpened,
    ContentBlock,
    ContentBlocks,
)
from firn.api.dialects._custom_tools import CustomInput, custom_input
from firn.api.dialects._openai import dumps, quote
from firn.api.dialects._responses_items import NamespacedTool, seal
from firn.api.http import sse
from firn.core.errors import Cancelled, FirnError
from firn.core.events import Ended, Event, Failed, Progress, Started
from firn.core.values import Usage

ID_PREFIX = "resp_"
Keep = Callable[["ResponseBuilder"], None]


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """How a response is shown.

    echo: what it repeats of its request. summarises: reasoning is shown as its own summary.
    with_encrypted_content: it is also sent as encrypted_content, for clients that send nothing else
    back. custom_tools: names of the tools that take a text. namespaced: tools that the caller keeps
    in namespaces, by the name that the model knows. writes: the prompt is stored.
    """

    echo: Mapping[str, Any]
    summarises: bool = False
    with_encrypted_content: bool = False
    custom_tools: frozenset[str] = frozenset()
    namespaced: Mapping[str, NamespacedTool] = field(default_factory=dict)
    with_logprobs: bool = False
    writes: bool = True


class ResponseBuilder:
    """The response so far. Owner: one encoder, or one fold."""

    def __init__(self, head: ReplyHead, options: ResponseOptions) -> None:
        self.head = head
        self.options = options
        self.output: list[dict[str, Any]] = []
        self.status = "queued"
        self._blocks = ContentBlocks()
        self._usage: Usage | None = None
        self._ended_at: int | None = None
        self._error: FirnError | None = None

    @property
    def id(self) -> str:
        return f"{ID_PREFIX}{self.head.id}"

    @property
    def is_running(self) -> bool:
        return self.status in ("queued", "in_progress")

    def take(self, event: Event) -> list[BlockEvent]:
        match event:
            case Started():
                self.status = "in_progress"
                return []
            case Ended():
                finish = self._blocks.finish
                cut = finish is not None and finish.reason == "length"
                self.status = "incomplete" if cut else "completed"
                self._usage, self._ended_at = event.usage, int(event.ended_at)
                return []
            case Failed():
                self.status = "cancelled" if isinstance(event.error, Cancelled) else "failed"
                self._error = event.error
                return self._add_closed(self._blocks.close())
            case _:
                return self._add_closed(self._blocks.take(event))

    def _add_closed(self, changes: list[BlockEvent]) -> list[BlockEvent]:
        for change in changes:
            if isinstance(change, BlockClosed):
                self.output.append(self.item(change.block, self._final_status()))
        return changes

    def _final_status(self) -> str:
        finish = self._blocks.finish
        cut = self._error is not None or (finish is not None and finish.reason == "length")
        return "incomplete" if cut else "completed"

    def body(self) -> dict[str, Any]:
        failed = self.status == "failed"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.head.created,
            "completed_at": self._ended_at if self.status == "completed" else None,
            "status": self.status,
            "error": _error(self._error) if failed and self._error else None,
            "incomplete_details": {"reason": "max_output_tokens"}
            if self.status == "incomplete"
            else None,
            "model": self.head.model,
            "output": self.output,
            "usage": None if self._usage is None else usage_object(self._usage, self.options),
            **self.options.echo,
        }

    # --- items -----------------------------------------------------------------------------

    def item_id(self, block: ContentBlock) -> str:
        prefix = {"text": "msg", "reasoning": "rs", "call": "fc"}[block.kind]
        if block.kind == "call" and block.name in self.options.custom_tools:
            prefix = "ctc"
        return f"{prefix}_{self.head.id}_{block.index}"

    def item(self, block: ContentBlock, status: str) -> dict[str, Any]:
        """The item of a block, as far as it has been written."""
        begun: dict[str, Any] = {"id": self.item_id(block), "status": status}
        match block.kind:
            case "text":
                content = [self.text_part(block)] if block.pieces else []
                return begun | {"type": "message", "role": "assistant", "content": content}
            case "reasoning":
                return begun | self._reasoning(block)
            case "call" if block.name in self.options.custom_tools:
                called = begun | {"type": "custom_tool_call", "input": custom_input(block.text)}
                return called | {"call_id": block.id, **self._named(block)}
            case "call":
                called = begun | {"type": "function_call", "arguments": block.text}
                return called | {"call_id": block.id, **self._named(block)}

    def _named(self, block: ContentBlock) -> dict[str, str]:
        """The tool as the caller knows it."""
        tool = self.options.namespaced.get(block.name)
        if tool is None:
            return {"name": block.name}
        return {"name": tool.name, "namespace": tool.namespace}

    def text_part(self, block: ContentBlock) -> dict[str, Any]:
        logprobs = _openai.logprob_objects(block.logprobs) if self.options.with_logprobs else []
        return {
            "type": "output_text",
            "text": block.text,
            "annotations": [],
            "logprobs": logprobs,
        }

    def _reasoning(self, block: ContentBlock) -> dict[str, Any]:
        text = block.text
        item: dict[str, Any] = {"type": "reasoning", "summary": []}
        if text and self.options.summarises:
            item["summary"] = [{"type": "summary_text", "text": text}]
        elif text:
            item["content"] = [{"type": "reasoning_text", "text": text}]
        if text and self.options.with_encrypted_content:
            item["encrypted_content"] = seal(text)
        return item


def usage_object(usage: Usage, options: ResponseOptions) -> dict[str, Any]:
    n_read = usage.n_prompt - usage.n_cached - usage.n_skipped
    written = max(n_read - 1, 0) if options.writes else 0
    return {
        "input_tokens": usage.n_prompt,
        "input_tokens_details": {"cached_tokens": usage.n_cached, "cache_write_tokens": written},
        "output_tokens": usage.n_completion,
        "output_tokens_details": {"reasoning_tokens": usage.n_reasoning},
        "total_tokens": usage.n_prompt + usage.n_completion,
        **_openai.approximate(usage),
    }


def _error(error: FirnError) -> dict[str, Any]:
    code = "server_error" if error.status >= 500 else error.code
    return {"code": code, "message": error.message}


# --- streaming -----------------------------------------------------------------------------


class ResponseEncoder:
    """Owner: the task that writes the stream. Events are numbered."""

    def __init__(self, head: ReplyHead, options: ResponseOptions, keep: Keep) -> None:
        self._response = ResponseBuilder(head, options)
        self._options = options
        self._keep = keep
        self._n_events = 0
        self._current = ("", "")
        """What the open block's frames refer to, and the name of their events (see `_place`)."""
        self._input = CustomInput()
        """The input of the open call, if its tool takes a text."""

    def feed(self, events: Sequence[Event]) -> bytes:
        if not events:
            return sse.KEEP_ALIVE.encode()
        return "".join([self._render(event) for event in events]).encode("ascii")

    def _render(self, event: Event) -> str:
        changes = self._response.take(event)
        match event:
            case Started():
                self._keep(self._response)
                return self._state_frame("created") + self._state_frame("in_progress")
            case Progress():
                return sse.progress(event)
            case Ended() | Failed():
                self._keep(self._response)
                ending = self._response.status
                last = self._state_frame("failed" if ending == "cancelled" else ending)
                return "".join([self._render_change(change) for change in changes]) + last
            case _:
                return "".join([self._render_change(change) for change in changes])

    def _state_frame(self, kind: str) -> str:
        return self._frame(kind, f'"response":{dumps(self._response.body())}')

    def _frame(self, kind: str, members: str) -> str:
        number, self._n_events = self._n_events, self._n_events + 1
        name = f"response.{kind}"
        return f'event: {name}\ndata: {{"type":"{name}","sequence_number":{number},{members}}}\n\n'

    def _render_change(self, change: BlockEvent) -> str:
        block = change.block
        custom = block.kind == "call" and block.name in self._options.custom_tools
        match change:
            case BlockOpened():
                return self._open(block)
            case BlockGrown() if not custom:
                where, part = self._current
                logprobs = ""
                if self._options.with_logprobs and block.kind == "text":
                    logprobs = f',"logprobs":{dumps(_openai.logprob_objects(change.logprobs))}'
                elif block.kind == "text":
                    logprobs = ',"logprobs":[]'
                return self._frame(
                    f"{part}.delta", f'{where},"delta":{quote(change.piece)}{logprobs}'
                )
            case BlockGrown():
                return self._input_delta(self._input.feed(change.piece))
            case BlockClosed():
                return self._close(block, custom=custom)

    def _input_delta(self, text: str) -> str:
        """The frame of a piece of the text that a call passes to its tool."""
        if not text:
            return ""
        where, part = self._current
        return self._frame(f"{part}.delta", f'{where},"delta":{quote(text)}')

    def _open(self, block: ContentBlock) -> str:
        """Frames for an empty block: what it already contains follows as its first delta."""
        self._input = CustomInput()
        block = ContentBlock(block.index, block.kind, block.id, block.name)
        item = dumps(self._response.item(block, "in_progress"))
        added = self._frame("output_item.added", f'"output_index":{block.index},"item":{item}')
        self._current = self._place(block)
        part = self._part(block)
        if part is None:
            return added
        kind, shown = part
        where = self._current[0]
        return added + self._frame(f"{kind}.added", f'{where},"part":{dumps(shown)}')

    def _close(self, block: ContentBlock, *, custom: bool) -> str:
        where, kind = self._current
        text = custom_input(block.text) if custom else block.text
        frames = self._input_delta(self._input.flush()) if custom else ""
        member = {"text": "text", "reasoning": "text", "call": "input" if custom else "arguments"}
        done = f'{where},"{member[block.kind]}":{quote(text)}'
        if block.kind == "text":
            done += f',"logprobs":{dumps(self._response.text_part(block)["logprobs"])}'
        elif block.kind == "call":
            done += f',"name":{quote(self._response.output[-1]["name"])}'
        frames += self._frame(f"{kind}.done", done)
        part = self._part(block)
        if part is not None:
            frames += self._frame(f"{part[0]}.done", f'{where},"part":{dumps(part[1])}')
        item = dumps(self._response.output[-1])
        return frames + self._frame(
            "output_item.done", f'"output_index":{block.index},"item":{item}'
        )

    def _place(self, block: ContentBlock) -> tuple[str, str]:
        """Which part of which item a block's frames refer to, and the name of their events."""
        where = f'"item_id":"{self._response.item_id(block)}","output_index":{block.index}'
        match block.kind:
            case "text":
                return f'{where},"content_index":0', "output_text"
            case "reasoning" if self._options.summarises:
                return f'{where},"summary_index":0', "reasoning_summary_text"
            case "reasoning":
                return f'{where},"content_index":0', "reasoning_text"
            case "call":
                custom = block.name in self._options.custom_tools
                return where, "custom_tool_call_input" if custom else "function_call_arguments"

    def _part(self, block: ContentBlock) -> tuple[str, dict[str, Any]] | None:
        """The name of the part inside an item, and the part itself; None: a call has none."""
        match block.kind:
            case "text":
                return "content_part", self._response.text_part(block)
            case "reasoning" if self._options.summarises:
                return "reasoning_summary_part", {"type": "summary_text", "text": block.text}
            case "reasoning":
                return "content_part", {"type": "reasoning_text", "text": block.text}
            case "call":
                return None
