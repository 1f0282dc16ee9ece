"""What the lookup drafter drafts, and from where."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Hashable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firn.core.values import CacheControl, Job, Namespace, Prompt, RequestId
from firn.models.speculation.drafters import Draft
from firn.models.speculation.drafters import lookup as module
from firn.models.speculation.drafters.lookup import KEPT_TOKENS, Lookup, kind_of


def job(
    prompt: Sequence[int],
    *,
    prediction: Sequence[int] = (),
    namespace: str = "",
    cache: CacheControl = CacheControl(),
    salt: str = "",
) -> Job:
    return Job(
        id=RequestId("1"),
        prompt=Prompt(np.array(prompt, dtype=np.int64), salt=salt),
        max_tokens=100,
        namespace=Namespace(namespace),
        prediction=tuple(prediction),
        cache=cache,
    )


def draft_after(lookup: Lookup, row: Hashable, reply: Sequence[int], n_most: int = 8) -> Draft:
    lookup.extend(row, reply)
    return lookup.draft([row], n_most)[0]


def opened(prompt: Sequence[int], **options: object) -> Lookup:
    lookup = Lookup()
    lookup.open("row", job(prompt, **options))  # type: ignore[arg-type]
    return lookup


TEXT = list(range(100, 160))


def test_the_choices_of_a_request_share_its_prediction() -> None:
    lookup, wanted = Lookup(), job(range(8), prediction=range(200_000))
    tracemalloc.start()
    try:
        lookup.open(0, wanted)
        one, _ = tracemalloc.get_traced_memory()
        for row in range(1, 32):
            lookup.open(row, wanted)
        all_rows, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert all_rows < 2 * one
    assert draft_after(lookup, 31, [0, 1]).tokens == tuple(range(2, 10))
    for row in range(32):
        lookup.close(row)
    lookup.open("other", job(range(8), prediction=[5, 6, 7]))
    assert draft_after(lookup, "other", [5]).tokens == (6, 7)


def test_what_followed_in_the_prompt_follows_again() -> None:
    lookup = opened([1, 2, *TEXT, 3, 4])
    assert draft_after(lookup, "row", [9, 120, 121]).tokens == tuple(range(122, 130))


def test_a_match_is_followed_and_grows_surer() -> None:
    lookup = opened([1, 2, *TEXT, 3, 4])
    kinds = [draft_after(lookup, "row", [9, 120, 121]).kinds[0]]
    for token in range(122, 150):
        kinds.append(draft_after(lookup, "row", [token]).kinds[0])
    assert kinds == sorted(kinds)
    assert kinds[0] == kind_of(2)
    assert kinds[-1] == kind_of(17)


def test_after_a_change_the_rest_is_found_again() -> None:
    lookup = opened([*TEXT, 3, 4])
    draft_after(lookup, "row", TEXT[:20])
    assert draft_after(lookup, "row", [7]).tokens == ()
    assert draft_after(lookup, "row", TEXT[22:24]).tokens[:3] == tuple(TEXT[24:27])


def test_of_several_places_the_longest_match_wins_then_the_last() -> None:
    lookup = opened([1, 2, 3, 50, 9, 2, 3, 60, 8, 2, 3, 70, 5])
    assert draft_after(lookup, "row", [1, 2, 3]).tokens[0] == 50
    lookup = opened([1, 2, 3, 50, 9, 2, 3, 60, 8, 2, 3, 70, 5])
    assert draft_after(lookup, "row", [4, 2, 3]).tokens[0] == 70


def test_the_reply_itself_is_searched() -> None:
    lookup = opened([1])
    assert draft_after(lookup, "row", [10, 11, 12, 13, 10, 11]).tokens[:2] == (12, 13)


def test_a_prediction_is_followed_from_the_first_token() -> None:
    lookup = opened([1, 2], prediction=TEXT)
    assert lookup.draft(["row"], 4)[0].tokens == tuple(TEXT[:4])
    assert draft_after(lookup, "row", [TEXT[0]]).tokens[0] == TEXT[1]
    assert draft_after(lookup, "row", [5, 6]).tokens == ()
    assert draft_after(lookup, "row", TEXT[30:32]).tokens[0] == TEXT[32]


def test_earlier_replies_help_their_own_namespace_alone() -> None:
    lookup = Lookup()
    lookup.open("a", job([1], namespace="one"))
    lookup.extend("a", TEXT)
    lookup.close("a")
    lookup.open("b", job([2], namespace="one"))
    lookup.open("c", job([2], namespace="two"))
    lookup.open("d", job([2], namespace="one", cache=CacheControl(read=False)))
    assert draft_after(lookup, "b", TEXT[10:17]).tokens[0] == TEXT[17]
    assert draft_after(lookup, "c", TEXT[10:17]).tokens == ()
    assert draft_after(lookup, "d", TEXT[10:17]).tokens == ()


def test_replies_to_salted_prompts_help_no_other_prompt() -> None:
    lookup = Lookup()
    for row, salt in (("a", ""), ("b", "x")):
        lookup.open(row, job([1], salt=salt))
        lookup.extend(row, TEXT if salt else TEXT[::-1])
        lookup.close(row)
    for row, salt in (("c", ""), ("d", "x"), ("e", "y")):
        lookup.open(row, job([2], salt=salt))
        assert draft_after(lookup, row, TEXT[10:17]).tokens == ()
    lookup.open("f", job([2], salt="y"))
    assert draft_after(lookup, "f", TEXT[::-1][10:17]).tokens == ()


def test_a_reply_that_must_not_be_cached_is_not_kept() -> None:
    lookup = Lookup()
    lookup.open("a", job([1], cache=CacheControl(write=False)))
    lookup.extend("a", TEXT)
    lookup.close("a")
    lookup.open("b", job([2]))
    assert draft_after(lookup, "b", TEXT[10:17]).tokens == ()


def test_earlier_replies_are_bounded() -> None:
    lookup, rng = Lookup(), random.Random(0)
    replies = [[rng.randrange(50_000) for _ in range(4000)] for _ in range(40)]
    for i, reply in enumerate(replies):
        lookup.open(i, job([1]))
        lookup.extend(i, reply)
        lookup.close(i)
    (past,) = lookup._past.values()
    assert past.n_tokens <= KEPT_TOKENS
    assert len(past._where) <= KEPT_TOKENS
    lookup.open("new", job([1]))
    assert draft_after(lookup, "new", replies[-1][50:60]).tokens[0] == replies[-1][60]
    assert draft_after(lookup, "new", replies[0][50:60]).tokens == ()


def test_earlier_replies_of_all_namespaces_share_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the least recently used namespace are dropped first."""
    monkeypatch.setattr(module, "KEPT_NBYTES", 1000 * module.TOKEN_NBYTES)
    lookup = Lookup()

    def says(namespace: str, start: int) -> None:
        lookup.open("row", job([1], namespace=namespace))
        lookup.extend("row", range(start, start + 400))
        lookup.close("row")

    def remembers(namespace: str, start: int) -> bool:
        lookup.open("next", job([2], namespace=namespace))
        return bool(draft_after(lookup, "next", range(start + 50, start + 60)).tokens)

    says("one", 1000)
    says("two", 2000)
    assert remembers("one", 1000)
    says("three", 3000)
    assert remembers("three", 3000)
    assert remembers("one", 1000)
    assert not remembers("two", 2000)
    assert sum(past.n_tokens for past in lookup._past.values()) <= 1000


def test_a_reply_is_kept_though_its_namespace_was_dropped_meanwhile() -> None:
    lookup = Lookup()
    lookup.open("slow", job([1], namespace="one"))
    for i in range(module.KEPT_NAMESPACES):
        lookup.open(i, job([1], namespace=f"other {i}"))
    lookup.extend("slow", TEXT)
    lookup.close("slow")
    lookup.open("next", job([2], namespace="one"))
    assert draft_after(lookup, "next", TEXT[10:17]).tokens[0] == TEXT[17]


def test_choices_share_what_is_looked_up_in_their_prompt() -> None:
    lookup, request = Lookup(), job([1, 2, *TEXT, 3, 4])
    for choice in range(3):
        lookup.open(choice, request)
        assert draft_after(lookup, choice, [9, 120, 121]).tokens[0] == 122
    assert len({id(text._prompt) for text in lookup._texts.values()}) == 1
    for choice in range(3):
        lookup.close(choice)
    assert not lookup._fixed


@settings(max_examples=200, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 4), min_size=1, max_size=40),
    reply=st.lists(st.integers(0, 4), min_size=1, max_size=40),
)
def test_every_draft_followed_the_same_two_tokens_before(
    prompt: list[int], reply: list[int]
) -> None:
    lookup = opened(prompt)
    text = list(prompt)
    for token in reply:
        text.append(token)
        draft = draft_after(lookup, "row", [token], 3)
        assert len(draft.tokens) == len(draft.kinds)
        if draft.tokens:
            wanted = [*text[-2:], draft.tokens[0]]
            assert any(text[i : i + 3] == wanted for i in range(len(text) - 2))
