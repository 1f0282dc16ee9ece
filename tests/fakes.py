"""Second, trivial implementations of the ports, with which tests build the app."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from firn.core.errors import EngineDead, FirnError, TemplateFailed
from firn.core.events import (
    Admitted,
    ChoiceDone,
    EngineEvent,
    JobDone,
    JobFailed,
    Prefilled,
    PromptLogprobs,
    Token,
    TokenLogprob,
)
from firn.core.ports import Delivery, EngineHealth, Publish
from firn.core.reuse import Reason
from firn.core.values import Job, ModelInfo, RequestId

# --- tokenizer -----------------------------------------------------------------------------

START, END = "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "<|im_end|>\n{% endfor %}{% if tools %}{{ tools }}{% endif %}<|im_start|>assistant\n"
)


class FakeTokenizer:
    """One token per byte; then the special tokens; then `pieces`, tokens of several characters.

    Encoding never uses the pieces: a test that wants one asks for its id.
    """

    def __init__(
        self,
        pieces: Sequence[str | bytes] = (),
        *,
        special: Sequence[str] = (END, START),
        chat_template: str | None = CHAT_TEMPLATE,
    ) -> None:
        self._special = {text: 256 + i for i, text in enumerate(special)}
        table = [bytes([i]) for i in range(256)]
        table += [text.encode() for text in special]
        table += [p if isinstance(p, bytes) else p.encode() for p in pieces]
        self._table = table
        self._split = re.compile("(" + "|".join(map(re.escape, special)) + ")")
        self._chat_template = chat_template
        self.rendered: list[dict[str, Any]] = []
        """The arguments of every `render`, in order."""

    @property
    def vocab_size(self) -> int:
        return len(self._table)

    @property
    def eos(self) -> frozenset[int]:
        return frozenset({self._special[END]})

    @property
    def special(self) -> frozenset[int]:
        return frozenset(self._special.values())

    @property
    def added_tokens(self) -> Mapping[str, int]:
        return self._special

    @property
    def max_token_chars(self) -> int:
        return max(map(len, self._special))

    @property
    def chat_template(self) -> str | None:
        return self._chat_template

    def encode(
        self, text: str, *, add_special: bool, typed: Sequence[tuple[int, int]] = ()
    ) -> list[int]:
        ids: list[int] = []
        at = 0
        for start, end in [*typed, (len(text), len(text))]:
            for part in self._split.split(text[at:start]):
                known = self._special.get(part)
                ids += part.encode() if known is None else [known]
            ids += text[start:end].encode()
            at = end
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self._table[i] for i in ids).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        return self._table[token]

    def token_id(self, text: str) -> int | None:
        try:
            return self._table.index(text.encode())
        except ValueError:
            return None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        kwargs: Mapping[str, Any],
    ) -> str:
        self.rendered.append({"messages": messages, "tools": tools, "kwargs": dict(kwargs)})
        if any(message["content"] == "refuse this" for message in messages):
            raise TemplateFailed("this was to be refused")
        body = "".join(f"{START}{m['role']}\n{m['content']}{_calls(m)}{END}\n" for m in messages)
        return f"{body}{tools or ''}{START}assistant\n"


def _calls(message: Mapping[str, Any]) -> str:
    """In JSON, as templates write them: `tojson` of an object, not Python's form of one."""
    return "".join(json.dumps(call["function"]) for call in message.get("tool_calls") or ())


# --- engine --------------------------------------------------------------------------------

Stage = Literal["queue", "prefill", "decode"]
Reply = Callable[[Job, int], Sequence[int]]


@dataclass
class _Row:
    job: Job
    replies: list[list[int]]
    admitted: bool = False
    n_prefilled: int = 0
    n_sent: list[int] = field(default_factory=list)
    forced: dict[int, range] = field(default_factory=dict)
    """By choice: the forced positions of its reply."""
    over: set[int] = field(default_factory=set)

    @property
    def stage(self) -> Stage:
        if not self.admitted:
            return "queue"
        return "prefill" if self.n_prefilled < len(self.job.prompt) else "decode"


class FakeEngine:
    """Sends the replies that a test gives it, one token per choice and step, on its own thread.

    `reply(job, choice)` returns the ids; ids beyond max_tokens are cut off, and an eos is not sent.
    A stage can be held, wholly or after a number of tokens, and released: tests wait for events,
    never for time to pass.
    """

    def __init__(
        self, publish: Publish, reply: Reply, *, vocab_size: int, context_length: int = 4096
    ) -> None:
        self.model = ModelInfo(
            name="fake",
            path="/models/fake",
            architecture="fake",
            fingerprint=b"fake",
            context_length=context_length,
            vocab_size=vocab_size,
            dtype="float32",
            weights_nbytes=0,
            layer_kinds=("KVCache", "RotatingKVCache"),
            batchable=False,
            unbatchable_why="it is a fake",
        )
        self.reply = reply
        self.n_cached = 0
        self.tiers: tuple[tuple[str, int], ...] = ()
        self.reason: Reason | None = None
        self.chunk = 1 << 20
        self.refusal: FirnError | None = None
        self.last_step_age_s = 0.0
        self.jobs: list[Job] = []
        self.cancelled: list[RequestId] = []
        self.stopped: list[tuple[RequestId, int]] = []
        self.forced: list[tuple[int, tuple[int, ...], int]] = []
        """Choice, tokens and position of what was forced, in order."""
        self.n_published = 0
        self._publish = publish
        self._rows: dict[RequestId, _Row] = {}
        self._held: dict[Stage, int] = {}
        self._outbox: list[Delivery] = []
        self._alive = True
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="fake-engine", daemon=True)
        self._thread.start()

    # --- the port ------------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        with self._changed:
            if not self._alive:
                raise EngineDead()
            if self.refusal is not None:
                raise self.refusal
            self.jobs.append(job)
            replies = [list(self.reply(job, i)) for i in range(job.n)]
            self._rows[job.id] = _Row(job, replies, n_sent=[0] * job.n)
            self._changed.notify_all()

    def cancel(self, request: RequestId) -> None:
        with self._changed:
            self.cancelled.append(request)
            self._rows.pop(request, None)
            self._changed.notify_all()

    def stop_choice(self, request: RequestId, choice: int) -> None:
        with self._changed:
            self.stopped.append((request, choice))
            if request in self._rows:
                self._rows[request].over.add(choice)
            self._changed.notify_all()

    def force(self, request: RequestId, choice: int, tokens: Sequence[int], *, at: int) -> None:
        """The reply continues after them where it was; what has not been sent can be withdrawn."""
        with self._changed:
            self.forced.append((choice, tuple(tokens), at))
            row = self._rows.get(request)
            if row is None:
                return
            reply, n_sent = row.replies[choice], row.n_sent[choice]
            old = row.forced.get(choice, range(0))
            if old.start < n_sent < old.stop:
                return
            if n_sent <= old.start:
                del reply[old.start : old.stop]
            at = min(max(at, n_sent), len(reply))
            reply[at:at] = tokens
            row.forced[choice] = range(at, at + len(tokens))
            self._changed.notify_all()

    def health(self) -> EngineHealth:
        with self._changed:
            stages = [row.stage for row in self._rows.values()]
            return EngineHealth(
                alive=self._alive,
                last_step_age_s=self.last_step_age_s,
                n_waiting=stages.count("queue"),
                n_prefilling=stages.count("prefill"),
                n_decoding=stages.count("decode"),
            )

    # --- what tests do -------------------------------------------------------------------

    def hold(self, stage: Stage, *, after: int = 0) -> None:
        """No row proceeds in this stage beyond its first `after` tokens."""
        with self._changed:
            self._held[stage] = after

    def release(self, stage: Stage) -> None:
        with self._changed:
            self._held.pop(stage, None)
            self._changed.notify_all()

    def fail(self, error: FirnError) -> None:
        """End everything that runs."""
        with self._changed:
            self._outbox += [(request, JobFailed(error)) for request in self._rows]
            self._rows.clear()
            self._changed.notify_all()

    def die(self) -> None:
        self.fail(EngineDead())
        with self._changed:
            self._alive = False

    def stop(self) -> None:
        with self._changed:
            self._alive = False
            self._rows.clear()
            self._changed.notify_all()
        self._thread.join()

    def wait_for(self, happened: Callable[[FakeEngine], object], *, timeout_s: float = 30) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: happened(self), timeout_s), "never happened"

    def n_in(self, stage: Stage) -> int:
        with self._changed:
            return sum(row.stage == stage for row in self._rows.values())

    def n_sent(self) -> int:
        """Tokens sent so far for the rows that still run."""
        with self._changed:
            return sum(sum(row.n_sent) for row in self._rows.values())

    # --- its thread ----------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (batch := self._step()):
                    if not self._alive:
                        return
                    self._changed.wait()
                self.n_published += 1
                self._changed.notify_all()
            self._publish(batch)

    def _step(self) -> list[Delivery]:
        batch, self._outbox = self._outbox, []
        for row in list(self._rows.values()):
            events = self._advance(row)
            batch += [(row.job.id, event) for event in events]
            if len(row.over) == row.job.n:
                del self._rows[row.job.id]
                batch.append((row.job.id, JobDone()))
        return batch

    def _advance(self, row: _Row) -> list[EngineEvent]:
        stage = row.stage
        limit = self._held.get(stage)
        if stage == "queue":
            if limit is not None:
                return []
            row.admitted = True
            row.n_prefilled = self.n_cached
            return [Admitted(self.n_cached, self.tiers, self.reason)]
        if stage == "prefill":
            total = len(row.job.prompt)
            done = min(row.n_prefilled + self.chunk, total)
            if limit is not None and done > limit:
                return []
            start, row.n_prefilled = row.n_prefilled, done
            return [*_scores(row.job, start, done), Prefilled(done, total)]
        return [
            event
            for choice in range(row.job.n)
            if choice not in row.over
            for event in self._decode(row, choice, limit)
        ]

    def _decode(self, row: _Row, choice: int, limit: int | None) -> list[EngineEvent]:
        at, reply = row.n_sent[choice], row.replies[choice]
        if limit is not None and at >= limit:
            return []
        if at == row.job.max_tokens:
            row.over.add(choice)
            return [ChoiceDone(choice, "length")]
        if at == len(reply) or reply[at] in row.job.eos:
            row.over.add(choice)
            return [ChoiceDone(choice, "stop")]
        row.n_sent[choice] += 1
        forced = at in row.forced.get(choice, ())
        return [Token(choice, reply[at], _logprob(row.job, reply[at]), forced)]


def _scores(job: Job, start: int, end: int) -> list[EngineEvent]:
    """Logprobs of a chunk of the prompt: each token is less likely than the one before."""
    first, last = start + 1, min(end, len(job.prompt) - 1) + 1
    if not job.prompt_logprobs or first >= last:
        return []
    top = job.top_logprobs or 0
    found = []
    for i in range(first, last):
        token = int(job.prompt.ids[i])
        others = tuple((other, -9.0) for other in range(65, 90) if other != token)
        found.append(TokenLogprob(token, -i / 8, ((token, -i / 8), *others)[:top]))
    return [PromptLogprobs(first, tuple(found))]


def _logprob(job: Job, token: int) -> TokenLogprob | None:
    if job.top_logprobs is None:
        return None
    top = [(token, -0.25), *((other, -2.0) for other in range(65, 90) if other != token)]
    return TokenLogprob(token, -0.25, tuple(top[: job.top_logprobs]))
