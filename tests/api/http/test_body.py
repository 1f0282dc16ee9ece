from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firn.api.http.body import ClientGone, check_content_type, parse, parse_object, read_body
from firn.core.errors import BadRequest, BodyTooLarge


def read(messages: list[dict[str, Any]], *, limit: int, length: int | None = None) -> bytes:
    left = iter(messages)

    async def receive() -> dict[str, Any]:
        return next(left)

    headers = [] if length is None else [(b"content-length", str(length).encode())]
    return asyncio.run(read_body(headers, receive, limit_nbytes=limit))


def piece(body: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


def test_pieces_are_joined() -> None:
    assert read([piece(b"ab"), piece(b""), piece(b"cd", more=False)], limit=4) == b"abcd"


def test_a_declared_length_is_refused_before_reading() -> None:
    with pytest.raises(BodyTooLarge):
        read([], limit=4, length=5)


def test_an_undeclared_length_is_counted() -> None:
    with pytest.raises(BodyTooLarge):
        read([piece(b"abc"), piece(b"de")], limit=4)


def test_a_client_may_hang_up_while_sending() -> None:
    with pytest.raises(ClientGone):
        read([piece(b"abc"), {"type": "http.disconnect"}], limit=4)


@pytest.mark.parametrize(
    "given_type", [b"application/json", b"Application/JSON; charset=utf-8", b"application/x+json"]
)
def test_json_content_types_are_accepted(given_type: bytes) -> None:
    check_content_type([(b"host", b"x"), (b"content-type", given_type)])


OTHER_TYPES: list[list[tuple[bytes, bytes]]] = [
    [],
    *(
        [(b"content-type", given)]
        for given in (
            b"",
            b"text/plain",
            b"application/x-www-form-urlencoded",
            b"multipart/form-data",
        )
    ),
]


@pytest.mark.parametrize("given", OTHER_TYPES)
@pytest.mark.parametrize(
    "sign",
    [
        (b"origin", b"http://evil.example"),
        (b"origin", b"null"),
        (b"sec-fetch-site", b"cross-site"),
        (b"sec-fetch-mode", b"no-cors"),
    ],
)
def test_a_web_page_has_to_declare_json(
    given: list[tuple[bytes, bytes]], sign: tuple[bytes, bytes]
) -> None:
    check_content_type([(b"content-type", b"application/json"), sign])
    with pytest.raises(BadRequest, match="web page"):
        check_content_type([*given, sign])


@pytest.mark.parametrize("given", OTHER_TYPES)
def test_other_programs_need_no_content_type(given: list[tuple[bytes, bytes]]) -> None:
    check_content_type(given)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"null",
        b"7",
        b"\xff\xfe{}",
        b'{"a": "\xc3"}',
        b'{"a": "\\ud800"}',
        b'{"\\udfff": 1}',
        b'{"a": ' + b"9" * 5000 + b"}",
        b'{"a": ' + b"[" * 101 + b"]" * 101 + b"}",
        b'{"a": ' + b'{"a":' * 101 + b"1" + b"}" * 101 + b"}",
        b"[" * 200_000,
        b'{"a": ' * 200_000,
        b"{} {}",
        b"{'a': 1}",
    ],
    ids=lambda raw: repr(raw[:24]),
)
def test_bodies_that_are_not_json_objects_are_refused(raw: bytes) -> None:
    with pytest.raises(BadRequest):
        parse_object(raw)


def test_compressed_bodies_are_refused_as_such() -> None:
    json_type = (b"content-type", b"application/json")
    check_content_type([json_type, (b"content-encoding", b"identity")])
    for encoding in (b"gzip", b"zstd", b"GZIP"):
        with pytest.raises(BadRequest, match="compressed"):
            check_content_type([json_type, (b"content-encoding", encoding)])


def test_json_objects_are_accepted() -> None:
    assert parse_object(b'\xef\xbb\xbf{"a": 1}') == {"a": 1}
    assert parse_object(b'{"a": "\\ud83d\\ude00"}') == {"a": "\U0001f600"}
    wide = {"a": [[1], [2]] * 1000, "b": list(range(1000))}
    assert parse_object(json.dumps(wide).encode()) == wide
    deep = b'{"a": ' + b"[" * 98 + b"]" * 98 + b"}"
    assert parse_object(deep)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(json_values)
def test_parse_agrees_with_json(value: Any) -> None:
    assert parse(json.dumps(value)) == value


@given(st.text())
def test_parse_raises_nothing_but_value_errors(text: str) -> None:
    with contextlib.suppress(ValueError):
        parse(text)


@pytest.mark.parametrize("number", [b"9" * 5000, b"9" * 600, b"0." + b"9" * 600])
def test_a_number_of_too_many_digits_is_told_without_advice_for_programmers(number: bytes) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_object(b'{"a": ' + number + b"}")
    assert caught.value.message.endswith(": a number with too many digits.")
