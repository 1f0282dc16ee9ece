"""A response while it is made: its items, its state, and the events that tell of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from firn.api import sse
from firn.api.dialects import ReplyHead, _openai
from firn.api.dialects._content_blocks import Block, Blocks, Closed, Grown, Opened, Step
from firn.api.dialects._custom_tools import CustomInput, custom_input
from firn.api.dialects._openai import dumps, quote
from firn.api.dialects._responses_items import Place, seal
from firn.core.errors import Cancelled, FirnError
from firn.core.events import Ended, Event, Failed, Progress, Started, TextLogprob
from firn.core.values import Usage

ID_PREFIX = "resp_"
Keep = Callable[["Reply"], None]


@dataclass(frozen=True, slots=True)
class Look:
    """How a response is shown.

    echo: what it repeats of its request. summarises: reasoning is shown as its own summary. seals:
    it also goes out sealed, for clients that bring nothing else back. customs: names of the tools
    whose calls are a text. places: where the caller has the tools that are in namespaces. writes: the
    prompt was stored.
    """

    echo: Mapping[str, Any]
    summarises: bool = False
    seals: bool = False
    customs: frozenset[str] = frozenset()
    places: Mapping[str, Place] = field(default_factory=dict)
    with_logprobs: bool = False
    writes: bool = True


class Reply:
    """Owned by one encoder, or by one fold."""

    def __init__(self, head: ReplyHead, look: Look) -> None:
        self.head = head
        self.look = look
        self.output: list[dict[str, Any]] = []
        self.status = "queued"
        self._blocks = Blocks()
        self._usage: Usage | None = None
        self._error: FirnError | None = None

    @property
    def id(self) -> str:
        return f"{ID_PREFIX}{self.head.id}"

    @property
    def is_running(self) -> bool:
        return self.status in ("queued", "in_progress")

    def take(self, event: Event) -> list[Step]:
        match event:
            case Started():
                self.status = "in_progress"
                return []
            case Ended():
                finish = self._blocks.finish
                cut = finish is not None and finish.reason == "length"
                self.status = "incomplete" if cut else "completed"
                self._usage = event.usage
                return []
            case Failed():
                self.status = "cancelled" if isinstance(event.error, Cancelled) else "failed"
                self._error = event.error
                return self._note(self._blocks.close())
            case _:
                return self._note(self._blocks.take(event))

    def _note(self, steps: list[Step]) -> list[Step]:
        for step in steps:
            if isinstance(step, Closed):
                self.output.append(self.item(step.block, self._ending()))
        return steps

    def _ending(self) -> str:
        finish = self._blocks.finish
        cut = self._error is not None or (finish is not None and finish.reason == "length")
        return "incomplete" if cut else "completed"

    def body(self) -> dict[str, Any]:
        failed = self.status == "failed"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.head.created,
            "status": self.status,
            "error": _error(self._error) if failed and self._error else None,
            "incomplete_details": {"reason": "max_output_tokens"}
            if self.status == "incomplete"
            else None,
            "model": self.head.model,
            "output": self.output,
            "usage": None if self._usage is None else _usage(self._usage, self.look),
            **self.look.echo,
        }

    # --- items -----------------------------------------------------------------------------

    def item_id(self, block: Block) -> str:
        prefix = {"text": "msg", "reasoning": "rs", "call": "fc"}[block.kind]
        if block.kind == "call" and block.name in self.look.customs:
            prefix = "ctc"
        return f"{prefix}_{self.head.id}_{block.index}"

    def item(self, block: Block, status: str) -> dict[str, Any]:
        """As it is now."""
        begun: dict[str, Any] = {"id": self.item_id(block), "status": status}
        match block.kind:
            case "text":
                content = [self.text_part(block)] if block.pieces else []
                return begun | {"type": "message", "role": "assistant", "content": content}
            case "reasoning":
                return begun | self._reasoning(block)
            case "call" if block.name in self.look.customs:
                called = begun | {"type": "custom_tool_call", "input": custom_input(block.text)}
                return called | {"call_id": block.id, **self._named(block)}
            case "call":
                called = begun | {"type": "function_call", "arguments": block.text}
                return called | {"call_id": block.id, **self._named(block)}

    def _named(self, block: Block) -> dict[str, str]:
        """The tool as the caller knows it."""
        place = self.look.places.get(block.name)
        if place is None:
            return {"name": block.name}
        return {"name": place.name, "namespace": place.namespace}

    def text_part(self, block: Block) -> dict[str, Any]:
        logprobs = _logprobs(block.logprobs) if self.look.with_logprobs else []
        return {
            "type": "output_text",
            "text": block.text,
            "annotations": [],
            "logprobs": logprobs,
        }

    def _reasoning(self, block: Block) -> dict[str, Any]:
        text = block.text
        found: dict[str, Any] = {"type": "reasoning", "summary": []}
        if text and self.look.summarises:
            found["summary"] = [{"type": "summary_text", "text": text}]
        elif text:
            found["content"] = [{"type": "reasoning_text", "text": text}]
        if text and self.look.seals:
            found["encrypted_content"] = seal(text)
        return found


def _usage(usage: Usage, look: Look) -> dict[str, Any]:
    written = max(usage.n_prompt - usage.n_cached - 1, 0) if look.writes else 0
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


def _logprobs(tokens: Iterable[TextLogprob]) -> list[dict[str, Any]]:
    def shown(text: str, raw: bytes, logprob: float | None) -> dict[str, Any]:
        return {"token": text, "logprob": _openai.logarithm(logprob), "bytes": list(raw)}

    return [
        shown(token.text, token.raw, token.logprob)
        | {"top_logprobs": [shown(*candidate) for candidate in token.top]}
        for token in tokens
    ]


# --- streaming -----------------------------------------------------------------------------


class ResponseEncoder:
    """Owned by the task that writes the stream. Every event has the next number."""

    def __init__(self, head: ReplyHead, look: Look, keep: Keep) -> None:
        self._reply = Reply(head, look)
        self._look = look
        self._keep = keep
        self._n_events = 0
        self._current = ("", "")
        """Where the open block's frames belong, and what they are called."""
        self._input = CustomInput()
        self._n_streamed = 0
        """Characters of the open call's text that were sent."""

    def feed(self, events: Sequence[Event]) -> bytes:
        if not events:
            return sse.KEEP_ALIVE.encode()
        return "".join([self._render(event) for event in events]).encode("ascii")

    def _render(self, event: Event) -> str:
        steps = self._reply.take(event)
        match event:
            case Started():
                self._keep(self._reply)
                return self._told("created") + self._told("in_progress")
            case Progress():
                return sse.progress(event)
            case Ended() | Failed():
                self._keep(self._reply)
                ending = self._reply.status
                told = self._told("failed" if ending == "cancelled" else ending)
                return "".join([self._step(step) for step in steps]) + told
            case _:
                return "".join([self._step(step) for step in steps])

    def _told(self, kind: str) -> str:
        return self._frame(kind, f'"response":{dumps(self._reply.body())}')

    def _frame(self, kind: str, members: str) -> str:
        number, self._n_events = self._n_events, self._n_events + 1
        name = f"response.{kind}"
        return f'event: {name}\ndata: {{"type":"{name}","sequence_number":{number},{members}}}\n\n'

    def _step(self, step: Step) -> str:
        block = step.block
        custom = block.kind == "call" and block.name in self._look.customs
        match step:
            case Opened():
                return self._opened(block)
            case Grown() if not custom:
                where, part = self._current
                logprobs = ""
                if self._look.with_logprobs and block.kind == "text":
                    logprobs = f',"logprobs":{dumps(_logprobs(step.logprobs))}'
                elif block.kind == "text":
                    logprobs = ',"logprobs":[]'
                return self._frame(
                    f"{part}.delta", f'{where},"delta":{quote(step.piece)}{logprobs}'
                )
            case Grown():
                return self._grown_input(step.piece)
            case Closed():
                return self._closed(block, custom=custom)

    def _grown_input(self, piece: str) -> str:
        """What these arguments add to the text inside them."""
        text = self._input.feed(piece)
        if not text:
            return ""
        self._n_streamed += len(text)
        where, part = self._current
        return self._frame(f"{part}.delta", f'{where},"delta":{quote(text)}')

    def _opened(self, block: Block) -> str:
        """As it begins: what the same event has put into it comes as its first delta."""
        self._input, self._n_streamed = CustomInput(), 0
        block = Block(block.index, block.kind, block.id, block.name)
        item = dumps(self._reply.item(block, "in_progress"))
        added = self._frame("output_item.added", f'"output_index":{block.index},"item":{item}')
        self._current = self._place(block)
        part = self._part(block)
        if part is None:
            return added
        kind, shown = part
        where = self._current[0]
        return added + self._frame(f"{kind}.added", f'{where},"part":{dumps(shown)}')

    def _closed(self, block: Block, *, custom: bool) -> str:
        where, kind = self._current
        text = custom_input(block.text) if custom else block.text
        frames = ""
        if custom and not self._n_streamed and text:
            frames = self._frame(f"{kind}.delta", f'{where},"delta":{quote(text)}')
        member = {"text": "text", "reasoning": "text", "call": "input" if custom else "arguments"}
        done = f'{where},"{member[block.kind]}":{quote(text)}'
        if block.kind == "text":
            done += f',"logprobs":{dumps(self._reply.text_part(block)["logprobs"])}'
        elif block.kind == "call":
            done += f',"name":{quote(self._reply.output[-1]["name"])}'
        frames += self._frame(f"{kind}.done", done)
        part = self._part(block)
        if part is not None:
            frames += self._frame(f"{part[0]}.done", f'{where},"part":{dumps(part[1])}')
        item = dumps(self._reply.output[-1])
        return frames + self._frame(
            "output_item.done", f'"output_index":{block.index},"item":{item}'
        )

    def _place(self, block: Block) -> tuple[str, str]:
        """Which part of which item a frame speaks of, and what its events are called."""
        where = f'"item_id":"{self._reply.item_id(block)}","output_index":{block.index}'
        match block.kind:
            case "text":
                return f'{where},"content_index":0', "output_text"
            case "reasoning" if self._look.summarises:
                return f'{where},"summary_index":0', "reasoning_summary_text"
            case "reasoning":
                return f'{where},"content_index":0', "reasoning_text"
            case "call":
                custom = block.name in self._look.customs
                return where, "custom_tool_call_input" if custom else "function_call_arguments"

    def _part(self, block: Block) -> tuple[str, dict[str, Any]] | None:
        """What the part inside the item is called, and how it looks; calls have none."""
        match block.kind:
            case "text":
                return "content_part", self._reply.text_part(block)
            case "reasoning" if self._look.summarises:
                return "reasoning_summary_part", {"type": "summary_text", "text": block.text}
            case "reasoning":
                return "content_part", {"type": "reasoning_text", "text": block.text}
            case "call":
                return None
