"""Sparse prefill on real models: right answers, positions, records, and what it must not change.

Slow: only trained models give right or wrong answers, and each is asked with and without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from firn.cache.admin.control import clear, stats
from firn.cache.tiers import TierOptions
from firn.cache.tiers.ssd import SsdTier
from firn.core.values import (
    CacheControl,
    Namespace,
    Prompt,
)
from firn.demo.facts import FactSession, make_session
from firn.models.load import loader
from firn.models.speculation.drafters.lookup import Lookup
from firn.models.speculation.speculator import Speculation
from firn.sparse.rules import Sparse
from firn.sparse.thinned import Thinned
from tests.cache.pending import settle
from tests.faulty_tier import Fault, FaultyTier, random_plan
from tests.harness import Harness, Result, running
from tests.oracle import MAX_REPLY, Oracle, _chat, folder_of
from tests.waiting import wait_until
from tests.zoo import VOCAB_SIZE, build

MIB = 1 << 20
RECIPE = "test;keep 0.50"


def draft_of(model: str) -> Callable[[], Any]:
    def make() -> Any:
        loaded = loader.load(folder_of(model), served_name=model)
        return loaded.model, loaded.make_layers

    return make


def document(seed: int, *, n_facts: int = 60, n_questions: int = 3) -> FactSession:
    return make_session(
        seed, n_facts=n_facts, n_questions=n_questions, kinds=("fact",), placement="message"
    )


def asked(
    oracle: Oracle, session: FactSession, n: int, *, keep: float | None, **more: Any
) -> Result:
    prompt = oracle.prompts.make(_chat(session.messages(n)))
    sparse = None if keep is None else Sparse(keep, 256)
    return oracle.submit(prompt, MAX_REPLY, eos=oracle.tokenizer.eos, sparse=sparse, **more)


def wait_idle(harness: Harness) -> None:
    wait_until(lambda: not harness.between_steps(lambda: harness.engine._loop.busy))


@pytest.mark.parametrize("draft", ["firn-demo", "firn-demo-hybrid"])
def test_answers_stay_right_and_the_next_turn_is_exact(draft: str) -> None:
    with Oracle(draft=draft_of(draft)) as oracle:
        sessions = [document(seed, n_facts=36) for seed in range(2)]
        results = [asked(oracle, s, 0, keep=0.4) for s in sessions]
        for session, result in zip(sessions, results, strict=True):
            assert oracle.text(result) == session.questions[0].answer
            assert result.n_skipped > 200
        wait_idle(oracle)
        for session in sessions:
            result = asked(oracle, session, 1, keep=0.4)
            assert oracle.text(result) == session.questions[1].answer
            assert result.n_skipped == 0
            assert result.n_cached > len(oracle.prompts.make(_chat(session.messages(0))))


def test_system_prompt_and_newest_message_are_always_read() -> None:
    with Oracle() as oracle:
        prompt = oracle.prompts.make(_chat(document(1).messages(1)))
        (_, end), (newest, n) = prompt.essential
        head = oracle.tokenizer.decode(prompt.ids[:end].tolist())
        tail = oracle.tokenizer.decode(prompt.ids[newest:].tolist())
        assert n == len(prompt)
        assert document(1).system in head
        assert document(1).document[:40] not in head
        assert document(1).questions[1].text in tail
        assert document(1).questions[0].answer not in tail


# --- exact requests ------------------------------------------------------------------------


def tiny(name: str = "llama") -> Callable[[], Any]:
    def make() -> Any:
        model = build(name)
        return model, lambda: make_prompt_cache(model)

    return make


def ids_of(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(1, VOCAB_SIZE, n).tolist()


def test_exact_requests_after_sparse_ones_are_the_same_to_the_bit() -> None:
    """On chunk boundaries, where warm equals cold, whatever sparse requests stored or deferred."""
    prompts = [ids_of(400, seed) for seed in range(3)]
    with running(tiny(), exact=True, chunk=64, block=32) as plain:
        want = [plain.ask(p, 12).logprobs for p in prompts]
    with running(tiny(), exact=True, chunk=64, block=32, draft=tiny()) as harness:
        for p, wanted in zip(prompts, want, strict=True):
            assert harness.ask(p, 12, sparse=Sparse(0.3, 64)).n_skipped > 100
            assert harness.ask(p, 12).logprobs == wanted
            harness.ask(p, 12, sparse=Sparse(0.6, 0))
            wait_idle(harness)
            assert harness.ask(p, 12).logprobs == wanted


def test_nothing_of_a_sparse_request_is_found_by_an_exact_one() -> None:
    """Even if the kept tokens happen to be another request's whole prompt."""
    prompt = ids_of(512)
    control = CacheControl(read=True, write=True)
    with running(tiny(), draft=tiny()) as harness:
        thin = thin_of(prompt, range(0, 512, 2))
        harness.ask(thin, 8, control=control)
        again = harness.ask(thin, 8)
        assert again.n_cached == len(thin) - 1
        assert harness.ask(prompt, 8).n_cached == 0
        assert harness.ask(thin.ids.tolist(), 8).n_cached == 1, (
            "the first token of the whole prompt"
        )
        other = thin_of(prompt, range(0, 512, 2), recipe="test;keep 0.51")
        assert harness.ask(other, 8).n_cached == 0, "another share, another root"
        shifted = thin_of([0, *prompt], range(1, 513, 2))
        assert harness.ask(shifted, 8).n_cached == 0, "the same tokens in other places"


def thin_of(ids: Sequence[int], positions: Sequence[int] | range, recipe: str = RECIPE) -> Prompt:
    whole, at = Prompt(np.array(ids, dtype=np.int64)), np.array(positions, dtype=np.int64)
    if at[-1] != len(ids) - 1:
        at = np.append(at, len(ids) - 1)
    return Prompt(whole.ids[at], positions=Thinned(at, whole, recipe))


def test_every_token_kept_is_the_exact_answer() -> None:
    prompt = ids_of(300)
    with running(tiny(), draft=tiny()) as harness:
        want = harness.ask(prompt, 10, control=CacheControl(False, False))
        thin = harness.ask(thin_of(prompt, range(300)), 10, control=CacheControl(False, False))
        full = harness.ask(prompt, 10, sparse=Sparse(1.0, 0), control=CacheControl(False, False))
    assert thin.logprobs == want.logprobs == full.logprobs


@pytest.mark.parametrize("n", [1, 2, 31, 33, 64])
def test_tiny_prompts(n: int) -> None:
    with running(tiny(), draft=tiny()) as harness:
        want = harness.ask(ids_of(n), 6).reply
        assert harness.ask(ids_of(n), 6, sparse=Sparse(0.01, 0)).reply == want


# --- positions -----------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["llama", "qwen3", "deepseek_v2"])
def test_rows_with_gaps_decode_in_batches_as_they_do_alone(model: str) -> None:
    thin = [thin_of(ids_of(400 + 30 * i, i), range(i, 400 + 30 * i, 2 + i)) for i in range(3)]
    whole = [ids_of(90, 10 + i) for i in range(2)]
    with running(tiny(model), max_rows=1, cache_nbytes=None) as alone:
        want = [alone.ask(p, 24) for p in (*thin, *whole)]
    with running(tiny(model), cache_nbytes=None) as harness:
        results = [harness.submit(p, 24) for p in (*thin, *whole)]
        for a, b in zip(want, results, strict=True):
            assert b.wait().error is None
            assert np.allclose(a.logprobs[0], b.logprobs[0], atol=1e-3)
            assert a.reply == b.reply


@pytest.mark.parametrize("at_once", [1, 3])
def test_guessed_tokens_of_rows_with_gaps(at_once: int) -> None:
    """A predicted reply is drafted, and the positions of the drafts are right."""
    prompts = [thin_of((ids_of(40, 3) * 12)[: 400 + i], range(i, 400, 3)) for i in range(at_once)]
    with running(tiny(), cache_nbytes=None) as plain:
        want = [plain.ask(p, 48).reply for p in prompts]
    with running(tiny(), cache_nbytes=None, speculation=lambda: Speculation(Lookup())) as harness:
        results = [harness.submit(p, 48, prediction=w) for p, w in zip(prompts, want, strict=True)]
        assert [r.wait().reply for r in results] == want
        speculation = harness.runner.speculator
        assert speculation is not None
        assert speculation.totals.view()["accepted"] > 10


# --- records -------------------------------------------------------------------------------


def test_records_of_thinned_prompts_come_back_after_a_restart(tmp_path: Path) -> None:
    thin = thin_of(ids_of(600), range(0, 600, 2))
    with on_disk(tmp_path) as first:
        want = first.ask(thin, 10)
        settle(first)
    with on_disk(tmp_path) as second:
        again = second.ask(thin, 10)
        assert again.tiers.get("ssd", 0) >= 288
        assert again.reply == want.reply
        assert second.ask(thin.whole, 4, control=CacheControl(write=False)).n_cached == 0
    with on_disk(tmp_path, recipes=()) as other:
        assert other.ask(thin.whole, 4).n_cached == 0, "a server without sparse prefill"


@contextmanager
def on_disk(path: Path, **options: Any) -> Iterator[Harness]:
    tier = SsdTier(TierOptions(str(path), 64 * MIB))
    with running(tiny(), **{"tier": tier, "recipes": (RECIPE,), **options}) as harness:
        yield harness


def test_tenants_have_their_own_and_clear_them() -> None:
    thin = thin_of(ids_of(600), range(0, 600, 2))
    with running(tiny(), draft=tiny()) as harness:
        harness.ask(thin, 8, namespace="alice")
        harness.ask(thin.whole, 8, namespace="alice")
        assert harness.ask(thin, 8, namespace="bob").n_cached == 0
        assert harness.ask(thin, 8, namespace="alice").n_cached == len(thin) - 1
        tree, alice = harness.cache, Namespace("alice")
        held = harness.between_steps(lambda: stats(tree, alice)["memory"]["tokens"])
        assert held >= len(thin) + len(thin.whole)
        harness.between_steps(lambda: clear(tree, alice))
        assert harness.ask(thin, 8, namespace="alice").n_cached == 0
        assert harness.ask(thin, 8, namespace="bob").n_cached == len(thin) - 1


def test_a_disk_that_lies_costs_time_and_no_answer(tmp_path: Path) -> None:
    """The answer is in the kept tokens; a damaged record would change it."""
    faults = (Fault.BIT_FLIP, Fault.SWAP, Fault.STALE, Fault.SHORT_READ, Fault.DROP, Fault.EIO)
    plan = random_plan(seed=2, rate=0.3, faults=faults)
    tier = FaultyTier(TierOptions(str(tmp_path), 64 * MIB), plan=plan, retry_s=0.0, max_retry_s=0.0)
    sessions = [document(seed, n_facts=30) for seed in range(4)]
    with Oracle(block=16, cache_nbytes=500_000, tier=tier, recipes=(RECIPE,)) as oracle:
        prompts = [thinned_for(oracle, s) for s in sessions]
        for _ in range(4):
            for session, prompt in zip(sessions, prompts, strict=True):
                result = oracle.submit(prompt, MAX_REPLY, eos=oracle.tokenizer.eos)
                assert oracle.text(result) == session.questions[0].answer
        settle(oracle)
        assert sum(tier.suffered.values()) > 5
        assert all(why.startswith("read: ") for why in oracle.cache.stats.faults)


def thinned_for(oracle: Oracle, session: FactSession) -> Prompt:
    """Keeps the part of the document that contains the answer."""
    whole = oracle.prompts.make(_chat(session.messages(0)))
    text = oracle.tokenizer.decode(whole.ids.tolist())
    value = session.questions[0].answer.split(" is ")[-1].rstrip(".")
    n_before = len(oracle.tokenizer.encode(text[: text.index(value)], add_special=False))
    kept = np.zeros(len(whole), dtype=np.bool_)
    for start, end in (*whole.essential, (n_before - 100, n_before + 60)):
        kept[max(start, 0) : end] = True
    at = np.flatnonzero(kept).astype(np.int64)
    return Prompt(whole.ids[at], positions=Thinned(at, whole, RECIPE))


def test_recipes_say_who_scored_and_how() -> None:
    with running(tiny(), draft=tiny()) as harness:
        recipes = harness.engine.parts.preparer.recipes
        assert len(recipes) == 100
        assert all(b"draft".hex() in recipe for recipe in recipes)
        assert recipes[29].endswith("keep 0.30")
