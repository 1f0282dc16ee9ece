"""Token ids to text, one at a time, over a short sliding window.

Invariant: the pieces together are the tokenizer's own decoding of all ids, without an incomplete
character at the end. A piece never ends inside a character: an incomplete one waits.
"""

from __future__ import annotations

import codecs

from firn.core.ports import Tokenizer

BROKEN = "\ufffd"
_Utf8 = codecs.getincrementaldecoder("utf-8")
MAX_WINDOW = 8
"""A longer window is cut down to its last piece, so that decoding stays cheap."""
MAX_PENDING = 24
"""Tokens after which incomplete bytes are passed on as broken: they may never form a character."""


class Detokenizer:
    """Owner: one choice of one reply.

    # _ids:   [0, _start) context, whole characters   [_start, ...) since the last clean point
    # _emitted: the part of the decoded window that was passed on
    """

    def __init__(self, tokenizer: Tokenizer, *, visible: frozenset[int] = frozenset()) -> None:
        self._decode = tokenizer.decode
        self._token_bytes = tokenizer.token_bytes
        self._hidden = tokenizer.special - visible
        self._ids: list[int] = []
        self._start = 0
        self._emitted = ""

    def feed(self, token: int) -> str:
        if token in self._hidden:
            return ""
        self._ids.append(token)
        text = self._decode(self._ids)
        if text.endswith(BROKEN) and self._n_incomplete_bytes():
            return self._emit_whole_characters(text)
        return self._emit(text)

    def flush(self) -> str:
        """The rest of the text, without an incomplete last character."""
        text = self._decode(self._ids)
        if text.endswith(BROKEN):
            text = self._drop_incomplete(text)
        piece = self._piece(text)
        self._ids, self._start, self._emitted = [], 0, ""
        return piece

    def _drop_incomplete(self, text: str) -> str:
        """Drop only the tokens of the unfinished character, which may break a run of bytes."""
        n_incomplete = self._n_incomplete_bytes()
        if not n_incomplete:
            return text
        while self._ids and n_incomplete >= len(self._token_bytes(self._ids[-1])):
            n_incomplete -= len(self._token_bytes(self._ids.pop()))
        text = self._decode(self._ids)
        return text.removesuffix(BROKEN) if n_incomplete else text

    def _emit(self, text: str) -> str:
        piece = self._piece(text)
        if len(self._ids) <= MAX_WINDOW and text.startswith(self._emitted):
            self._emitted = text
        else:
            self._ids = self._ids[self._start :]
            self._emitted = self._decode(self._ids)
        self._start = len(self._ids)
        return piece

    def _emit_whole_characters(self, text: str) -> str:
        """The whole characters before the unfinished one.

        A byte-fallback decoder shows a whole run of bytes as broken while its last character is
        unfinished: if the new text has more than one U+FFFD, it is unclear which characters are
        whole, so all of it waits.
        """
        stable = text[:-1]
        is_full = len(self._ids) - self._start > MAX_PENDING
        piece = stable[len(self._emitted) :] if stable.startswith(self._emitted) else ""
        if BROKEN in piece and not is_full:
            return ""
        if piece:
            self._emitted = stable
        if is_full:  # an unfinished character spans at most three tokens: keep those and one more
            self._ids = self._ids[-4:]
            self._start = 0
            self._emitted = self._decode(self._ids)[:-1]
        return piece

    def _piece(self, text: str) -> str:
        if text.startswith(self._emitted):
            return text[len(self._emitted) :]
        return self._decode(self._ids[self._start :])

    def _n_incomplete_bytes(self) -> int:
        """How many bytes at the end begin an unfinished character."""
        decoder = _Utf8("replace")
        decoder.decode(b"".join(map(self._token_bytes, self._ids[-4:])))
        pending, _ = decoder.getstate()
        return len(pending)
