"""The seams. Each is a few methods, and each has a second, trivial implementation in the tests.

Values cross these boundaries; stateful objects do not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from firn.core.errors import FirnError
from firn.core.events import Admitted, EngineEvent, TokenLogprob
from firn.core.values import (
    CacheControl,
    Job,
    ModelInfo,
    Namespace,
    PicturePart,
    PreparedPicture,
    Prompt,
    RequestId,
    Scores,
    Served,
)

Delivery = tuple[RequestId, EngineEvent]
Publish = Callable[[Sequence[Delivery]], None]
"""Called by the engine thread once a step with all that happened in it, in order."""


class Tokenizer(Protocol):
    """Text to ids and back, and the model's chat template. Thread-safe."""

    @property
    def eos(self) -> frozenset[int]: ...

    @property
    def special(self) -> frozenset[int]:
        """Ids of control tokens: never part of what a user reads."""
        ...

    @property
    def added_tokens(self) -> Mapping[str, int]:
        """Texts that are a token wherever they stand, with their ids: control tokens and others."""
        ...

    @property
    def max_token_chars(self) -> int:
        """No token stands for more characters than this."""
        ...

    @property
    def chat_template(self) -> str | None:
        """The template's source, or None where the model has none."""
        ...

    def encode(
        self, text: str, *, add_special: bool, typed: Sequence[tuple[int, int]] = ()
    ) -> list[int]:
        """`typed`: ascending ranges of characters that spell an added token, and are text."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Exact: leading spaces and special tokens are kept, broken UTF-8 becomes U+FFFD."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The bytes one token stands for, also where they are no whole character."""
        ...

    def token_id(self, text: str) -> int | None:
        """The id of the one token that is exactly this text, if there is one."""
        ...

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        kwargs: Mapping[str, Any],
    ) -> str:
        """The chat template's text with the generation prompt; raises TemplateFailed.

        `kwargs` may override add_generation_prompt.
        """
        ...


class Pictures(Protocol):
    """Pictures for prompts. Thread-safe."""

    @property
    def placeholder(self) -> str:
        """What stands for a picture in the text that the chat template makes."""
        ...

    @property
    def inline(self) -> bool:
        """The chat template knows no pictures: the placeholder is written into the message's text."""
        ...

    @property
    def whole(self) -> bool:
        """A picture's tokens see each other, so they are read in one piece."""
        ...

    def prepare(self, part: PicturePart) -> PreparedPicture:
        """Decode and preprocess one picture. Raises BadPicture."""
        ...


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """A snapshot for /ready, /health and /metrics; safe to read from any thread."""

    alive: bool
    last_step_age_s: float
    n_waiting: int
    n_prefilling: int
    n_decoding: int


class Engine(Protocol):
    """Runs jobs. Every method may be called from any thread and returns at once."""

    @property
    def model(self) -> ModelInfo: ...

    def submit(self, job: Job) -> None:
        """Queue a job; its events come through Publish. Raises QueueFull, ShuttingDown, EngineDead."""
        ...

    def cancel(self, request: RequestId) -> None:
        """Forget the job: no further events. Unknown ids are ignored."""
        ...

    def stop_choice(self, request: RequestId, choice: int) -> None:
        """Generate no more for this choice (a stop string matched); the others go on.

        No ChoiceDone follows for it; JobDone comes when all choices are done or stopped.
        """
        ...

    def force(self, request: RequestId, choice: int, tokens: Sequence[int], *, at: int) -> None:
        """Let the reply go on with these tokens from its position `at` on, as if they were picked.

        What has been picked already stands: they come at the next position then. A later call takes
        the place of an earlier one that has not begun; no tokens at all withdraw it.
        """
        ...

    def health(self) -> EngineHealth: ...


class Recorder(Protocol):
    """Keeps a trace of what was served."""

    def record(self, served: Served) -> None:
        """Returns at once; may be called from any thread."""
        ...


# --- what the engine thread drives ---------------------------------------------------------


class LiveRow(Protocol):
    """One sequence's state on the device, opaque to the engine but for its length."""

    @property
    def n_tokens(self) -> int:
        """Tokens consumed, decode steps in flight included."""
        ...

    @property
    def live_layers(self) -> list[Any]:
        """The layer caches that hold this row: its own, or those of its decode group."""
        ...

    @property
    def index(self) -> int:
        """Which row of the live layers it is."""
        ...

    @property
    def is_live(self) -> bool:
        """It has not left: its layers can be read."""
        ...


@dataclass(frozen=True, slots=True)
class Restored:
    """State for a new row: `fill` writes the first `n_tokens` tokens into empty layer caches."""

    n_tokens: int
    fill: Callable[[list[Any]], None]
    nbytes: int = 0
    """Of the records that are copied for it."""
    filled: Callable[[LiveRow], None] = lambda row: None
    """To be told of the row that was made of these layers."""


class Picked(Protocol):
    """A row's newest token."""

    @property
    def row(self) -> Any: ...

    @property
    def token(self) -> int: ...

    @property
    def logprob(self) -> TokenLogprob | None: ...

    @property
    def fault(self) -> FirnError | None:
        """Why this row cannot go on, where it cannot; the others of its group can."""
        ...

    @property
    def n_drafted(self) -> int:
        """Guesses of the step that this token ends, where there were any."""
        ...

    @property
    def n_accepted(self) -> int:
        """How many of them were right."""
        ...


class Runner(Protocol):
    """Runs the model. Engine thread only."""

    @property
    def info(self) -> ModelInfo: ...

    def start(self, restored: Restored | None) -> Any:
        """A new row, empty or with a restored past."""
        ...

    def prefill(
        self, row: Any, prompt: Prompt, end: int, *, top_logprobs: int | None = None
    ) -> None:
        """Dispatch prompt tokens [row.n_tokens, end); `settle` awaits them.

        top_logprobs: tell, too, how likely the tokens [row.n_tokens + 1, end + 1) are, and so many
        of the likeliest beside each.
        """
        ...

    @property
    def reads_together(self) -> bool:
        """Whether `prefill_together` can be used."""
        ...

    def prefill_together(
        self, rows: Sequence[Any], prompts: Sequence[Prompt], ends: Sequence[int]
    ) -> None:
        """Dispatch the tokens [row.n_tokens, end) of several prompts, padded, in one pass.

        A fault before the device has begun leaves the rows as they were.
        """
        ...

    def settle(self, row: Any) -> Sequence[TokenLogprob]:
        """Wait for what was dispatched; the logprobs that were asked for."""
        ...

    def choices(self, row: Any, job: Job, indices: Sequence[int]) -> list[Any]:
        """One row for each choice, all with this row's past, each with its own sampler."""
        ...

    def join(self, row: Any, token: int, *, n_coming: int = 0) -> None:
        """Take part in decode steps, starting by consuming `token`. `n_coming` more are to follow."""
        ...

    def resume(self, row: Any, reply: Sequence[int], *, alone: bool = True) -> None:
        """The row was read again: go on behind this reply, after a fault in a group of its own."""
        ...

    def force(self, row: Any, tokens: Sequence[int], *, at: int) -> None:
        """The row's tokens from position `at` on are these, whatever it would pick.

        # [0, n_tokens) consumed   [n_tokens] picked   at > n_tokens
        """
        ...

    def leave(self, rows: Sequence[Any]) -> None:
        """Drop rows, wherever they are; the others are not disturbed."""
        ...

    def groups(self) -> list[list[Any]]:
        """The decoding rows, by the groups that step and fail together."""
        ...

    def launch(self, rows: Sequence[Any]) -> None:
        """Dispatch one decode step of a group."""
        ...

    def collect(self, rows: Sequence[Any], *, keep_in_flight: int) -> Sequence[Picked]:
        """Read the tokens of a group's dispatched steps, but for the newest `keep_in_flight`.

        In order; a row may have several.
        """
        ...

    def confirm(self) -> None:
        """Wait for all that was dispatched; raises what the device has to say of any of it."""
        ...

    def live_nbytes(self) -> int:
        """Device memory that the decoding rows' caches take."""
        ...

    @property
    def chunk_peak_nbytes(self) -> int:
        """What the chunk settled last took while it ran, beyond what it left; 0: an earlier peak was
        higher, and nobody knows."""
        ...

    def close(self) -> None:
        """The thread ends: wait for the device and give back what belongs to the thread."""
        ...


class Trail(Protocol):
    """One sequence's way through the prefix cache."""

    @property
    def found(self) -> Admitted:
        """What the cache has done for its prompt so far."""
        ...

    @property
    def n_near(self) -> int:
        """Tokens of its prompt that need no computing if nothing fails, those on their way included."""
        ...

    @property
    def racing(self) -> bool:
        """Something is being read that would let it skip a part of its prompt."""
        ...

    def waits(self, *, busy: bool) -> bool:
        """Whether that will come so soon that no chunk should be begun. busy: others decode."""
        ...

    def wants(self, n_tokens: int) -> bool:
        """Whether a commit is due once the row holds this many tokens."""
        ...


class Load(Enum):
    """What the engine is at, besides upkeep."""

    NONE = 0
    DECODING = 1
    PREFILLING = 2
    """Somebody waits for a first token, and nobody for a next one."""
    BOTH = 3

    @property
    def prefilling(self) -> bool:
        return self in (Load.PREFILLING, Load.BOTH)


class PrefixCache(Protocol):
    """The prefix cache as the engine sees it. Engine thread only.

    It never raises and never changes an answer: any fault inside is a counted miss.
    """

    def open(self, prompt: Prompt, namespace: Namespace, control: CacheControl) -> Trail:
        """Find what is stored of the prompt and start to load it. No I/O on this thread."""
        ...

    def restore(self, trail: Any) -> Restored | None:
        """What can be had at once, ready to be copied into a new row; None for nothing."""
        ...

    def advance(self, trail: Any, n_tokens: int) -> Restored | None:
        """A longer prefix than these tokens, if one was loaded, or computed by a neighbour, since."""
        ...

    def stops(self, trail: Any) -> Sequence[int]:
        """Ascending positions where a prefill chunk should end so that state can be kept there."""
        ...

    def commit(self, trail: Any, row: LiveRow) -> None:
        """Store what the row has finished since the last commit."""
        ...

    def fork(self, trail: Any, reply: Sequence[int]) -> Trail:
        """A choice's own trail from here on; `reply` is its token list, which will grow."""
        ...

    def close_trail(self, trail: Any, row: LiveRow | None) -> None:
        """The sequence ends: store its tail if the row is given, release what was held. Idempotent."""
        ...

    def blank(self) -> Trail:
        """A trail that neither reads nor writes."""
        ...

    def confirm(self) -> None:
        """The device had no fault in what was committed so far: let it be written below.

        From the first call on, nothing is written before the next.
        """
        ...

    def doubt(self) -> None:
        """Forget what was committed since the last confirmation, wherever it is."""
        ...

    def set_room(self, nbytes: int) -> None:
        """Live requests leave this many bytes of device memory for records: stay under that."""
        ...

    def tick(self, load: Load) -> None:
        """Between two steps: take in what was read, write behind. Less of it under load."""
        ...

    @property
    def settled(self) -> bool:
        """Whether a tick without requests has nothing more to do."""
        ...

    def saw_prefill(self, start: int, end: int, seconds: float) -> None:
        """Prompt tokens [start, end) took so long to compute."""
        ...

    def saw_restore(self, restored: Restored, seconds: float) -> None:
        """A row was filled with this; reading it is not in the time."""
        ...

    def close(self) -> None: ...


class Scorer(Protocol):
    """Says which tokens of a prompt matter, in slices. Engine thread only."""

    @property
    def recipe(self) -> str:
        """Who scores, and how: a part of the root of whatever is read by it."""
        ...

    @property
    def max_tokens(self) -> int:
        """Of a prompt that it can score."""
        ...

    def open(self, prompt: Prompt, namespace: Namespace, control: CacheControl) -> Any:
        """Begin to read a prompt."""
        ...

    def read(self, reading: Any, n_tokens: int, *, alone: bool = False) -> None:
        """Dispatch the next slice, in chunks of so many tokens; `settle` awaits it.

        alone: nobody else waits; it may be a longer one.
        """
        ...

    def settle(self, reading: Any) -> bool:
        """Wait for what was dispatched; whether that was all."""
        ...

    def n_left(self, reading: Any) -> int:
        """Tokens yet to be read or said."""
        ...

    def scores(self, reading: Any) -> Scores:
        """One for each token of the prompt, once all is read."""
        ...

    def close_reading(self, reading: Any) -> None:
        """It is over, or given up. Idempotent."""
        ...

    def close(self) -> None: ...


class Embedder(Protocol):
    """Texts as vectors, from any thread; computed between the engine's steps."""

    @property
    def n_dims(self) -> int: ...

    @property
    def max_tokens(self) -> int:
        """Of one text."""
        ...

    def embed(
        self, texts: Sequence[Sequence[int]], *, n_dims: int | None = None
    ) -> Future[list[list[float]]]:
        """One vector for each list of tokens, none of which is empty; cut to its first `n_dims`."""
        ...


class InSlices(Protocol):
    """A question that is answered a slice at a time, so that no step of the engine waits for it."""

    def step(self) -> Future[bool]:
        """The next slice; whether it was the last. Raises NotFound."""
        ...

    def answer(self) -> dict[str, Any]:
        """Once there are no more. Takes a while: not for the asyncio thread."""
        ...


class CacheAdmin(Protocol):
    """Questions about the prefix cache, from any thread. Each future holds a plain JSON object.

    `node`: a block's key in hexadecimal digits, as `browse` tells it. Of others' nodes, where a
    namespace is given, nobody learns whether there are any.
    """

    def stats(self, namespace: Namespace | None) -> Future[dict[str, Any]]:
        """Of everything, or of one namespace alone."""
        ...

    def probe(self, prompt: Prompt, namespace: Namespace) -> Future[dict[str, Any]]: ...

    def pin(self, prompt: Prompt, namespace: Namespace) -> Future[dict[str, Any]]: ...

    def unpin(self, prompt: Prompt, namespace: Namespace) -> Future[dict[str, Any]]: ...

    def clear(self, namespace: Namespace | None) -> Future[dict[str, Any]]: ...

    def browse(
        self, namespace: Namespace | None, node: str | None, *, limit: int, with_tokens: bool
    ) -> InSlices:
        """The tree, in at most `limit` runs of blocks, from the top or from a node on."""
        ...

    def node(self, namespace: Namespace | None, node: str) -> Future[dict[str, Any]]:
        """What the prefix that ends there takes and saves."""
        ...

    def pin_node(self, namespace: Namespace | None, node: str) -> Future[dict[str, Any]]: ...

    def unpin_node(self, namespace: Namespace | None, node: str) -> Future[dict[str, Any]]:
        """What is pinned there or below."""
        ...

    def forget_node(self, namespace: Namespace | None, node: str) -> InSlices:
        """The run with this node and all below, but for what is pinned or in use."""
        ...
