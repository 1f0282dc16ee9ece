"""Counting the values of a JSON text without parsing it agrees with the parser."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from firn.api.http import json_bounds
from firn.api.http.body import INLINE_NBYTES, decoded, parse_object
from firn.api.http.json_bounds import TooManyValues, check
from firn.core.errors import BadRequest
from firn.core.values import Defaults, Reasoning
from tests.api.live import Live, serve

texts = st.text(alphabet='ab"\\[]{},:\n \u00fc\u20ac')
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | texts,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(texts, inner, max_size=5),
    max_leaves=40,
)


def count(value: Any) -> tuple[int, int, int]:
    """Containers, members of objects, and commas between values."""
    if not isinstance(value, list | dict):
        return 0, 0, 0
    inner = list(value.values()) if isinstance(value, dict) else value
    n_containers, n_members = 1, len(value) if isinstance(value, dict) else 0
    n_commas = max(len(value) - 1, 0)
    for each in inner:
        more = count(each)
        n_containers, n_members = n_containers + more[0], n_members + more[1]
        n_commas += more[2]
    return n_containers, n_members, n_commas


@given(json_values, st.integers(1, 7), st.booleans())
def test_the_count_agrees_with_the_parser_at_any_cut(value: Any, piece: int, spaced: bool) -> None:
    """Wherever the text is cut into pieces, and whatever its strings contain."""
    raw = json.dumps(value, indent=1 if spaced else None, ensure_ascii=False).encode()
    check_count(raw, piece)


def check_count(raw: bytes, piece: int) -> None:
    """The limits that allow exactly this text let it pass; any lower limit refuses it."""
    n_containers, n_members, n_commas = count(json.loads(raw))
    wanted = {
        "MAX_CONTAINERS": n_containers,
        "MAX_NAMES": n_members,
        "MAX_VALUES": n_containers + n_commas,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_bounds, "PIECE_NBYTES", piece)
        for name, n in wanted.items():
            patch.setattr(json_bounds, name, n)
        json_bounds._check_outside_strings(raw)
        for name, n in wanted.items():
            patch.setattr(json_bounds, name, n - 1)
            with pytest.raises(TooManyValues):
                json_bounds._check_outside_strings(raw)
            patch.setattr(json_bounds, name, n)


@pytest.mark.parametrize("piece", range(1, 6))
def test_backslashes_may_be_cut_anywhere(piece: int) -> None:
    """A run of every length up to three pieces, from every offset; then a quote, escaped or not."""
    for offset, n_slashes in itertools.product(range(piece), range(3 * piece)):
        for quote in ("", '"'):
            text = "a" * offset + "\\" * n_slashes + quote + ",[{:"
            check_count(json.dumps([text, [{"b": text}]]).encode(), piece)


def test_the_memory_for_counting_does_not_grow_with_a_run_of_backslashes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(json_bounds, "PIECE_NBYTES", 1024)
    monkeypatch.setattr(json_bounds, "MAX_CONTAINERS", 0)
    raw = b'"[' + b"\\" * (1 << 18) + b'"'
    tracemalloc.start()
    try:
        check(raw)
        _, peak_nbytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_nbytes < len(raw) // 2


@given(st.lists(st.sampled_from([b'"', b"\\", b"[", b"\xff"]) | st.binary()), st.integers(1, 4))
def test_any_bytes_raise_nothing_but_too_much(parts: list[bytes], piece: int) -> None:
    raw = b"".join(parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_bounds, "PIECE_NBYTES", piece)
        json_bounds._check_outside_strings(raw)  # far below the limits: it reads every piece
        patch.setattr(json_bounds, "MAX_CONTAINERS", 0)
        with contextlib.suppress(TooManyValues):
            check(raw)


def repeated(item: bytes, n: int) -> bytes:
    return b'{"a": [' + b",".join([item] * n) + b"]}"


@pytest.mark.parametrize(
    ("raw", "what"),
    [
        (repeated(b"[]", 200_000), "arrays and objects"),
        (repeated(b"{}", 200_000), "arrays and objects"),
        (repeated(b"1", 1_100_000), "values"),
        (json.dumps({f"k{i}": i for i in range(210_000)}).encode(), "members"),
    ],
)
def test_a_body_with_too_many_values_is_not_parsed(
    raw: bytes, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json, "loads", lambda text: pytest.fail("it was parsed"))
    with pytest.raises(BadRequest, match=what):
        parse_object(raw)


def test_brackets_inside_strings_do_not_count() -> None:
    code = {"text": '{"a": [1, 2]},\\ ' * 100_000, "ids": list(range(100_000))}
    assert parse_object(json.dumps(code).encode()) == code


# --- where it is done ----------------------------------------------------------------------


@pytest.mark.parametrize("n", [10, INLINE_NBYTES])
def test_large_bodies_leave_the_event_loop_alone(n: int) -> None:
    import asyncio

    async def threads() -> tuple[str, str]:
        with ThreadPoolExecutor(1, thread_name_prefix="pool") as pool:
            raw = json.dumps({"a": "x" * n}).encode()
            where = await decoded(raw, pool, lambda body: threading.current_thread().name)
            return where, threading.current_thread().name

    where, loop_thread = asyncio.run(threads())
    assert (where == loop_thread) == (n < INLINE_NBYTES)


class ThreadNames(Defaults):
    """Remembers which threads decode bodies."""

    names: ClassVar[set[str]] = set()

    def reasoning(self, given: Reasoning) -> Reasoning:
        self.names.add(threading.current_thread().name)
        return super().reasoning(given)


@pytest.mark.parametrize(
    "path",
    ["/v1/responses", "/v1/responses/input_tokens", "/v1/messages/count_tokens", "/v1/tokenize"],
)
def test_what_may_refer_to_much_or_be_large_leaves_the_event_loop_alone(path: str) -> None:
    ThreadNames.names.clear()
    messages = [{"role": "user", "content": "a"}]
    chat: dict[str, Any] = {"model": "m", "messages": messages, "max_tokens": 1}
    response: dict[str, Any] = {"model": "m", "input": "a", "max_output_tokens": 1}
    body = response if "responses" in path else chat
    with serve(defaults=ThreadNames(), model_aliases=frozenset({"m"})) as live:
        httpx.post(live.url + path, json=body, timeout=60).raise_for_status()
    assert ThreadNames.names
    assert "uvicorn" not in ThreadNames.names  # the event loop's thread


def test_a_wall_of_brackets_is_refused(live: Live) -> None:
    raw = b'{"prompt": ' + b"[" + b",".join([b"[]"] * (5 << 20)) + b"]}"
    headers = {"content-type": "application/json"}
    answer = httpx.post(f"{live.url}/v1/completions", content=raw, headers=headers)
    assert answer.status_code == 400
    assert "arrays and objects" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/tokenize", {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
@pytest.mark.parametrize(
    "more",
    [
        {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
        {"chat_template": "{{ 1 }}"},
        {"chat_template_kwargs": {"x": "y" * 100_000}},
    ],
)
def test_a_request_cannot_bring_a_template(
    live: Live, path: str, body: dict[str, Any], more: dict[str, Any]
) -> None:
    answer = httpx.post(f"{live.url}{path}", json={**body, **more})
    assert answer.status_code == 400
    assert "chat_template" in answer.json()["error"]["param"]
