"""The normal form: what every API dialect decodes to, and what the engine is handed.

All of it is frozen. A dialect builds a `GenerateRequest`; `text.prompt` turns its messages into a
`Prompt`; the session hands a `Job` to the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Literal, NewType

import numpy as np
import numpy.typing as npt

from firn.core.sparse import Sparse

RequestId = NewType("RequestId", str)
Namespace = NewType("Namespace", str)
"""Whose cache this is: derived by the server from the API key, never taken from a request."""

TokenArray = npt.NDArray[np.int64]
Scores = npt.NDArray[np.float32]
"""How much each token of a prompt matters."""

# --- messages ------------------------------------------------------------------------------

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class TextPart:
    text: str


@dataclass(frozen=True, slots=True)
class PicturePart:
    """A picture by reference. `data` is what an address has led to, once it was fetched; `fault` why
    it has led to nothing. `owner` is who may find out, by the time it takes, that the picture has been
    here before; "": everybody."""

    url: str
    param: str = "messages"
    data: bytes | None = None
    owner: str = ""
    fault: str = ""


@dataclass(frozen=True, slots=True)
class DocumentPart:
    """A file that may hold text. `data` is its base64; `lead` what is said about it; `text` what was
    read in it, or `fault` why it could not be."""

    data: str
    media_type: str
    lead: str = ""
    param: str = "messages"
    text: str | None = None
    fault: str = ""


@dataclass(frozen=True, slots=True)
class OtherPart:
    """What no model here takes: audio, a file on another server, the work of a hosted tool."""

    kind: str
    param: str = "messages"


Part = TextPart | PicturePart | DocumentPart | OtherPart


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments` is the parsed object; text that is no JSON object stays a string."""

    id: str
    name: str
    arguments: Mapping[str, Any] | str


@dataclass(frozen=True, slots=True)
class Message:
    """checkpoint: the caller expects to send all up to the end of this message again. aside: a
    program's note that came along with tool results; it begins no turn of its own."""

    role: Role
    parts: tuple[Part, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str | None = None
    checkpoint: bool = False
    aside: bool = False

    @property
    def text(self) -> str:
        return "".join(p.text for p in self.parts if isinstance(p, TextPart))


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on the reply, or on a part of it. `kind` names the language of `text`.

    parts: grammars that a lark text refers to as @name; each keeps the request parameter it is from.
    """

    kind: Literal["json_object", "json_schema", "regex", "choice", "lark"]
    text: str = ""
    param: str = "response_format"
    parts: tuple[tuple[str, Grammar], ...] = ()


@dataclass(frozen=True, slots=True)
class Softened:
    """A JSON schema as far as a reply can be held to it; left_out: pointers to what was taken out."""

    schema: Mapping[str, Any]
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Tool:
    """param: where the request has it. grammar: of the one text that a free-form tool takes."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False
    param: str = "tools"
    grammar: Grammar | None = None


class ToolMode(Enum):
    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"
    NAMED = "named"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """allowed: names of the tools that may be called, of all that the prompt shows; None: any."""

    mode: ToolMode = ToolMode.AUTO
    name: str | None = None
    parallel: bool = True
    allowed: frozenset[str] | None = None

    def permits(self, tool: Tool) -> bool:
        """Whether the reply may call this tool."""
        if self.mode is ToolMode.NONE:
            return False
        if self.mode is ToolMode.NAMED:
            return tool.name == self.name
        return self.allowed is None or tool.name in self.allowed


# --- what is asked for ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation, to be rendered by the model's chat template."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    continues: bool = False
    """The last message is the assistant's, and the reply goes on where it ends."""

    @property
    def newest(self) -> int:
        """Which message a user has just written; -1 where a tool or the assistant spoke last."""
        for i in reversed(range(len(self.messages))):
            message = self.messages[i]
            if message.role == "system" or message.aside:
                continue
            follows_tool = i > 0 and self.messages[i - 1].role == "tool"
            return i if message.role == "user" and not follows_tool else -1
        return -1


@dataclass(frozen=True, slots=True)
class RawText:
    """add_special: with the tokens that begin a text of this model. parse_special: what spells a
    control token is that token."""

    text: str
    add_special: bool = True
    parse_special: bool = True


@dataclass(frozen=True, slots=True)
class RawTokens:
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Middle:
    """What is between two texts is to be written. The control tokens are the server's here: what the
    texts spell is text, unless parse_special says otherwise."""

    prefix: str
    suffix: str
    add_special: bool = True
    parse_special: bool = False


Source = Chat | RawText | RawTokens | Middle


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one row picks its tokens. temperature 0 is greedy; top_k 0 and top_p 1 are off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class CacheControl:
    """A request's own say about the prefix cache. ttl_s None: kept as long as there is room."""

    read: bool = True
    write: bool = True
    ttl_s: float | None = None


@dataclass(frozen=True, slots=True)
class Reasoning:
    """enabled None: as the model's template does it. budget_tokens None: unbounded."""

    enabled: bool | None = None
    effort: str | None = None
    budget_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Defaults:
    """What holds where a request says nothing: the model's own ways, and the server's flags."""

    sampling: Sampling = Sampling()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    thinking_budget: int | None = None

    def reasoning(self, given: Reasoning) -> Reasoning:
        if given.budget_tokens is not None or self.thinking_budget is None:
            return given
        return replace(given, budget_tokens=self.thinking_budget)

    def kwargs(self, given: Mapping[str, Any], reasoning: Reasoning) -> Mapping[str, Any]:
        """A request's template variables; those that it sets by other means are not set again."""
        said: set[str] = set()
        if reasoning.enabled is not None:
            said |= {"enable_thinking", "thinking"}
        if reasoning.effort is not None:
            said.add("reasoning_effort")
        kept = {name: value for name, value in self.template_kwargs.items() if name not in said}
        return {**kept, **given}


PLAIN_DEFAULTS = Defaults()
"""Of a server that says nothing about it."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One prompt, `n` replies. The one shape behind every API."""

    model: str
    source: Source
    sampling: Sampling = Sampling()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    top_logprobs: int | None = None
    """None: no logprobs; 0: of the chosen token alone; k: of the k likeliest too."""
    ignore_eos: bool = False
    echo: bool = False
    grammar: Grammar | None = None
    reasoning: Reasoning = Reasoning()
    cache: CacheControl = CacheControl()
    speculates: bool = True
    prediction: str = ""
    """What the caller expects to read, or parts of it."""
    sparse_keep: float | None = None
    """Of a long cold prompt only this share need be read; None: as the server does it."""


# --- what the engine is handed -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PictureSpan:
    """Positions [start, end) of the prompt stand for one picture with this content digest."""

    start: int
    end: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class PreparedPicture:
    """A picture that is ready to go into a prompt.

    text takes the place of the placeholder that the chat template has written; ids are the picture's
    own tokens, which the text becomes. inputs: what the model is given; opaque outside `models`.
    """

    digest: bytes
    text: str
    ids: TokenArray
    inputs: Any


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered prompt. `ids` is int64, one entry a token; it is never written to.

    `boundaries` are ascending positions where a message (or the tool list) ends: the points a
    later prompt is likely to share. A recurrent model's state is kept there. `hints` are those of
    them that the caller has asked for.
    """

    ids: TokenArray
    picture_spans: tuple[PictureSpan, ...] = ()
    boundaries: tuple[int, ...] = ()
    hints: tuple[int, ...] = ()
    pictures: tuple[Any, ...] = ()
    """Preprocessed pictures for the model, one for each span; opaque outside `models`."""
    whole_pictures: bool = False
    """A picture's tokens see each other: they are read in one piece, and nothing resumes inside."""
    notes: tuple[str, ...] = ()
    """What of the request is not in it as it was sent, for the log."""
    essential: tuple[tuple[int, int], ...] = ()
    """Ranges that are read whatever else is skipped: system prompt, tools, the newest message."""
    thinned: Thinned | None = None
    """Where it is what is left of a longer one."""

    def __len__(self) -> int:
        return int(self.ids.shape[0])

    @property
    def unbroken(self) -> tuple[tuple[int, int], ...]:
        """Ranges [start, end) that no prefill chunk and no resume point may cut."""
        return tuple((m.start, m.end) for m in self.picture_spans) if self.whole_pictures else ()

    @property
    def whole(self) -> Prompt:
        """With all that was skipped of it."""
        return self if self.thinned is None else self.thinned.whole

    @property
    def gap(self) -> int:
        """How far the positions behind it are ahead of how many tokens it has."""
        return 0 if self.thinned is None else int(self.thinned.positions[-1]) + 1 - len(self)

    def position(self, n_tokens: int) -> int:
        """Where in the whole prompt its first `n_tokens` end."""
        if self.thinned is None or not n_tokens:
            return n_tokens
        return int(self.thinned.positions[n_tokens - 1]) + 1

    def grown(self, reply: Sequence[int]) -> Prompt:
        """With these tokens behind it."""
        ids = np.concatenate([self.ids, np.array(reply, dtype=np.int64)])
        if self.thinned is None:
            return replace(self, ids=ids)
        end = int(self.thinned.positions[-1]) + 1
        more = np.arange(end, end + len(reply), dtype=np.int64)
        positions = np.concatenate([self.thinned.positions, more])
        return replace(self, ids=ids, thinned=replace(self.thinned, positions=positions))


@dataclass(frozen=True, slots=True)
class Thinned:
    """Which tokens of the whole prompt a thinned one has: one position for each, ascending.

    recipe: how they were chosen; a part of the root of what is stored, which no whole prompt finds.
    """

    positions: TokenArray
    whole: Prompt
    recipe: str


@dataclass(frozen=True, slots=True)
class Job:
    """One request as the engine sees it: tokens in, tokens out. max_tokens 0: the prompt is read,
    and that is all."""

    id: RequestId
    prompt: Prompt
    max_tokens: int
    sampling: Sampling = Sampling()
    n: int = 1
    eos: frozenset[int] = frozenset()
    top_logprobs: int | None = None
    prompt_logprobs: bool = False
    """Those of the prompt's tokens too: all of them are computed then, and nothing is reused."""
    namespace: Namespace = Namespace("")
    cache: CacheControl = CacheControl()
    grammar: Any = None
    """A compiled constraint (see `models.grammar`); opaque to the engine."""
    speculates: bool = True
    """Tokens may be guessed ahead of the model, which then says whether they are right."""
    prediction: tuple[int, ...] = ()
    """What the caller expects the reply to be, or to contain."""
    sparse: Sparse | None = None
    """None: every token of the prompt is read."""


# --- what the model is ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the rest of firn knows about the loaded model. Built complete, never changed."""

    name: str
    path: str
    architecture: str
    fingerprint: bytes
    context_length: int
    vocab_size: int
    dtype: str
    weights_nbytes: int
    layer_kinds: tuple[str, ...]
    batchable: bool
    unbatchable_why: str | None
    vision: bool = False
    whole_pictures: bool = False
    """A picture's tokens see each other: see Prompt."""
    generates: bool = True
    """False: it makes embeddings and nothing else."""
    created: int = 0
    n_embeddings: int = 0
    """Ids from here on must not be read. 0: as many as the vocabulary has."""

    @property
    def n_ids(self) -> int:
        """A prompt's ids are below this."""
        return self.n_embeddings or self.vocab_size


# --- what was used -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request. `n_cached` is a part of `n_prompt`."""

    n_prompt: int
    n_completion: int
    n_cached: int = 0
    n_reasoning: int = 0
    n_drafted: int = 0
    """Tokens that were guessed; n_accepted of them were right, and are a part of n_completion."""
    n_accepted: int = 0
    n_skipped: int = 0
    """Tokens of the prompt that were not read: the reply is approximate."""

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.n_prompt + other.n_prompt,
            self.n_completion + other.n_completion,
            self.n_cached + other.n_cached,
            self.n_reasoning + other.n_reasoning,
            self.n_drafted + other.n_drafted,
            self.n_accepted + other.n_accepted,
            self.n_skipped + other.n_skipped,
        )


# --- what is told of a request when it is over -----------------------------------------------


@dataclass(frozen=True, slots=True)
class Served:
    """A request that has ended, for a trace. at_s: when it arrived, as a Unix time. reply: the tokens of
    its first choice; n_reply: of all. tiers: tokens that were reused, by where they came from. first_s:
    until its first token, None where there was none."""

    at_s: float
    prompt: Prompt
    reply: Sequence[int]
    n_reply: int
    tiers: tuple[tuple[str, int], ...]
    first_s: float | None
    namespace: Namespace
