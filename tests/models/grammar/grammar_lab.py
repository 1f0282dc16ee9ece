"""A tiny random model with a real tokenizer: only grammars can make its replies valid."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from firn.core.values import Grammar, Sampling
from firn.models.grammar.compiler import CompiledGrammar, Compiler, Constraint
from firn.models.load.loader import load_tokenizer
from firn.models.tokenizer.hf_tokenizer import HfTokenizer
from tests import zoo
from tests.harness import Harness
from tests.models.alone import plain

MODEL = "llama"
PROMPT = list(range(40, 60))
N_VOCAB = zoo.VOCAB_SIZE


@cache
def tokenizer() -> HfTokenizer:
    with TemporaryDirectory() as path:
        zoo.write_folder(MODEL, Path(path))
        return load_tokenizer(Path(path))


@cache
def compiler() -> Compiler:
    return Compiler(tokenizer(), vocab_size=N_VOCAB)


def compiled(kind: Any, text: str = "") -> CompiledGrammar:
    return compiler().compile(Grammar(kind, text))


def harness(**options: Any) -> Harness:
    return Harness(plain(MODEL), cache_nbytes=None, **options)


def text_of(tokens: Sequence[int]) -> str:
    """The reply as a user reads it: without its end token."""
    return tokenizer().decode([t for t in tokens if t not in tokenizer().eos])


def closing_bias(weight: float) -> tuple[tuple[int, float], ...]:
    """Favours tokens that end strings, lists and objects, so that a random model finishes."""
    ids = [tokenizer().token_id(c) for c in '"]}']
    return tuple((t, weight) for t in (*ids, *tokenizer().eos) if t is not None)


def sampled(seed: int, *, weight: float = 4.0) -> Sampling:
    return Sampling(temperature=1.0, seed=seed, logit_bias=closing_bias(weight))


def allowed(constraint: Constraint) -> list[int]:
    """The tokens that may come next."""
    mask = np.frombuffer(constraint.matcher.compute_bitmask(), dtype=np.uint8)
    return [int(t) for t in np.flatnonzero(np.unpackbits(mask, bitorder="little"))]


def wander(start: Constraint, eos: frozenset[int], *, seed: int, n_most: int) -> list[int] | None:
    """A random reply that the grammar allows, without a model; None if it did not end in time."""
    rng = random.Random(seed)
    tokens: list[int] = []
    while len(tokens) < n_most:
        token = rng.choice(allowed(start))
        assert start.fault is None
        if token in eos:
            return tokens
        tokens.append(token)
        start.take([token])
        assert start.fault is None
    return None
