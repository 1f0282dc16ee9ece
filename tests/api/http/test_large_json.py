"""Large replies are encoded as the standard encoder does."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from firn.api.http import large_json

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(VALUES)
def test_any_value_is_encoded_as_json_does(value: Any) -> None:
    assert large_json.dumps(value) == json.dumps(value).encode()


@given(VALUES)
def test_small_pieces_encode_the_same(value: Any) -> None:
    encoder = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
    whole = encoder.encode(value).encode()
    assert large_json.dumps(value, encoder, piece_items=2) == whole


def test_long_arrays_encode_the_same() -> None:
    for n in (0, 1, 511, 512, 513, 2000):
        value = {"a": [{"b": i, "c": [i] * 3} for i in range(n)], "d": [[None] * n]}
        assert large_json.dumps(value) == json.dumps(value).encode()
