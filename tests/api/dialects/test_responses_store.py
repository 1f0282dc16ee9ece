"""The store of responses is bounded and private, and evicts a conversation from its end."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firn.api.dialects._responses_store import OVERHEAD_NBYTES, ResponseStore, StoredResponse
from firn.core.errors import InvalidValue, NotFound
from firn.core.values import Namespace, RequestId

MINE, YOURS = Namespace("mine"), Namespace("yours")


def stored(
    id: str, *, previous: str | None = None, size: int = 0, running: bool = False
) -> StoredResponse:
    return StoredResponse(
        id=id,
        request=RequestId(id),
        previous=previous,
        is_running=running,
        items=b"[]",
        outputs=json.dumps([{"id": f"item-{id}", "text": "x" * size}]).encode(),
        response=json.dumps({"id": id, "tools": []}).encode(),
        item_ids=frozenset({f"item-{id}"}),
    )


def there(store: ResponseStore, *ids: str, namespace: Namespace = MINE) -> list[str]:
    """The given ids that are stored."""
    stored = []
    for id in ids:
        try:
            stored.append(store.get(namespace, id).id)
        except NotFound:
            continue
    return stored


def test_a_stored_response_is_found_and_dropped() -> None:
    store = ResponseStore()
    store.put(MINE, stored("a"))
    body = {"id": "a", "output": [{"id": "item-a", "text": ""}], "tools": []}
    assert json.loads(store.get(MINE, "a").body()) == body
    assert store.drop(MINE, "a").id == "a"
    for gone in (store.get, store.drop):
        with pytest.raises(NotFound):
            gone(MINE, "a")


def test_responses_of_other_namespaces_are_not_found() -> None:
    store = ResponseStore()
    store.put(MINE, stored("a"))
    with pytest.raises(NotFound):
        store.get(YOURS, "a")
    with pytest.raises(NotFound):
        store.drop(YOURS, "a")
    with pytest.raises(InvalidValue):
        store.conversation(YOURS, "a")
    assert store.item(YOURS, "item-a") is None
    assert store.item(MINE, "item-a") == {"id": "item-a", "text": ""}


def test_the_count_is_bounded_for_each_namespace() -> None:
    store = ResponseStore(max_count=2)
    for id in "abc":
        store.put(MINE, stored(id))
    store.put(YOURS, stored("d"))
    assert there(store, *"abc") == ["b", "c"]
    assert there(store, "d", namespace=YOURS) == ["d"]


def test_the_bytes_are_bounded() -> None:
    one = stored("a", size=1000).nbytes
    store = ResponseStore(max_nbytes=2 * one)
    for id in "abc":
        store.put(MINE, stored(id, size=1000))
    assert there(store, *"abc") == ["b", "c"]
    store.put(MINE, stored("b", size=1))  # a new version of a stored response
    store.put(MINE, stored("d", size=900))
    assert there(store, *"abcd") == ["b", "d"]


def test_a_response_that_is_too_large_is_not_kept_and_evicts_nothing() -> None:
    store = ResponseStore(max_nbytes=OVERHEAD_NBYTES + 200)
    store.put(MINE, stored("a"))
    store.put(MINE, stored("b", size=5000))
    assert there(store, "a", "b") == ["a"]


def test_a_conversation_is_its_links_in_order() -> None:
    store = ResponseStore()
    for id, previous in (("a", None), ("b", "a"), ("c", "b"), ("other", "a")):
        store.put(MINE, stored(id, previous=previous))
    assert [link.id for link in store.conversation(MINE, "c")] == ["a", "b", "c"]


def test_items_are_read_without_the_rest_of_their_response() -> None:
    """Each response repeats its tools: reading all of a long conversation took 0.25 s."""
    store = ResponseStore()
    store.put(MINE, replace(stored("a"), response=b"not read"))
    assert store.get(MINE, "a").output() == [{"id": "item-a", "text": ""}]
    assert store.item(MINE, "item-a") == {"id": "item-a", "text": ""}


def test_a_conversation_that_lost_a_link_says_so() -> None:
    store = ResponseStore()
    for id, previous in (("a", None), ("b", "a")):
        store.put(MINE, stored(id, previous=previous))
    store.drop(MINE, "a")
    with pytest.raises(InvalidValue, match="'a'"):
        store.conversation(MINE, "b")
    with pytest.raises(InvalidValue, match="'zzz'"):
        store.conversation(MINE, "zzz")


def test_a_conversation_loses_its_end_first() -> None:
    store = ResponseStore(max_count=3)
    store.put(MINE, stored("a"))
    store.put(MINE, stored("b", previous="a"))
    store.put(MINE, stored("x"))
    store.put(MINE, stored("c", previous="a"))
    assert there(store, *"abcx") == ["a", "c", "x"], "b was the end nobody asked for"


def test_a_conversation_that_is_used_is_kept() -> None:
    store = ResponseStore(max_count=3)
    store.put(MINE, stored("a"))
    store.put(MINE, stored("b", previous="a"))
    store.put(MINE, stored("x"))
    store.conversation(MINE, "b")
    store.put(MINE, stored("y"))
    assert there(store, *"abxy") == ["a", "b", "y"]


def test_what_was_deleted_meanwhile_stays_deleted() -> None:
    store = ResponseStore()
    store.put(MINE, stored("a", running=True))
    store.update(MINE, stored("a"))
    assert not store.get(MINE, "a").is_running
    store.drop(MINE, "a")
    store.update(MINE, stored("a"))
    assert there(store, "a") == []


@given(
    st.lists(
        st.tuples(st.sampled_from(["put", "drop", "talk"]), st.integers(0, 9), st.integers(0, 9)),
        max_size=60,
    )
)
def test_count_and_bytes_stay_within_bounds_whatever_happens(
    steps: list[tuple[str, int, int]],
) -> None:
    store = ResponseStore(max_count=4, max_nbytes=4000)
    for kind, one, other in steps:
        id, previous = str(one), str(other) if other < one else None
        try:
            if kind == "put":
                store.put(MINE, stored(id, previous=previous, size=one * 200))
            elif kind == "drop":
                store.drop(MINE, id)
            else:
                store.conversation(MINE, id)
        except (NotFound, InvalidValue):
            pass
        kept = [store.get(MINE, i) for i in there(store, *map(str, range(10)))]
        assert len(kept) <= 4
        assert sum(entry.nbytes for entry in kept) <= 4000
        responses = store._by_namespace.get(MINE)
        assert responses is None or responses.nbytes == sum(entry.nbytes for entry in kept)
