"""What every dialect owes the server. A new file in api/dialects/ is tested automatically."""

from __future__ import annotations

import asyncio
import copy
import json
import re
from collections.abc import Iterator
from contextlib import closing
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firn.api.calls.event_router import EventRouter
from firn.api.dialects import ApiCall, Dialect, JsonRoute, ReplyHead, RouteRequest, discover
from firn.api.http import sse
from firn.api.services import Services
from firn.core.errors import BadRequest, Cancelled, FirnError, InvalidValue, StepFailed
from firn.core.events import (
    ChoiceFinished,
    Ended,
    Event,
    Failed,
    FinishReason,
    Progress,
    ReasoningDelta,
    Resumed,
    Started,
    TextDelta,
    ToolCallDelta,
    ToolCallStarted,
)
from firn.core.fair_pool import FairPool
from firn.core.values import GenerateRequest, Namespace, Usage
from firn.text.prompt.maker import PromptMaker
from firn.text.reply.formats import PLAIN
from tests.fakes import FakeEngine, FakeTokenizer

HEAD = ReplyHead(id="1", model="fake", created=7)
NAMESPACE = Namespace("test")
DIALECTS = discover()

every_dialect = pytest.mark.parametrize("dialect", DIALECTS, ids=lambda d: d.path)


def decode(dialect: Dialect, **more: Any) -> ApiCall:
    return dialect.decode(dialect.schema()["example"] | more, namespace=NAMESPACE)


def streams() -> st.SearchStrategy[list[Event]]:
    """Legal streams of one choice: thinking, then text and calls, then the end."""
    thinking = st.lists(st.builds(ReasoningDelta, st.just(0), st.text(min_size=1)))
    text = st.lists(st.builds(TextDelta, st.just(0), st.text(min_size=1)))
    progress = st.lists(st.builds(Progress, st.integers(0, 9), st.just(10)))
    resumed = st.lists(st.builds(Resumed, st.integers(0, 9)), max_size=1)

    def call(index: int) -> st.SearchStrategy[list[Event]]:
        start = ToolCallStarted(0, index, f"call_{index}", "look")
        pieces = st.lists(st.builds(ToolCallDelta, st.just(0), st.just(index), st.text()))
        return pieces.map(lambda found: [start, *found])

    calls = st.integers(0, 2).flatmap(lambda n: st.tuples(*(call(i) for i in range(n))))

    def build(parts: tuple[Any, ...]) -> list[Event]:
        found, before, thoughts, said, called = parts
        reason: FinishReason = "tool_calls" if called else "stop"
        return [
            Started(10),
            *found,
            *before,
            *thoughts,
            *said,
            *(event for one in called for event in one),
            ChoiceFinished(0, reason),
            Ended(Usage(10, 5)),
        ]

    return st.tuples(resumed, progress, thinking, text, calls).map(build)


def test_each_has_its_own_path() -> None:
    paths = [dialect.path for dialect in DIALECTS]
    assert "/v1/chat/completions" in paths
    assert "/v1/completions" in paths
    assert len(set(paths)) == len(paths)
    assert all(path.startswith(("/v1/", "/api/")) for path in paths)


@every_dialect
def test_the_schema_has_an_example_that_decodes(dialect: Dialect) -> None:
    schema = dialect.schema()
    json.dumps(schema)
    call = dialect.decode(schema["example"], namespace=NAMESPACE)
    assert call.requests
    assert all(isinstance(request, GenerateRequest) for request in call.requests)
    assert not call.stream
    assert call.ignored == ()
    assert set(schema["required"]) <= set(schema["properties"])


@every_dialect
def test_stream_and_unknown_fields(dialect: Dialect) -> None:
    call = decode(dialect, stream=True, surely_unknown=1)
    assert call.stream
    assert call.ignored == ("surely_unknown",)


@every_dialect
def test_missing_fields_are_named(dialect: Dialect) -> None:
    for name in dialect.schema()["required"]:
        body = {k: v for k, v in dialect.schema()["example"].items() if k != name}
        with pytest.raises(InvalidValue) as caught:
            dialect.decode(body, namespace=NAMESPACE)
        assert caught.value.param == name


NUMBERS = (2**31, 2**64, -(2**70), 10**400, 1e308, float("inf"), float("nan"))
WORDS = ("user", "function", "text", "image_url", "json_schema", "required")
KEYS = ("role", "content", "type", "function", "name", "text", "url", "5")
JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.sampled_from(NUMBERS)
    | st.floats()
    | st.text(max_size=3)
    | st.sampled_from(WORDS),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=3)
    ),
    max_leaves=8,
)
PLAIN_JUNK = (
    None,
    True,
    False,
    *range(-3, 4),
    0.5,
    -0.0,
    "",
    "ab",
    "\x00",
    "\ud800",
    *NUMBERS,
    *WORDS,
)


@every_dialect
def test_every_kind_of_junk_in_every_field(dialect: Dialect) -> None:
    """Each value alone, in a list, and under each key; every fifth also in a list of objects."""
    for name in dialect.schema()["properties"]:
        for value in (*PLAIN_JUNK, [], {}, [[]], [{}]):
            for junk in (value, [value], *({key: value} for key in KEYS)):
                check_junk(dialect, {name: junk})
        for value in PLAIN_JUNK[::5]:
            for key in KEYS:
                check_junk(dialect, {name: [{key: value}]})


@every_dialect
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_junk_in_any_field_is_a_bad_request_at_worst(dialect: Dialect, data: st.DataObject) -> None:
    """Several fields together, nested deeper. The test above covers each field alone."""
    names = data.draw(st.sets(st.sampled_from(sorted(dialect.schema()["properties"])), max_size=4))
    check_junk(dialect, {name: data.draw(JUNK, label=name) for name in sorted(names)})


@cache
def example_of(dialect: Dialect) -> dict[str, Any]:
    """Cached, since making a schema takes longer than refusing a body."""
    example: dict[str, Any] = dialect.schema()["example"]
    return example


def check_junk(dialect: Dialect, junk: dict[str, Any]) -> None:
    body = copy.deepcopy(example_of(dialect)) | junk
    refusal = None
    try:
        assert isinstance(dialect.decode(body, namespace=NAMESPACE).requests, tuple)
    except BadRequest as error:
        refusal = error
    if refusal is not None:
        assert json.dumps(dialect.render_error(refusal))
        assert refusal.param is None or refusal.param.split(".")[0].split("[")[0] in body


@every_dialect
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_frames_do_not_depend_on_how_events_are_batched(
    dialect: Dialect, data: st.DataObject
) -> None:
    events = data.draw(streams())
    call = decode(dialect, stream=True)
    whole = _timeless(call.encoder(HEAD).feed(events))
    encoder, pieces, at = call.encoder(HEAD), [], 0
    while at < len(events):
        n = data.draw(st.integers(1, 4))
        pieces.append(encoder.feed(events[at : at + n]))
        at += n
    assert _timeless(b"".join(pieces)) == whole
    assert_frames(dialect, whole)


@every_dialect
@settings(max_examples=50, deadline=None)
@given(events=streams())
def test_a_fold_holds_all_that_was_said(dialect: Dialect, events: list[Event]) -> None:
    folded = json.dumps(decode(dialect).fold(HEAD, events), ensure_ascii=False)
    said = "".join(event.text for event in events if isinstance(event, TextDelta))
    assert json.dumps(said, ensure_ascii=False)[1:-1] in folded
    assert '"fake"' in folded


@every_dialect
@settings(max_examples=50, deadline=None)
@given(events=streams())
def test_whole_and_streamed_hold_the_same_text(dialect: Dialect, events: list[Event]) -> None:
    """Each piece of the text is in one frame, in order; the whole text is in the folded reply."""
    numbered = [part for i, event in enumerate(events) for part in in_two(event, i)]
    said = [event.text for event in numbered if isinstance(event, TextDelta)]
    frames = decode(dialect, stream=True).encoder(HEAD).feed(numbered)
    assert [text for text in sent_strings(frames) if text in said] == said
    assert said or b'"text_delta"' not in frames
    folded = list(strings_in(decode(dialect).fold(HEAD, numbered)))
    # In completions the text of calls follows.
    assert not said or ["".join(said) in text for text in folded].count(True) == 1


def in_two(event: Event, i: int) -> list[Event]:
    """A text as two pieces that are like no other string; other events as they are. A stream may
    end with the whole text, which is then no piece."""
    if not isinstance(event, TextDelta):
        return [event]
    return [TextDelta(0, f"\u2039{i}{event.text}"), TextDelta(0, f"{i}\u203a")]


def sent_strings(raw: bytes) -> Iterator[str]:
    """Every string in the frames' data, in order."""
    for line in raw.decode("ascii").splitlines():
        data = line.removeprefix("data: ")
        if data.startswith("{"):
            yield from strings_in(json.loads(data))


def strings_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from strings_in(inner)


@every_dialect
def test_a_client_that_has_gone_is_no_fault(dialect: Dialect) -> None:
    encoder = decode(dialect, stream=True).encoder(HEAD)
    encoder.feed([Started(10), Resumed(0), TextDelta(0, "a")])
    assert_frames(dialect, encoder.feed([Failed(Cancelled())]))


@every_dialect
def test_further_routes_lie_below_its_path(dialect: Dialect, services: Services) -> None:
    extras = dialect.routes(services)
    assert len({(extra.method, extra.path) for extra in extras}) == len(extras)
    for extra in extras:
        assert extra.path.startswith(f"{dialect.path}/")
        assert extra.summary
        assert extra.schema is None or extra.method == "POST"
        if extra.schema is not None:
            json.dumps(extra.schema)
            asked = RouteRequest(NAMESPACE, body=extra.schema["example"])
            assert json.dumps(asyncio.run(_answer(extra, asked)))


async def _answer(extra: JsonRoute, asked: RouteRequest) -> Any:
    return await extra.answer(asked)


@pytest.fixture(scope="module")
def services() -> Iterator[Services]:
    tokenizer, event_router = FakeTokenizer(), EventRouter()
    engine = FakeEngine(
        event_router.publish,
        lambda job, choice: tokenizer.encode("a", add_special=False),
        vocab_size=tokenizer.vocab_size,
    )
    with closing(FairPool(1, name="pool")) as pool:
        yield Services(
            engine=engine,
            tokenizer=tokenizer,
            prompts=PromptMaker(tokenizer, context_length=4096),
            reply_format=PLAIN,
            event_router=event_router,
            pool=pool,
        )
    engine.stop()


@every_dialect
def test_silence_is_harmless(dialect: Dialect) -> None:
    encoder = decode(dialect, stream=True).encoder(HEAD)
    before = encoder.feed([Started(10)])
    silence = encoder.feed([])
    assert silence
    assert_frames(dialect, before + silence)
    rest: list[Event] = [TextDelta(0, "a"), ChoiceFinished(0, "stop"), Ended(Usage(1, 1))]
    other = decode(dialect, stream=True).encoder(HEAD)
    assert other.feed([Started(10)]) == before
    assert _timeless(other.feed(rest)) == _timeless(encoder.feed(rest))


@every_dialect
@pytest.mark.parametrize("error", [StepFailed("it broke"), InvalidValue("n", "no")])
def test_errors_say_what_happened(dialect: Dialect, error: FirnError) -> None:
    shown = json.dumps(dialect.render_error(error))
    assert error.message in shown
    encoder = decode(dialect, stream=True).encoder(HEAD)
    frames = encoder.feed([Started(10), TextDelta(0, "a"), Failed(error)])
    assert_frames(dialect, frames)
    assert error.message.encode() in frames
    assert b"[DONE]" not in frames


def _timeless(raw: bytes) -> bytes:
    """Zero the durations that Ollama's streams end with."""
    return re.sub(rb'"(\w+_duration)": \d+', rb'"\1": 0', raw)


def assert_frames(dialect: Dialect, raw: bytes) -> None:
    """Frames end with an empty line, and each line is a comment, an event name or data. In streams
    that are not server-sent events, each line is a JSON object."""
    text = raw.decode("ascii")
    if dialect.stream_headers is not sse.HEADERS:
        assert not text or text.endswith("\n")
        assert all(isinstance(json.loads(line), dict) for line in text.splitlines())
        return
    assert not text or text.endswith("\n\n")
    for line in text.split("\n"):
        assert line == "" or line.startswith((":", "event: ", "data: ")), line
