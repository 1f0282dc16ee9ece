"""Batches of tokens with weights, made by worker processes while the GPU trains.

A row is one dialogue cut at the bucket's length: a document that takes 30-85% of it, then as many
questions as fit. Many questions per document give far more answers per token than one each.
"""

from __future__ import annotations

import math
import multiprocessing as mp
import os
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from random import Random

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tools.demo_model.dialogues import Dialogue, plain, segments, tool_dialogue

from firn.demo.facts import FactSession, make_session, n_facts_for

LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384)
TOOL_SHARE = 0.2
TOKENS_PER_TURN = 34


@dataclass(frozen=True, slots=True)
class Batch:
    tokens: NDArray[np.int32]  # (rows, length + 1)
    is_answer: NDArray[np.float32]  # (rows, length), of the token that is predicted


@dataclass(frozen=True, slots=True)
class Row:
    tokens: list[int]
    is_answer: list[bool]


def row_of(dialogue: Dialogue, tokenizer: Tokenizer) -> Row:
    parts = list(segments(dialogue))
    encodings = tokenizer.encode_batch_fast([p.text for p in parts], add_special_tokens=False)
    tokens: list[int] = []
    is_answer: list[bool] = []
    for part, encoding in zip(parts, encodings, strict=True):
        tokens.extend(encoding.ids)
        is_answer.extend([part.is_answer] * len(encoding.ids))
    return Row(tokens, is_answer)


def dialogue_of_length(seed: int, rng: Random, n_tokens: int) -> Dialogue:
    if 512 <= n_tokens <= 2048 and rng.random() < TOOL_SHARE:
        return tool_dialogue(
            seed,
            n_facts=n_facts_for(n_tokens // 5),
            n_questions=n_tokens // 200 + 1,
            n_calls=n_tokens // 150,
        )
    n_document = n_tokens * rng.uniform(0.3, 0.85)
    n_questions = math.ceil((n_tokens - n_document) / TOKENS_PER_TURN) + 2
    n_facts = n_facts_for(int(n_document))
    return plain(make_session(seed, n_facts=n_facts, n_questions=n_questions, split="train"))


def stack(rows: Sequence[Row], n_tokens: int) -> Batch:
    tokens = np.zeros((len(rows), n_tokens + 1), np.int32)
    is_answer = np.zeros((len(rows), n_tokens + 1), np.float32)
    for i, row in enumerate(rows):
        n = min(len(row.tokens), n_tokens + 1)
        tokens[i, :n] = row.tokens[:n]
        is_answer[i, :n] = row.is_answer[:n]
    return Batch(tokens, is_answer[:, 1:])


def make_batch(rng: Random, tokenizer: Tokenizer, n_tokens: int, n_rows: int) -> Batch:
    dialogues = [dialogue_of_length(rng.getrandbits(48), rng, n_tokens) for _ in range(n_rows)]
    return stack([row_of(d, tokenizer) for d in dialogues], n_tokens)


def shares(level: int) -> list[float]:
    """How often each length up to LENGTHS[level] is drawn: the longest most, none left out."""
    return [1.0 + (i == level) for i in range(level + 1)]


class Feeder:
    """Worker processes that keep a queue of batches full. Owned by the training process.

    `level` is the index of the longest length in play; raising it takes effect with the next
    batches made.
    """

    def __init__(
        self, tokenizer: Path, *, seed: int, n_workers: int, tokens_per_batch: int
    ) -> None:
        context = mp.get_context("spawn")
        self._level: Synchronized[int] = context.Value("i", 0)
        self._queue: mp.Queue[Batch] = context.Queue(maxsize=3 * n_workers)
        self._workers = [
            context.Process(
                target=_work,
                args=(self._queue, self._level, tokenizer, f"{seed} {i}", tokens_per_batch),
                daemon=True,
            )
            for i in range(n_workers)
        ]
        for worker in self._workers:
            worker.start()

    def set_level(self, level: int) -> None:
        self._level.value = level

    def get(self) -> Batch:
        return self._queue.get()

    def close(self) -> None:
        for worker in self._workers:
            worker.terminate()


def _work(
    queue: mp.Queue[Batch], level: Synchronized[int], path: Path, seed: str, n_tokens: int
) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = Tokenizer.from_file(str(path))
    rng = Random(seed)
    while True:
        lengths = LENGTHS[: level.value + 1]
        length = rng.choices(lengths, shares(level.value))[0]
        queue.put(make_batch(rng, tokenizer, length, max(1, n_tokens // length)))


@dataclass(frozen=True, slots=True)
class HeldOutRow:
    """A held-out dialogue and the kind of each of its answers, in order."""

    row: Row
    kinds: tuple[str, ...]


def held_out_row(tokenizer: Tokenizer, n_tokens: int, *, n_questions: int, seed: int) -> HeldOutRow:
    session = held_out_session(n_tokens, n_questions=n_questions, seed=seed)
    lead = ("read",) if session.placement == "message" else ()
    kinds = lead + tuple(q.kind for q in session.questions)
    return HeldOutRow(row_of(plain(session), tokenizer), kinds)


def held_out_session(n_tokens: int, *, n_questions: int, seed: int) -> FactSession:
    """A dialogue whose first question comes after about `n_tokens` tokens."""
    return make_session(seed, n_facts=n_facts_for(n_tokens - 40), n_questions=n_questions)


def held_out_tool_row(tokenizer: Tokenizer, *, seed: int) -> HeldOutRow:
    dialogue = held_out_tools(seed)
    answers = (m for m in dialogue.messages if m["role"] == "assistant")
    kinds = tuple("call" if m.get("tool_calls") else "reply" for m in answers)
    return HeldOutRow(row_of(dialogue, tokenizer), kinds)


def held_out_tools(seed: int) -> Dialogue:
    return tool_dialogue(seed, n_facts=10, n_questions=4, n_calls=4, split="held-out")
