"""Drafts by lookup: where the end of the row's text occurred before, what followed it may follow again.

It searches the request's own prediction of its reply, the prompt, the reply so far, and earlier
replies in the same namespace, up to a bounded number of tokens. The longest match is followed for
as long as it holds. The longer the match, the better the draft: the kind of a drafted token depends
on the length of the match before it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import numpy as np

from firn.core.values import Job, Namespace, TokenArray
from firn.models.speculation.drafters import NO_DRAFT, Draft

SHORT, LONG = 2, 6
"""Lengths of the keys that are looked up, in tokens. SHORT is also the shortest match."""
MAX_CANDIDATES = 16
MAX_COMPARED = 18
"""Tokens compared: longer matches are no better."""
FACTOR = 1_000_003
KEPT_TOKENS = 1 << 16
"""Tokens of earlier replies kept in each namespace."""
KEPT_NBYTES, TOKEN_NBYTES = 64 << 20, 256
"""Memory for earlier replies in all namespaces, and for each kept token with its key."""
KEPT_NAMESPACES = 64
MIN_REPLY, MAX_REPLY = 16, 1 << 13
"""Shorter replies are not kept; of longer ones, the first tokens are."""
MAX_LENGTH = 32
"""Tokens: after longer matches, drafts are not better."""
PREDICTED = 8
"""What a prediction counts for before any of it was right: a match of so many tokens."""


class Lookup:
    """One for each model; owns the replies it remembers."""

    is_free = True

    def __init__(self) -> None:
        self._texts: dict[Hashable, _RowText] = {}
        self._past: OrderedDict[Namespace, _Replies] = OrderedDict()
        """Least recently used first."""
        self._fixed: WeakValueDictionary[int, _FixedText] = WeakValueDictionary()
        """By the id() of their tokens: the choices of a request share its prompt and prediction."""

    def odds(self, kind: int) -> float:
        """After a match of n tokens, n of n + 3 are right."""
        n = 1 << kind
        return n / (n + 3)

    def open(self, row: Hashable, job: Job) -> None:
        past = _Replies() if job.prompt.salt else self._use(job.namespace, _Replies())
        prompt, prediction = self._text_of(job.prompt.ids), self._text_of(job.prediction)
        self._texts[row] = _RowText(job, prompt, prediction, past)

    def _text_of(self, tokens: TokenArray | tuple[int, ...]) -> _FixedText:
        text = self._fixed.get(id(tokens))
        if text is None:
            text = self._fixed[id(tokens)] = _FixedText(tokens)
        return text

    def _use(self, namespace: Namespace, past: _Replies) -> _Replies:
        """The namespace's replies, or `past` if it has none. Evicts those of others if there are
        too many."""
        past = self._past.setdefault(namespace, past)
        self._past.move_to_end(namespace)
        nbytes = TOKEN_NBYTES * sum(replies.n_tokens for replies in self._past.values())
        while len(self._past) > 1 and (nbytes > KEPT_NBYTES or len(self._past) > KEPT_NAMESPACES):
            _, dropped = self._past.popitem(last=False)
            nbytes -= TOKEN_NBYTES * dropped.n_tokens
        return past

    def prepare(self, row: Hashable) -> bool:
        return row in self._texts

    def extend(self, row: Hashable, tokens: Sequence[int]) -> None:
        text = self._texts.get(row)
        if text is not None:
            text.take(tokens)

    def draft(self, rows: Sequence[Hashable], n_most: int) -> list[Draft]:
        texts = [self._texts.get(row) for row in rows]
        return [NO_DRAFT if text is None else text.draft(n_most) for text in texts]

    def close(self, row: Hashable) -> None:
        text = self._texts.pop(row, None)
        if text is not None and text.keeps:
            text.past.keep(text.reply)
            self._use(text.namespace, text.past)

    def end(self) -> None:
        self._texts.clear()
        self._past.clear()


class _GrowingText:
    """Tokens to search, and where each key of SHORT and of LONG tokens last ended."""

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens: list[int] = []
        self._last: dict[tuple[int, ...], int] = {}
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        all_tokens, last = self.tokens, self._last
        for token in tokens:
            n = len(all_tokens)
            # A key ends before the newest token, so that the token after it is known.
            if n >= SHORT:
                last[tuple(all_tokens[n - SHORT : n])] = n
            if n >= LONG:
                last[tuple(all_tokens[n - LONG : n])] = n
            all_tokens.append(token)

    def find(self, end: Sequence[int]) -> tuple[int, int]:
        """Where the text that followed this end begins, and the match's length; (0, 0): nowhere."""
        for n in (LONG, SHORT):
            if len(end) >= n:
                at = self._last.get(tuple(end[-n:]), 0)
                if at:
                    return at, _match(self.tokens, at, end)
        return 0, 0


class _FixedText:
    """A prompt's or a prediction's tokens to search: too many for a dict, so their hashes are
    sorted on first use."""

    def __init__(self, tokens: TokenArray | tuple[int, ...]) -> None:
        self._tokens = tokens  # alive as long as this, which is found by their id()
        self.ids: TokenArray = np.asarray(tokens, dtype=np.int64)
        self._sorted: dict[int, tuple[TokenArray, TokenArray]] = {}

    def find(self, end: Sequence[int]) -> tuple[int, int]:
        if len(end) < SHORT or len(self.ids) <= SHORT:
            return 0, 0
        at = self._places(SHORT, end)
        if len(at) == MAX_CANDIDATES and len(end) >= LONG and len(self.ids) > LONG:
            longer = self._places(LONG, end)
            at = longer if len(longer) else at
        if not len(at):
            return 0, 0
        lengths = self._lengths(at, end)
        best = len(lengths) - 1 - int(np.argmax(lengths[::-1]))  # the last of the longest
        return (int(at[best]), int(lengths[best])) if lengths[best] >= SHORT else (0, 0)

    def _places(self, n: int, end: Sequence[int]) -> TokenArray:
        """The last few places where the last n tokens of `end` were followed by something."""
        if n not in self._sorted:
            hashes = _hashes(self.ids[:-1], n)
            order = np.argsort(hashes, kind="stable")
            self._sorted[n] = hashes[order], order
        hashes, order = self._sorted[n]
        wanted = _hash(end[-n:])
        first = int(hashes.searchsorted(wanted, "left"))
        if first == len(hashes) or hashes[first] != wanted:
            return order[:0]
        last = int(hashes.searchsorted(wanted, "right"))
        return order[max(first, last - MAX_CANDIDATES) : last] + n

    def _lengths(self, at: TokenArray, end: Sequence[int]) -> TokenArray:
        n = min(len(end), MAX_COMPARED)
        tail = np.array(end[-n:], dtype=np.int64)[::-1]
        places = at[:, None] - 1 - np.arange(n)[None]
        same = (self.ids[np.maximum(places, 0)] == tail[None]) & (places >= 0)
        lengths: TokenArray = np.cumprod(same, axis=1).sum(axis=1)
        return lengths


@dataclass(eq=False)
class _Replies:
    """Earlier replies: the newest is found first, the oldest is dropped first."""

    _kept: OrderedDict[int, list[int]] = field(default_factory=OrderedDict)
    _where: dict[tuple[int, ...], tuple[int, int]] = field(default_factory=dict)
    n_tokens: int = 0
    _n_ever: int = 0

    def keep(self, reply: Sequence[int]) -> None:
        tokens = list(reply[:MAX_REPLY])
        self._n_ever += 1
        self._kept[self._n_ever] = tokens
        self.n_tokens += len(tokens)
        for key, at in _keys(tokens):
            self._where[key] = (self._n_ever, at)
        while self.n_tokens > KEPT_TOKENS:
            number, dropped = self._kept.popitem(last=False)
            self.n_tokens -= len(dropped)
            for key, _ in _keys(dropped):
                if self._where.get(key, (0, 0))[0] == number:
                    del self._where[key]

    def find(self, end: Sequence[int]) -> tuple[Sequence[int], int, int]:
        """A reply, where in it the text that followed this end begins, and the match's length."""
        place = self._where.get(tuple(end[-LONG:])) if len(end) >= LONG else None
        if place is None:
            return (), 0, 0
        number, at = place
        tokens = self._kept[number]
        return tokens, at, _match(tokens, at, end)


class _RowText:
    """One row's text, and the match that it currently follows."""

    def __init__(
        self, job: Job, prompt: _FixedText, prediction: _FixedText, past: _Replies
    ) -> None:
        self.namespace, self.past = job.namespace, past
        self.reply: list[int] = []
        self._prompt = prompt
        self._prediction = prediction
        self._own = _GrowingText()
        # Replies to salted prompts are kept apart from each other, so none are kept.
        self._reads = job.cache.read
        self._writes = job.cache.write and not job.prompt.salt
        # A prediction covers the whole reply, so it is followed from the start.
        self._follows: Sequence[int] | TokenArray = self._prediction.ids
        self._at = 0
        self._length = PREDICTED if len(job.prediction) else 0

    @property
    def keeps(self) -> bool:
        return self._writes and len(self.reply) >= MIN_REPLY

    def take(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if self._length and self._at < len(self._follows) and self._follows[self._at] == token:
                self._at += 1
                self._length += 1
            else:
                self._length = 0
        self.reply.extend(tokens)
        self._own.extend(tokens)

    def draft(self, n_most: int) -> Draft:
        if not self._length or self._at >= len(self._follows):
            self._search()
        if not self._length:
            return NO_DRAFT
        follows = self._follows[self._at : self._at + n_most]
        tokens = tuple(follows.tolist() if isinstance(follows, np.ndarray) else follows)
        lengths = range(self._length, self._length + len(tokens))
        return Draft(tokens, tuple(kind_of(n) for n in lengths))

    def _search(self) -> None:
        end = self._end()
        self._length = 0
        for text in (self._prediction, self._prompt):
            at, length = text.find(end)
            self._follow(text.ids, at, length)
        at, length = self._own.find(end)
        self._follow(self._own.tokens, at, length)
        if self._reads and self._length < LONG:
            self._follow(*self.past.find(end))

    def _follow(self, tokens: Sequence[int] | TokenArray, at: int, length: int) -> None:
        if length > self._length and at < len(tokens):
            self._follows, self._at, self._length = tokens, at, length

    def _end(self) -> list[int]:
        """The last tokens of prompt and reply."""
        n_prompt = MAX_COMPARED - len(self.reply)
        if n_prompt <= 0:
            return self.reply[-MAX_COMPARED:]
        return [*self._prompt.ids[-n_prompt:].tolist(), *self.reply]


def kind_of(length: int) -> int:
    """The kind of a token drafted after a match of this length: kinds begin at 2, 4, 8, 16 and 32."""
    return min(length, MAX_LENGTH).bit_length() - 1


def _match(tokens: Sequence[int], at: int, end: Sequence[int]) -> int:
    """How many of the tokens before `at` equal the last ones of `end`."""
    n, most = 0, min(at, len(end), MAX_COMPARED)
    while n < most and tokens[at - 1 - n] == end[-1 - n]:
        n += 1
    return n


def _keys(tokens: Sequence[int]) -> list[tuple[tuple[int, ...], int]]:
    return [(tuple(tokens[at - LONG : at]), at) for at in range(LONG, len(tokens))]


def _hashes(ids: TokenArray, n: int) -> TokenArray:
    """A hash of every n consecutive tokens. Tokens with equal hashes are compared one by one."""
    n_places = len(ids) - n + 1
    total = np.zeros(max(n_places, 0), dtype=np.int64)
    for i in range(n):
        total = total * np.int64(FACTOR) + ids[i : i + len(total)]
    return total


def _hash(tokens: Sequence[int]) -> np.int64:
    """The same hash, of these tokens."""
    total = 0
    for token in tokens:
        total = (total * FACTOR + token) & 0xFFFF_FFFF_FFFF_FFFF
    return np.uint64(total).astype(np.int64)


DRAFTER = Lookup
