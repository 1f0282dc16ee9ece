from __future__ import annotations

from typing import Any

import pytest

from firn.api.http import fields
from firn.api.http.fields import Fields
from firn.core.errors import InvalidValue

NOT_INTEGERS: list[Any] = [True, False, 1.0, "1", [], {}, None, -1, 11, 10**400]
NOT_NUMBERS: list[Any] = [
    True, "1", [], {}, None, -0.1, 2.1, float("nan"), float("inf"), float("-inf"), 10**400,
]  # fmt: skip


@pytest.mark.parametrize("value", NOT_INTEGERS, ids=lambda v: repr(v)[:20])
def test_other_values_are_not_integers(value: Any) -> None:
    with pytest.raises(InvalidValue) as caught:
        fields.integer(value, "it", low=0, high=10)
    assert caught.value.param == "it"


@pytest.mark.parametrize("value", NOT_NUMBERS, ids=lambda v: repr(v)[:20])
def test_other_values_are_not_numbers(value: Any) -> None:
    with pytest.raises(InvalidValue):
        fields.number(value, "it", low=0, high=2)


def test_numbers_are_checked_at_their_bounds() -> None:
    assert fields.number(2, "it", low=0, high=2) == 2.0
    assert fields.number(0, "it", low=0, high=2) == 0.0
    with pytest.raises(InvalidValue):
        fields.number(0, "it", low=0, high=2, above_low=True)


@pytest.mark.parametrize("limit", ["0", "11", "", "x", "-1", "٣", "0000000001", "0" * 5000 + "1"])
def test_other_texts_are_not_limits_of_a_page(limit: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        fields.page_limit({"limit": limit}, default=5, high=10)
    assert caught.value.param == "limit"


def test_a_page_has_a_limit_of_its_own() -> None:
    assert fields.page_limit({}, default=5, high=10) == 5
    assert fields.page_limit({"limit": "010"}, default=5, high=10) == 10


def test_null_is_absent_and_unread_members_are_known() -> None:
    body = Fields({"a": None, "b": 1, "c": 2, "d": {"e": 1}})
    assert body.integer("a", low=0) is None
    assert body.integer("b", low=0) == 1
    assert body.object("d").integer("e", low=0) == 1
    assert body.unread() == ("c",)


def test_errors_name_the_path() -> None:
    with pytest.raises(InvalidValue) as caught:
        Fields({"d": {"e": True}}).object("d").integer("e", low=0)
    assert caught.value.param == "d.e"
    assert caught.value.message == "d.e: must be an integer, not a boolean"


def test_a_missing_member_is_named() -> None:
    for members in ({}, {"a": None}):
        with pytest.raises(InvalidValue) as caught:
            Fields(members, "x").require("a")
        assert caught.value.message == "x.a: is required"
