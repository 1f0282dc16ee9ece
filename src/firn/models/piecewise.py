"""Tokenizes long texts in pieces, and remembers them: a chat's next turn repeats all of its text.

    ...the quick brown| fox jumps...    a cut: between a letter and the space before the next word
    ...is it?|<|im_end|>                a cut: before a control token

Where a text is cut depends on the text alone, so what is remembered does not affect its tokens. Nor
do the cuts: no token of the vocabulary spans one. If that cannot be shown for a kind of cut, or the
tokenizer treats the beginning of a text differently, texts are not cut that way.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

MIN_CHARS = 2048
"""Minimum length of a piece: it ends at the first cut from there on."""
MAX_CHARS = 8 << 20
"""Remembered in all pieces together: about twenty chats of 100K tokens, in 16 to 32 MB."""

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
        self._cut = _cuts(tokenizer, vocabulary)
        self._ids: OrderedDict[str, NDArray[np.int32]] = OrderedDict()
        self._n_chars = 0
        self._lock = threading.Lock()

    def encode(self, text: str) -> list[int]:
        """The text's tokens, without any that the tokenizer would put around it."""
        pieces = self._pieces(text)
        known = self._recall(pieces[:-1])
        new = [piece for piece in dict.fromkeys(pieces) if piece not in known]
        made = dict(zip(new, _encoded(self._tokenizer, new), strict=True))
        self._remember({piece: made[piece] for piece in new if piece != pieces[-1]})
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

    def _recall(self, pieces: Sequence[str]) -> dict[str, NDArray[np.int32]]:
        with self._lock:
            known = {piece: self._ids[piece] for piece in pieces if piece in self._ids}
            for piece in known:
                self._ids.move_to_end(piece)
        return known

    def _remember(self, made: Mapping[str, Sequence[int]]) -> None:
        with self._lock:
            for piece, ids in made.items():
                if piece not in self._ids:  # another thread may have been faster
                    self._ids[piece] = np.array(ids, dtype=np.int32)
                    self._n_chars += len(piece)
            while self._n_chars > MAX_CHARS:
                oldest, _ = self._ids.popitem(last=False)
                self._n_chars -= len(oldest)


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
