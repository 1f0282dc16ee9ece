from __future__ import annotations

import codecs

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firn.text.reply.detokenizer import BROKEN, MAX_PENDING, MAX_WINDOW, Detokenizer
from tests.text.trained import HARD_TEXTS, TrainedTokenizer, byte_level, fallback

TOKENIZERS = {
    "byte-level": byte_level,
    "byte-fallback, strips": lambda: fallback(strips=True),
    "byte-fallback, metaspace": lambda: fallback(strips=False),
}
ALL = frozenset(range(100_000))


def pieces(tokenizer: TrainedTokenizer, ids: list[int], visible: frozenset[int] = ALL) -> list[str]:
    detokenizer = Detokenizer(tokenizer, visible=visible)
    return [*(detokenizer.feed(i) for i in ids), detokenizer.flush()]


@pytest.fixture(params=TOKENIZERS, scope="module")
def tokenizer(request: pytest.FixtureRequest) -> TrainedTokenizer:
    return TOKENIZERS[request.param]()


@pytest.mark.parametrize("text", HARD_TEXTS, ids=range(len(HARD_TEXTS)))
def test_the_pieces_are_the_decoding_of_the_whole(tokenizer: TrainedTokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special=False)
    shown = pieces(tokenizer, ids)
    assert "".join(shown) == tokenizer.decode(ids)
    assert not any(BROKEN in p for p in shown)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=60))
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_any_text_comes_back(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    ids = tokenizer.encode(text, add_special=False)
    shown = pieces(tokenizer, ids)
    assert "".join(shown) == tokenizer.decode(ids)
    if BROKEN not in text:
        assert not any(BROKEN in p for p in shown)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_ids_of_a_byte_level_vocabulary_come_back(data: st.DataObject) -> None:
    tokenizer = byte_level()
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=80))
    assert "".join(pieces(tokenizer, ids)) == uncut(tokenizer, ids)


def uncut(tokenizer: TrainedTokenizer, ids: list[int]) -> str:
    """The decoding, without a character that the last bytes only begin."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return decoder.decode(b"".join(map(tokenizer.token_bytes, ids)))


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_long_runs_of_broken_bytes_keep_the_window_short(data: st.DataObject) -> None:
    tokenizer = byte_level()
    lone = [i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i)[:1] >= b"\x80"]
    ids = data.draw(st.lists(st.sampled_from(lone), min_size=30, max_size=120))
    whole = uncut(tokenizer, ids)
    tokenizer = byte_level().with_template(None)
    assert "".join(pieces(tokenizer, ids)) == whole
    assert tokenizer.longest_decode <= MAX_WINDOW + MAX_PENDING + 1


@settings(max_examples=200, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("strips", [True, False])
def test_any_ids_of_a_fallback_vocabulary_come_back(strips: bool, data: st.DataObject) -> None:
    tokenizer = fallback(strips=strips)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=60))
    whole = tokenizer.decode(ids)
    text = "".join(pieces(tokenizer, ids))
    if BROKEN not in whole:  # otherwise a run that breaks late was whole before, and was shown
        assert text == whole


def test_the_window_stays_short(tokenizer: TrainedTokenizer) -> None:
    ids = tokenizer.encode("word wörd 日本 🙂 " * 300, add_special=False)
    tokenizer.longest_decode = 0
    detokenizer = Detokenizer(tokenizer, visible=frozenset())
    for i in ids:
        detokenizer.feed(i)
    assert len(ids) > 10 * MAX_WINDOW
    assert tokenizer.longest_decode <= MAX_WINDOW + MAX_PENDING


def test_a_character_comes_with_its_last_byte() -> None:
    tokenizer = byte_level()
    by_byte = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    ids = [by_byte[bytes([b])] for b in "a𓀀b".encode()]
    assert pieces(tokenizer, ids) == ["a", "", "", "", "𓀀", "b", ""]


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("n_whole", [0, 1, 2])
def test_a_character_that_is_cut_off_is_held_back(kind: str, n_whole: int) -> None:
    """Even if a decoder shows a whole run of bytes as broken because its end is."""
    tokenizer = TOKENIZERS[kind]()
    by_byte = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    text = "𓀀" * n_whole
    for n_begun in (1, 2, 3):
        begun = "𓀁".encode()[:n_begun]
        ids = [by_byte[bytes([b])] for b in text.encode() + begun]
        assert "".join(pieces(tokenizer, ids)) == text


def test_bytes_that_are_not_a_character_are_shown_as_broken() -> None:
    tokenizer = byte_level()
    by_byte = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    assert pieces(tokenizer, [by_byte[b"\xe2"], by_byte[b"a"]])[-2:] == [f"{BROKEN}a", ""]
    begins_none = [by_byte[b"\x82"], by_byte[b"a"]]
    assert pieces(tokenizer, begins_none) == [BROKEN, "a", ""], "it need not wait"


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_byte_that_breaks_what_was_shown_is_shown_as_broken(kind: str) -> None:
    """With byte fallback, the decoder then shows the whole run as broken."""
    tokenizer = TOKENIZERS[kind]()
    by_byte = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    ids = [by_byte[bytes([b])] for b in "€".encode() + b"\x82"]
    assert pieces(tokenizer, ids) == ["", "", "€", BROKEN, ""]


def test_a_token_that_ends_inside_a_character_shows_what_is_whole() -> None:
    tokenizer = byte_level()
    by_byte = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    begun, rest = by_byte[b" M\xc3"], by_byte[b"\xbc"]
    assert pieces(tokenizer, [begun]) == [" M", ""]
    assert pieces(tokenizer, [begun, rest]) == [" M", "ü", ""]


def test_a_character_after_many_broken_ones_is_whole() -> None:
    """It begins before the window of pending tokens is full, and ends after."""
    tokenizer = byte_level().with_template(None)
    by_byte = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    first, *rest = "🙂".encode()
    begun = bytes([first, *rest[:2]])
    n_begun = MAX_PENDING // len(begun)
    ids = [by_byte[bytes([b])] for b in b"\xe2" + begun * n_begun + bytes(rest[2:])]
    assert "".join(pieces(tokenizer, ids)) == BROKEN * n_begun + "🙂"
    assert tokenizer.longest_decode <= MAX_PENDING + 1


def test_control_tokens_are_hidden_unless_they_are_markup(tokenizer: TrainedTokenizer) -> None:
    start, end = tokenizer.token_id("<|im_start|>"), tokenizer.token_id("<|im_end|>")
    assert start is not None
    assert end is not None
    ids = [start, *tokenizer.encode("one two", add_special=False), end]
    assert "".join(pieces(tokenizer, ids, frozenset())) == "one two"
    assert "".join(pieces(tokenizer, ids, frozenset({end}))).endswith("one two<|im_end|>")


def test_a_hidden_token_does_not_cut_a_character() -> None:
    tokenizer = byte_level()
    by_byte = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    hidden = tokenizer.token_id("<|im_end|>")
    assert hidden is not None
    e2, x82, xac = (by_byte[bytes([b])] for b in "€".encode())
    assert "".join(pieces(tokenizer, [e2, hidden, x82, xac], frozenset())) == "€"
