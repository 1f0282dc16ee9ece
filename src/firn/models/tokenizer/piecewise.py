"""Tokenizes long texts in pieces, and remembers them: a chat's next turn repeats all of its text.

    ...the quick brown| fox jumps...    a cut: between a letter and the space before the next word
    ...is it?|<|im_end|>                a cut: before a control token

Each key has its own memory: the time that a text takes must not tell who else has sent it.
Where a text is cut depends on the text alone, so what is remembered does not affect its tokens. Nor
do the cuts: no token of the vocabulary spans one. If that cannot be shown for a kind of cut, or the
tokenizer treats the beginning of a text differently, texts are not cut that way.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence, Set
from itertools import islice, pairwise, product
from string import ascii_lowercase

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from firn.core.fair_cache import FairCache
from firn.core.fair_pool import worker_key

MIN_CHARS = 2048
"""Minimum length of a piece: it ends at the first cut from there on."""
MAX_CHARS = 8 << 20
"""Remembered in all pieces together: about twenty chats of 100K tokens, in 16 to 32 MB."""

N_WORDS = 12_000
"""More than the library remembers."""

SPACES = "\u0120\u2581"
"""How vocabularies spell the space before a word."""
_SPACED_WORD = re.compile(rf"[{SPACES}][A-Za-z]+")
_TWO_WORDS = re.compile(r"[A-Za-z][\u0120\u2581 ]")
"""Two words in one token, however the vocabulary spells a space."""
_BETWEEN_WORDS = r"(?<=[A-Za-z])(?= [A-Za-z])"
_PROBES = (
    "The quick  brown fox\n\njumps over 13 lazy dogs, it's true: x = y",
    "  def f(a, b):\n\treturn a or b  # caf\u00e9 na\u00efve \u4f60\u597d\u3002 ok then",
    "I am A b C\r\nend of it ",
)
N_CONTROL = 3
"""Control tokens that each probe tries."""


class PiecewiseEncoder:
    """Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: Collection[str]) -> None:
        """vocabulary: the tokenizer's tokens, as they are spelled there."""
        self._tokenizer = tokenizer
        _fill_memory(tokenizer, vocabulary)
        self._cut = _cuts(tokenizer, vocabulary)
        self._ids: FairCache[str, NDArray[np.int32]] = FairCache(MAX_CHARS)

    def encode(self, text: str) -> list[int]:
        """The text's tokens, without any that the tokenizer would put around it."""
        pieces = self._pieces(text)
        owner = worker_key()
        recalled = ((piece, self._ids.get(owner, piece)) for piece in pieces[:-1])
        known = {piece: ids for piece, ids in recalled if ids is not None}
        new = [piece for piece in dict.fromkeys(pieces) if piece not in known]
        made = dict(zip(new, _encoded(self._tokenizer, new), strict=True))
        for piece in new:
            if piece != pieces[-1]:
                self._ids.put(owner, piece, np.array(made[piece], dtype=np.int32), len(piece))
        ids: list[int] = []
        for piece in pieces:
            ids += made[piece] if piece in made else known[piece].tolist()
        return ids

    def _pieces(self, text: str) -> list[str]:
        starts = [0]
        if self._cut is not None:
            while cut := self._cut.search(text, starts[-1] + MIN_CHARS):
                starts.append(cut.start())
        return [text[a:b] for a, b in pairwise([*starts, len(text)])]


def _fill_memory(tokenizer: Tokenizer, vocabulary: Collection[str]) -> None:
    """Give the library the words that it remembers: it keeps the first 10,000, whoever sends them,
    and is twice as fast with those."""
    words = islice(_memorable(tokenizer, frozenset(vocabulary)), N_WORDS)
    # One text at a time: threads of a batch would keep each other from writing.
    for text in ["".join(words)] if _splits_words(tokenizer) else words:
        _encoded(tokenizer, [text])


def _memorable(tokenizer: Tokenizer, vocabulary: Set[str]) -> Iterator[str]:
    """Words with the space before them. The vocabulary's own come first, but a library that looks whole
    words up in the vocabulary (Llama 3's) remembers only others."""
    looks_up = getattr(tokenizer.model, "ignore_merges", False)
    if not looks_up:
        yield from (f" {token[1:]}" for token in vocabulary if _SPACED_WORD.fullmatch(token))
    for length in (3, 4):
        for letters in product(ascii_lowercase, repeat=length):
            word = "".join(letters)
            if not (looks_up and any(f"{space}{word}" in vocabulary for space in SPACES)):
                yield f" {word}"


def _splits_words(tokenizer: Tokenizer) -> bool:
    """Whether words of a text are remembered one by one. Gemma's tokenizer replaces the spaces before it
    would split at them."""
    text = " two words"
    if tokenizer.normalizer is not None:
        text = tokenizer.normalizer.normalize_str(text)
    split = tokenizer.pre_tokenizer
    return split is not None and len(split.pre_tokenize_str(text)) > 1


def _encoded(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    # Like `encode`, without the character offsets, which take as long as the tokens.
    return [list(e.ids) for e in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


def _cuts(tokenizer: Tokenizer, vocabulary: Collection[str]) -> re.Pattern[str] | None:
    """Where this tokenizer's texts can be cut; None: nowhere."""
    added = list(tokenizer.get_added_tokens_decoder().values())
    if any(t.lstrip or t.rstrip or t.single_word for t in added):
        return None  # they absorb the text next to them
    names = [t.content for t in added if t.content]
    control = [
        t.content
        for t in added
        if t.special and not t.normalized and not any(t.content[:1] in n[1:] for n in names)
    ]
    places = [f"(?=(?:{'|'.join(map(re.escape, control))}))"] if control else []
    has_phrases = any(re.search(_BETWEEN_WORDS, name) for name in names)
    merged = "\n".join(set(vocabulary).difference(names))
    if not has_phrases and not _TWO_WORDS.search(merged):
        places.append(_BETWEEN_WORDS)
    proven = [place for place in places if _is_cut(place, tokenizer, control)]
    return re.compile("|".join(proven)) if proven else None


def _is_cut(place: str, tokenizer: Tokenizer, control: list[str]) -> bool:
    """Whether the probes give the same tokens, whole and cut."""
    for probe in _PROBES:
        text = probe.join(["", *control[:N_CONTROL], ""])
        cuts = [cut.start() for cut in re.finditer(place, text)]
        parts = [part for at in cuts for part in (text[:at], text[at:])]
        whole, *encoded = _encoded(tokenizer, [text, *parts])
        halves = zip(encoded[::2], encoded[1::2], strict=True)
        if any(left + right != whole for left, right in halves):
            return False
    return True
