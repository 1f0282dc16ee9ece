"""The first decode step reads a prompt's short rest, which saves a pass before the first token."""

from __future__ import annotations

import random
from typing import Any

import pytest

from firn.models.decode.ragged import MAX_FEED
from firn.models.speculation.drafters.lookup import Lookup
from firn.models.speculation.speculator import Speculation
from tests.cache.lab import DENSE, HYBRID, WINDOWED, LabEngine, Shape, tree
from tests.harness import Harness, running
from tests.hash_runner import prompt_of as words
from tests.models.alone import assert_same, plain, prompt_of

BLOCK = 8
KINDS = ("qwen3", "gemma3_text", "qwen3_next", "mamba2", "falcon_h1", "deepseek_v3", "llama4")


def lab_of(shape: Shape, *, rest: int = 6, **options: Any) -> LabEngine:
    lab = LabEngine(shape, cache=tree(shape, block=BLOCK, **options), chunk=16)
    lab.runner.rest_tokens = rest
    return lab


def ask(lab: LabEngine, ids: list[int], **options: Any) -> list[tuple[int, int]]:
    """Checks the reply; returns the chunks that were read for it."""
    before = len(lab.runner.prefills)
    lab.submit(ids, 12, **options).wait().check()
    lab.check()
    return lab.runner.prefills[before:]


@pytest.mark.parametrize(
    ("shape", "rest", "n_more", "n_chunks"),
    [
        (DENSE, 6, 2, 0),
        (DENSE, 6, 8, 0),
        (DENSE, 6, 9, 1),
        (WINDOWED, 3, 2, 0),
        (WINDOWED, 3, 5, 0),
        (WINDOWED, 3, 6, 1),
    ],
)
def test_it_is_read_with_the_last_token(
    shape: Shape, rest: int, n_more: int, n_chunks: int
) -> None:
    """n_more: tokens that the row has not read, including the last one of the reply and its own."""
    with lab_of(shape, rest=rest) as lab:
        first = words(1, 40)
        ask(lab, first)
        said = lab.submit(first, 12).wait().tokens()
        turn = [*first, *said, *words(2, n_more - 1)]
        assert len(ask(lab, turn)) == n_chunks
        again = lab.submit([*turn, 5], 4).wait()
        again.check()
        assert again.n_cached == len(turn), "it was stored like any other prompt"


def test_a_prompt_that_is_only_to_be_stored_is_read_to_its_end() -> None:
    with lab_of(DENSE) as lab:
        first = words(1, 40)
        ask(lab, first)
        turn = [*first, *words(2, 4)]
        before = len(lab.runner.prefills)
        lab.submit(turn, 0).wait()
        assert len(lab.runner.prefills) > before
        assert lab.submit([*turn, 5], 4).wait().n_cached >= len(turn) - 1


def test_a_prompt_that_begins_here_is_read_in_chunks() -> None:
    with lab_of(DENSE) as lab:
        assert ask(lab, words(1, 5))


def test_not_with_exact_reuse() -> None:
    with lab_of(DENSE, exact_chunk=16) as lab:
        ask(lab, words(1, 40))
        assert ask(lab, [*words(1, 40)[:32], *words(2, 4)])


def test_a_state_that_is_due_is_taken_where_it_is_due() -> None:
    with lab_of(HYBRID) as lab:
        ask(lab, words(1, 40), boundaries=[32])
        assert ask(lab, [*words(1, 40)[:32], *words(2, 7)], boundaries=[32, 38]) == [(32, 38)]


def test_not_for_several_replies_nor_beside_others() -> None:
    with lab_of(DENSE) as lab:
        first = words(1, 40)
        ask(lab, first)
        assert ask(lab, [*first, *words(2, 4)], n=2)
        before = len(lab.runner.prefills)
        turns = [[*first, *words(3 + i, 4)] for i in range(2)]
        asked = lab.between_steps(lambda: [lab.submit(turn, 12) for turn in turns])
        for outcome in asked:
            outcome.wait().check()
        assert len(lab.runner.prefills) > before


# --- real (tiny) models --------------------------------------------------------------------


def next_turns(harness: Harness, name: str, *, n_tokens: int) -> None:
    rng = random.Random(n_tokens)
    prompt = prompt_of(rng, 70)
    for _ in range(3):
        result = harness.ask(prompt, 9)
        assert assert_same(name, prompt, result.reply) > 2
        prompt = [*prompt, *result.reply, *prompt_of(rng, n_tokens)]


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_layer_reads_it(name: str) -> None:
    with running(plain(name), speculation=lambda: Speculation(Lookup()), block=16) as harness:
        n_passes = []
        prefill = harness.runner.prefill

        def counted(*args: Any, **options: Any) -> None:
            n_passes.append(args)
            prefill(*args, **options)

        harness.runner.prefill = counted  # type: ignore[method-assign]
        for n_tokens in (1, 5, MAX_FEED - 2):
            next_turns(harness, name, n_tokens=n_tokens)
        assert harness.runner.rest_tokens
        assert len(n_passes) < 9, "each turn but the first could do without"


def test_without_drafts_there_are_no_such_steps() -> None:
    with running(plain("qwen3"), block=16) as harness:
        assert harness.runner.rest_tokens == 0
        next_turns(harness, "qwen3", n_tokens=3)
