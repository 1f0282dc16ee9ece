"""Content addresses: framed, chained, the same in every process, and distinct where necessary."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from firn.core import keys
from firn.core.keys import block_keys, child_key, key_tokens, packed_tokens, prompt_tokens, root_key
from firn.core.values import KeyTokens, Namespace, PictureSpan, Prompt
from firn.sparse.selection import thinned

TOKENS = st.lists(st.integers(0, 1 << 40), max_size=40)
# Few letters, so that adjacent fields are often confusable.
FIELD = st.text(alphabet="ab;,\x00", max_size=6)
FINGERPRINT = st.binary(max_size=6)


def values(ids: Sequence[int]) -> KeyTokens:
    return np.array(ids, dtype=np.uint64)


def root(fingerprint: bytes = b"m", layout: str = "l", namespace: str = "n") -> keys.Key:
    return root_key(fingerprint=fingerprint, layout=layout, namespace=Namespace(namespace))


# --- framing -------------------------------------------------------------------------------


@settings(max_examples=300)
@given(
    a=st.tuples(FINGERPRINT, FIELD, FIELD),
    b=st.tuples(FINGERPRINT, FIELD, FIELD),
)
def test_two_roots_are_one_only_if_every_field_is(
    a: tuple[bytes, str, str], b: tuple[bytes, str, str]
) -> None:
    assert (root(*a) == root(*b)) == (a == b)


@settings(max_examples=300)
@given(text=st.binary(min_size=1, max_size=24), cuts=st.lists(st.integers(0, 24), max_size=4))
def test_the_same_bytes_cut_elsewhere_are_other_fields(text: bytes, cuts: list[int]) -> None:
    places = sorted({min(c, len(text)) for c in cuts})
    fields = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    assume(len(fields) > 1)
    assert keys._hash(b"test", fields) != keys._hash(b"test", [text])
    assert keys._hash(b"test", fields) != keys._hash(b"test", [*fields, b""])
    assert keys._hash(b"test", fields) != keys._hash(b"other", fields)


@settings(max_examples=200)
@given(tokens=st.lists(st.integers(0, 1 << 40), min_size=2, max_size=40), at=st.integers(0, 40))
def test_a_chain_cut_elsewhere_has_another_key(tokens: list[int], at: int) -> None:
    at = 1 + at % (len(tokens) - 1)
    whole = child_key(root(), values(tokens))
    first = child_key(root(), values(tokens[:at]))
    assert child_key(first, values(tokens[at:])) != whole
    assert whole == child_key(root(), values(tokens))


@settings(max_examples=200)
@given(a=TOKENS, b=TOKENS)
def test_two_blocks_are_one_only_if_their_tokens_are(a: list[int], b: list[int]) -> None:
    assert (child_key(root(), values(a)) == child_key(root(), values(b))) == (a == b)


def test_a_root_is_no_node() -> None:
    """A node whose bytes look like a root's fields still has another key."""
    fields = b"\1\0\0\0"
    empty = [fields, b"", b"", b""]
    assert keys._hash(b"root", empty) != keys._hash(b"node", empty)


# --- chains --------------------------------------------------------------------------------


@settings(max_examples=100)
@given(tokens=st.lists(st.integers(0, 1 << 20), max_size=60), block=st.integers(1, 9))
def test_block_keys_are_the_chain_of_whole_blocks(tokens: list[int], block: int) -> None:
    keys = block_keys(root(), values(tokens), block)
    assert len(keys) == len(tokens) // block
    parent = root()
    for i, key in enumerate(keys):
        parent = child_key(parent, values(tokens[i * block : (i + 1) * block]))
        assert key == parent


@settings(max_examples=100)
@given(tokens=st.lists(st.integers(0, 9), min_size=8, max_size=40), at=st.integers(0, 39))
def test_a_changed_token_changes_its_block_and_all_that_follow(tokens: list[int], at: int) -> None:
    at %= len(tokens)
    other = [*tokens[:at], tokens[at] + 1, *tokens[at + 1 :]]
    mine, theirs = (block_keys(root(), values(t), 4) for t in (tokens, other))
    agree = [a == b for a, b in zip(mine, theirs, strict=True)]
    assert agree == [i < at // 4 for i in range(len(mine))]


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (root(namespace="alice"), root(namespace="bob")),
        (root(namespace=""), root(namespace="alice")),
        (root(layout="kv;float16"), root(layout="kv;bfloat16")),
        (root(layout="kv"), root(layout="kv~8x64")),
        (root(b"model"), root(b"model+adapter")),
    ],
)
def test_other_roots_share_no_key(a: keys.Key, b: keys.Key) -> None:
    tokens = values(range(64))
    assert not set(block_keys(a, tokens, 8)) & set(block_keys(b, tokens, 8))


def test_another_format_is_another_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    before = root()
    monkeypatch.setattr(keys, "FORMAT_VERSION", keys.FORMAT_VERSION + 1)
    assert root() != before


# --- media ---------------------------------------------------------------------------------


CAT, DOG = hashlib.sha256(b"cat").digest(), hashlib.sha256(b"dog").digest()
PAD = 7
"""The token id that stands for every position of every picture."""


def with_pictures(*spans: tuple[int, int, bytes], n: int = 30) -> list[int]:
    ids = np.arange(100, 100 + n, dtype=np.int64)
    for start, end, _ in spans:
        ids[start:end] = PAD
    tokens = key_tokens(ids, [PictureSpan(*s) for s in spans])
    return [int(v) for v in tokens]


def test_text_positions_are_their_token_ids() -> None:
    tokens = with_pictures((5, 9, CAT))
    assert tokens[:5] == list(range(100, 105))
    assert tokens[9:] == list(range(109, 130))
    assert with_pictures() == list(range(100, 130))


def test_a_picture_is_its_content_and_nothing_else() -> None:
    cat, dog = with_pictures((5, 9, CAT)), with_pictures((5, 9, DOG))
    assert not set(cat[5:9]) & set(dog[5:9])
    assert cat == with_pictures((5, 9, CAT))
    elsewhere = with_pictures((12, 16, CAT))
    assert cat[5:9] == elsewhere[12:16], "the same picture has the same tokens wherever it stands"


def test_the_positions_of_a_picture_differ() -> None:
    assert len(set(with_pictures((0, 30, CAT)))) == 30


def test_a_picture_that_comes_again_is_not_hashed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pictures of a chat come with every turn, and the engine waits for their tokens."""
    spans, n_hashes, real = [PictureSpan(2, 7, b"seen before")], 0, keys._hash

    def counted(*args: object) -> bytes:
        nonlocal n_hashes
        n_hashes += 1
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(keys, "_hash", counted)
    first = key_tokens(np.arange(10), spans)
    assert n_hashes == 5
    later = key_tokens(np.arange(20), [PictureSpan(12, 17, b"seen before")])
    assert n_hashes == 5
    assert later[12:17].tolist() == first[2:7].tolist()


def test_the_order_of_two_pictures_matters() -> None:
    one, other = (with_pictures((5, 9, a), (9, 13, b)) for a, b in ((CAT, DOG), (DOG, CAT)))
    assert one[5:9] == other[9:13]
    assert one != other


def test_two_pictures_side_by_side_are_not_one_large_one() -> None:
    assert with_pictures((5, 9, CAT), (9, 13, CAT)) != with_pictures((5, 13, CAT))


@given(ids=st.lists(st.integers(0, (1 << 63) - 1), max_size=20))
def test_no_text_token_looks_like_a_picture(ids: list[int]) -> None:
    text = key_tokens(np.array(ids, dtype=np.int64))
    assert all(int(v) < 1 << 63 for v in text)
    assert all(v >= 1 << 63 for v in with_pictures((0, 30, CAT)))


def test_the_prompt_is_not_written_to() -> None:
    ids = np.arange(9, dtype=np.int64)
    ids.flags.writeable = False
    key_tokens(ids, [PictureSpan(2, 4, CAT)])
    assert ids.tolist() == list(range(9))


def salted(salt: str, ids: Sequence[int] = range(9)) -> list[int]:
    prompt = Prompt(np.array(ids, dtype=np.int64), salt=salt)
    return [int(value) for value in prompt_tokens(prompt)]


def test_a_salt_changes_the_first_key_token_and_so_every_key() -> None:
    plain = list(range(9))
    assert salted("") == plain
    assert salted("a") == salted("a")
    assert len({salted(salt)[0] for salt in ("", "a", "b", "ab")}) == 4
    assert salted("a")[1:] == plain[1:]
    assert salted("a")[0] >> 63, "no token of text equals it"
    assert salted("a", [0, 5])[0] != salted("a", [1, 5])[0]
    chains = [block_keys(root(), values(salted(salt)), 2) for salt in ("", "a", "b")]
    assert len({key for chain in chains for key in chain}) == 3 * 4


def test_a_thinned_prompt_keeps_its_salt() -> None:
    whole = Prompt(np.arange(8, dtype=np.int64), salt="a")
    thin = thinned(whole, np.arange(0, 8, 2), start=0, recipe="r")
    assert thin is not None
    bare = replace(thin, salt="")
    assert prompt_tokens(thin).tolist()[0] != prompt_tokens(bare).tolist()[0]
    assert prompt_tokens(thin).tolist()[1:] == prompt_tokens(bare).tolist()[1:]


# --- other processes -----------------------------------------------------------------------

SCRIPT = """
import json, sys
import numpy as np
from firn.core.keys import block_keys, key_tokens, root_key
from firn.core.values import PictureSpan
root = root_key(fingerprint=b"model", layout="kv,window8;float16;block4;full", namespace="alice")
tokens = key_tokens(np.arange(32), [PictureSpan(9, 13, bytes(range(32)))])
print(json.dumps([root.hex(), *(k.hex() for k in block_keys(root, tokens, 4))]))
"""
KNOWN = ("7785", "ac7e")
"""The first bytes of the root and of the last key: a change of the key function is a new format."""


@pytest.mark.parametrize("seed", ["0", "1", "4242"])
def test_keys_are_the_same_in_every_process(seed: str) -> None:
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True
    )
    keys = json.loads(done.stdout)
    mine = root_key(
        fingerprint=b"model",
        layout="kv,window8;float16;block4;full",
        namespace=Namespace("alice"),
    )
    tokens = key_tokens(np.arange(32, dtype=np.int64), [PictureSpan(9, 13, bytes(range(32)))])
    assert keys == [mine.hex(), *(k.hex() for k in block_keys(mine, tokens, 4))]
    assert (keys[0][:4], keys[-1][:4]) == KNOWN


def test_a_prompt_is_packed_once_and_a_changed_one_anew() -> None:
    prompt = Prompt(np.arange(8, dtype=np.int64))
    packed = packed_tokens(prompt)
    assert packed_tokens(prompt) is packed
    for other in (
        replace(prompt, salt="a"),
        prompt.grown([9]),
        replace(prompt, ids=prompt.ids + 1),
    ):
        assert packed_tokens(other).tokens.tolist() == prompt_tokens(other).tolist()
        assert packed_tokens(other).tokens.tolist() != packed.tokens.tolist()
