"""What is said in random use: tokens and pictures as a list of numbers, and the prompts they make.

A text is a list of units that can be cut, edited and continued anywhere: a token, or the picture `-n`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from firn.core.keys import key_tokens, prompt_tokens
from firn.core.values import KeyTokens, PicturePart, PictureSpan, Prompt
from firn.models.model_arguments import ModelArguments
from firn.models.vision.picture import Picture
from firn.sparse.thinned import Thinned
from tests.audit import Past
from tests.models.integers import PRIME
from tests.models.vision import gallery

PLACEHOLDER, MARKUP = 9, 10
"""Tokens that the models of integers never say."""
N_PICTURES = 6
"""That are ever shown. Each has two that are as large as it is, so that nothing but a digest differs."""
POSITION_BITS = np.uint64(32)


@dataclass(frozen=True)
class Shown:
    digest: bytes
    picture: Picture


@cache
def of_integers(number: int) -> Shown:
    """A picture for the models of integers: of few tokens, of a block and more, or of several chunks."""
    n = (5, 43, 90)[number % 3]
    own = np.full(n, PLACEHOLDER, dtype=np.int64)
    ids = np.concatenate([[MARKUP], own, [MARKUP]])
    pixels = 1 + np.random.default_rng(number).integers(0, PRIME - 1, n)
    return Shown(
        f"picture {number}".encode(), Picture(ids, 1, 1 + n, PLACEHOLDER, {"pixels": pixels})
    )


def of_family(name: str) -> Callable[[int], Shown]:
    """Pictures for a family of mlx-vlm, as its processor prepares them."""

    @cache
    def shown(number: int) -> Shown:
        part = gallery.part(number)
        assert isinstance(part, PicturePart)
        prepared = gallery.pictures(name).prepare(part)
        return Shown(prepared.digest, prepared.inputs)

    return shown


def no_picture(number: int) -> Shown:
    raise AssertionError("this model sees no pictures")


class Prompts:
    """Makes prompts of what is said, and of the key tokens that a cache stores."""

    def __init__(self, shown: Callable[[int], Shown] = no_picture, *, whole: bool = False) -> None:
        """whole: no pass may cut a picture."""
        self._shown = shown
        self._whole = whole
        self._salted: dict[int, int] = {}
        """The first tokens of prompts with a salt, by key token."""
        self._seen: dict[int, tuple[Shown, int]] = {}
        """By key token: which picture's, and which of its tokens."""

    def make(self, said: Sequence[int], **more: Any) -> Prompt:
        ids: list[int] = []
        spans: list[PictureSpan] = []
        inputs: list[Picture] = []
        for unit in said:
            if unit >= 0:
                ids.append(unit)
                continue
            shown = self._shown(-unit)
            picture = shown.picture
            spans.append(
                PictureSpan(len(ids) + picture.first, len(ids) + picture.last, shown.digest)
            )
            inputs.append(picture)
            ids += picture.ids.tolist()
        self._remember(spans, inputs)
        prompt = self._prompt(ids, spans, inputs, **more)
        if prompt.salt:
            self._salted[int(prompt_tokens(prompt)[0])] = ids[0]
        return prompt

    def _prompt(
        self,
        ids: Sequence[int],
        spans: Sequence[PictureSpan],
        inputs: Sequence[Picture],
        **more: Any,
    ) -> Prompt:
        array = np.array(ids, dtype=np.int64)
        seen = {"picture_spans": tuple(spans), "picture_inputs": tuple(inputs)}
        return Prompt(array, whole_pictures=self._whole, **seen, **more)

    def _remember(self, spans: Sequence[PictureSpan], inputs: Sequence[Picture]) -> None:
        for span, picture in zip(spans, inputs, strict=True):
            own = PictureSpan(0, span.end - span.start, span.digest)
            keys = key_tokens(picture.own_ids, [own]).tolist()
            shown = Shown(span.digest, picture)
            self._seen |= {key: (shown, i) for i, key in enumerate(keys)}

    def of_keys(self, keys: KeyTokens) -> Prompt:
        """A prompt that begins with these key tokens. If they end in a picture, it ends with it."""
        positions = keys[1:] >> POSITION_BITS
        ids: list[int] = []
        spans: list[PictureSpan] = []
        inputs: list[Picture] = []
        for key in keys.tolist():
            shown, i = self._seen.get(key, (None, 0))
            if shown is None:
                ids.append(self._salted.get(key, key % (1 << 32)))
                continue
            if i == 0:
                spans.append(PictureSpan(len(ids), len(ids) + _n_own(shown), shown.digest))
                inputs.append(shown.picture)
            ids.append(int(shown.picture.own_ids[i]))
        if spans and spans[-1].end > len(ids):
            ids += inputs[-1].own_ids[len(ids) - spans[-1].start :].tolist()
        prompt = self._prompt(ids, spans, inputs)
        if spans or not positions.any():
            return prompt
        kept = np.concatenate([[0], positions]).astype(np.int64)
        return Prompt(prompt.ids, positions=Thinned(kept, prompt, "any"))


def _n_own(shown: Shown) -> int:
    return shown.picture.last - shown.picture.first


class Reader:
    """Computes prompts with a model alone: without rows, groups and a cache."""

    def __init__(
        self,
        model: Any,
        make_layers: Callable[[], list[Any]],
        arguments: ModelArguments,
        prompts: Prompts,
    ) -> None:
        self.model = model
        self.make_layers = make_layers
        self._arguments = arguments
        self._prompts = prompts

    def read(self, prompt: Prompt, start: int, end: int, layers: list[Any]) -> mx.array:
        """Logits (tokens, vocabulary) of its tokens [start, end). layers: hold those before them."""
        arguments = self._arguments.chunk(prompt, start, end)
        ids = mx.array(prompt.ids[start:end].astype(np.int32))[None]
        with self._arguments.reading(layers, prompt, start, end) as seen:
            logits: mx.array = self.model(ids, cache=seen, **arguments)
        return logits[0]

    def __call__(self, chain: KeyTokens, past: Past) -> Past:
        """Implements audit.Fresh. A picture that no pass may cut is read to its end."""
        prompt = self._prompts.of_keys(chain)
        inside = (end for start, end in prompt.unbroken if start < len(chain) < end)
        own, end = copy.deepcopy(past.layers), next(inside, len(chain))
        if end > past.n_tokens:
            self.read(prompt, past.n_tokens, end, own)
            mx.eval([layer.state for layer in own])
        return Past(own, max(end, past.n_tokens))

    def past(self, prompt: Prompt, n_tokens: int) -> list[Any]:
        """Layers that hold its first tokens, read in one pass."""
        layers = self.make_layers()
        if n_tokens:
            self.read(prompt, 0, n_tokens, layers)
            mx.eval([layer.state for layer in layers])
        return layers
