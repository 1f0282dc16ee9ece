"""Grammars in the real engine: each row has its own, which does not affect the others."""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from firn.core.errors import GrammarFailed
from firn.core.values import Grammar, Job, Prompt, RequestId, Sampling
from firn.models.grammar.compiler import CompiledGrammar, Compiler, Constraint
from tests import zoo
from tests.harness import GREEDY, Harness
from tests.models.alone import plain, with_caches
from tests.models.grammar.grammar_lab import (
    MODEL,
    N_VOCAB,
    PROMPT,
    allowed,
    closing_bias,
    compiled,
    harness,
    sampled,
    text_of,
    tokenizer,
    wander,
)

EOS = tokenizer().eos
POINT = json.dumps(
    {
        "type": "object",
        "properties": {
            "x": {"type": "integer", "minimum": 0, "maximum": 999},
            "label": {"type": "string", "maxLength": 20},
        },
        "required": ["x", "label"],
        "additionalProperties": False,
    }
)
ENDLESS = json.dumps({"type": "array", "items": {"type": "boolean"}, "minItems": 10_000})


@pytest.fixture(scope="module")
def lab() -> Iterator[Harness]:
    running = harness()
    yield running
    running.close()


def is_point(tokens: list[int]) -> bool:
    value = json.loads(text_of(tokens))
    return set(value) == {"x", "label"} and 0 <= value["x"] <= 999 and len(value["label"]) <= 20


# --- the languages -------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [GREEDY, sampled(1), sampled(2)])
@pytest.mark.parametrize(
    "pattern",
    [
        r"[A-Z]{3}-\d{4}",
        r"(yes|no|perhaps)( please)?",
        r"v\d+\.\d+(/[a-z]{1,4}){0,2}",
        r"[^a-z]{4,8}",
        "雪[❄️☃]{1,3}",
        r"(?i)firn",
        "",
    ],
)
def test_a_reply_matches_its_regex(lab: Harness, pattern: str, sampling: Sampling) -> None:
    said = lab.ask(PROMPT, 64, sampling=sampling, eos=EOS, grammar=compiled("regex", pattern))
    if said.reasons == {0: "stop"}:
        assert re.fullmatch(pattern, text_of(said.reply))
    else:
        assert r"\d+" in pattern  # which a random model need not end


CHOICES = ["cold", "colder", "cold as ice", "été", '"quoted"\\', "two\nlines", "<think>", ""]


def test_a_reply_is_one_of_its_choices(lab: Harness) -> None:
    grammar = compiled("choice", json.dumps(CHOICES))
    asked = [
        lab.submit(PROMPT, 40, sampling=sampled(seed, weight=0), eos=EOS, grammar=grammar)
        for seed in range(24)
    ]
    said = {text_of(a.wait().reply) for a in asked}
    assert said <= set(CHOICES)
    assert len(said) > 3
    assert {a.reasons[0] for a in asked} == {"stop"}


def test_a_reply_follows_a_lark_grammar_with_control_tokens(lab: Harness) -> None:
    grammar = compiled(
        "lark",
        'start: <think> WORD </think> <[5]> "(" item ("," item){1,3} ")"\n'
        'item: /[0-9]{2}/ | "none"\nWORD: /[a-z]{3}/',
    )
    for seed in range(6):
        said = lab.ask(PROMPT, 60, sampling=sampled(seed), eos=EOS, grammar=grammar)
        form = r"<think>[a-z]{3}</think><tool_call>\((\d\d|none)(,(\d\d|none)){1,3}\)"
        assert re.fullmatch(form, text_of(said.reply))
        assert tokenizer().token_id("<think>") == said.reply[0]


def test_a_reply_is_a_json_object(lab: Harness) -> None:
    asked = [
        lab.submit(PROMPT, 300, sampling=s, eos=EOS, grammar=compiled("json_object"))
        for s in (Sampling(temperature=0.0, logit_bias=closing_bias(20.0)), sampled(1), sampled(2))
    ]
    for each in asked:
        assert isinstance(json.loads(text_of(each.wait().reply)), dict)


# --- in a batch ----------------------------------------------------------------------------


def test_each_row_has_its_own_grammar_and_the_others_none(lab: Harness) -> None:
    """A row says the same alone and in a batch, whatever its neighbours' grammars are."""
    rng = random.Random(3)
    grammars = [None, compiled("json_schema", POINT), compiled("regex", "[a-f]{30}"), None]
    jobs: list[dict[str, Any]] = []
    for i in range(12):
        sampling = GREEDY if i % 3 else replace(sampled(i), temperature=0.8)
        ids = [rng.randrange(16, N_VOCAB) for _ in range(rng.randrange(5, 40))]
        grammar = grammars[i % 4]
        jobs.append({"ids": ids, "sampling": sampling, "grammar": grammar, "eos": EOS})
    alone = [lab.ask(**job, n_reply=50) for job in jobs]
    together = [lab.submit(**job, n_reply=50) for job in jobs]
    for job, a, b in zip(jobs, alone, together, strict=True):
        assert b.wait().reply == a.reply
        if job["grammar"] is grammars[2]:
            assert re.fullmatch("[a-f]{30}", text_of(b.reply))


def test_each_of_three_choices_satisfies_the_grammar(lab: Harness) -> None:
    grammar = compiled("json_schema", POINT)
    said = lab.ask(PROMPT, 200, n=3, sampling=sampled(5), eos=EOS, grammar=grammar)
    assert said.reasons == {0: "stop", 1: "stop", 2: "stop"}
    assert all(is_point(tokens) for tokens in said.tokens.values())
    assert len({tuple(tokens) for tokens in said.tokens.values()}) == 3
    again = lab.ask(PROMPT, 200, n=3, sampling=sampled(5), eos=EOS, grammar=grammar)
    assert again.tokens == said.tokens


@pytest.mark.parametrize("n_reply", [1, 2, 7])
def test_a_reply_that_is_cut_says_so(lab: Harness, n_reply: int) -> None:
    grammar = compiled("json_schema", ENDLESS)
    said = lab.ask(PROMPT, n_reply, sampling=sampled(1), eos=EOS, grammar=grammar)
    assert said.reasons == {0: "length"}
    assert len(said.reply) == n_reply
    start = grammar.start()
    start.take(said.reply)
    assert start.fault is None


def test_the_last_token_of_a_whole_reply_may_be_the_last_of_all(lab: Harness) -> None:
    """The end token has no room left: the text is whole, and the reason is still the length."""
    said = lab.ask(PROMPT, 3, eos=EOS, grammar=compiled("regex", "[xyz]{3}"))
    assert (len(text_of(said.reply)), said.reasons[0]) == (3, "length")


def test_a_cancelled_row_leaves_the_others_alone(lab: Harness) -> None:
    alone = lab.ask(PROMPT, 60, grammar=compiled("json_schema", ENDLESS))
    gone = lab.submit(
        PROMPT, 100_000, sampling=sampled(1), grammar=compiled("json_schema", ENDLESS)
    )
    stays = lab.submit(PROMPT, 60, grammar=compiled("json_schema", ENDLESS))
    request = next(key for key, result in lab.results.items() if result is gone)
    while not gone.reply:
        lab.engine.call(lambda _: None).result(30)  # a step further
    lab.engine.cancel(request)
    assert stays.wait().reply == alone.reply
    n_said = len(gone.reply)
    lab.ask(PROMPT, 4)
    assert len(gone.reply) == n_said
    assert not gone.finished.is_set()


# --- nothing outweighs the mask ------------------------------------------------------------


def test_a_bias_does_not_outweigh_a_grammar(lab: Harness) -> None:
    grammar = compiled("choice", '["ab", "ac"]')
    wanted = tuple((t, 100.0) for t in range(16, 40)) + tuple((t, 100.0) for t in EOS)
    unwanted = tuple((t, -100.0) for t in (tokenizer().token_id("a"),) if t is not None)
    for temperature in (0.0, 1.0, 2.0):
        sampling = Sampling(
            temperature=temperature,
            seed=1,
            top_k=5,
            min_p=0.3,
            repetition_penalty=5.0,
            presence_penalty=2.0,
            frequency_penalty=2.0,
            logit_bias=(*wanted, *unwanted),
        )
        said = lab.ask(PROMPT, 10, sampling=sampling, eos=EOS, grammar=grammar)
        assert text_of(said.reply) in ("ab", "ac")
        assert said.reasons == {0: "stop"}


def test_a_forced_token_comes_where_the_grammar_has_it_and_nowhere_else(lab: Harness) -> None:
    """The token is forced while nothing runs: the engine's thread waits."""
    vocabulary = tokenizer()
    c, z = vocabulary.token_id("c"), vocabulary.token_id("z")
    assert c is not None
    assert z is not None
    for token, wants in ((c, "abc"), (z, "ab[cd]")):
        gate = threading.Event()
        lab.engine.call(lambda _, gate=gate: gate.wait(30))  # type: ignore[misc]
        said = lab.submit(PROMPT, 10, eos=EOS, grammar=compiled("regex", "ab[cd]"))
        request = next(key for key, result in lab.results.items() if result is said)
        lab.engine.force(request, 0, [token], at=2)
        gate.set()
        assert re.fullmatch(wants, text_of(said.wait().reply))


def test_logprobs_are_the_models_own(lab: Harness) -> None:
    said = lab.ask(PROMPT, 10, eos=EOS, grammar=compiled("choice", '["ab"]'))
    assert len(said.logprobs[0]) == len(said.reply)
    assert all(p < 0 for p in said.logprobs[0])


# --- faults --------------------------------------------------------------------------------


class Broken:
    """A compiled grammar whose constraint is at odds with the reply from the start."""

    def start(self) -> Constraint:
        constraint = compiled("choice", '["ab"]').start()
        constraint.matcher.consume_token(200)
        return constraint


def test_a_fault_of_the_grammar_ends_its_own_request_only(lab: Harness) -> None:
    alone = lab.ask(PROMPT, 40, eos=EOS, grammar=compiled("json_schema", ENDLESS))
    free = lab.ask(PROMPT[:9], 40)
    neighbour = lab.submit(PROMPT, 40, eos=EOS, grammar=compiled("json_schema", ENDLESS))
    other = lab.submit(PROMPT[:9], 40)
    broken = lab.submit(PROMPT, 40, eos=EOS, grammar=Broken())
    assert isinstance(broken.wait().error, GrammarFailed)
    assert "grammar" in str(broken.error)
    assert broken.reply == []
    assert neighbour.wait().reply == alone.reply
    assert other.wait().reply == free.reply


FAILED = threading.Event()


class FailingOnce:
    """A model that fails once, at the given call."""

    def __init__(self, model: Any, at: int) -> None:
        self._model = model
        self._left = at

    def __call__(self, *args: Any, **options: Any) -> mx.array:
        self._left -= 1
        if self._left == 0:
            FAILED.set()
            raise RuntimeError("injected")
        return self._model(*args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def test_after_a_failed_step_the_grammar_goes_on_where_it_was() -> None:
    grammar = compiled("json_schema", POINT)
    jobs = [{"sampling": GREEDY}, {"sampling": sampled(7)}]

    def failing() -> Any:
        model, make_layers = plain(MODEL)()
        return FailingOnce(model, at=14), make_layers

    replies = []
    for build in (plain(MODEL), failing):
        running = Harness(build, cache_nbytes=None)
        asked = [running.submit(PROMPT, 200, eos=EOS, grammar=grammar, **job) for job in jobs]
        replies.append([a.wait().reply for a in asked])
        assert all(is_point(a.reply) for a in asked[1:])
        running.close()
    assert FAILED.is_set()
    assert replies[0] == replies[1]


# --- models and vocabularies --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["gemma3_text", "qwen3_next", "mamba2", "deepseek_v3", "falcon_h1"]
)
def test_grammars_hold_on_every_kind_of_layer(name: str) -> None:
    """Windows, gated deltas, states, latent pages, cache lists; rows with and without grammars."""
    running = Harness(plain(name), cache_nbytes=None)
    grammars = [compiled("regex", "[a-f]{6}!"), None, compiled("choice", '["yes", "no"]')]
    asked = [
        running.submit(PROMPT[: 8 + i], 12, eos=EOS, grammar=grammar)
        for i, grammar in enumerate(grammars)
    ]
    for each in asked:
        assert each.wait().error is None
    assert re.fullmatch("[a-f]{6}!", text_of(asked[0].reply))
    assert text_of(asked[2].reply) in ("yes", "no")
    running.close()


def test_padding_beyond_the_vocabulary_is_never_picked() -> None:
    entry = zoo.ZOO[MODEL]
    wide = replace(entry, config={**entry.config, "vocab_size": N_VOCAB + 77})
    running = Harness(lambda: with_caches(zoo.build_entry(wide)), cache_nbytes=None)
    grammar = Compiler(tokenizer(), vocab_size=N_VOCAB + 77).compile(Grammar("regex", "(?s:.{20})"))
    bias = tuple((t, 50.0) for t in range(N_VOCAB, N_VOCAB + 77))
    for temperature in (0.0, 1.0):
        sampling = Sampling(temperature=temperature, seed=1, logit_bias=bias)
        said = running.ask(PROMPT, 90, sampling=sampling, eos=EOS, grammar=grammar)
        assert max(said.reply) < N_VOCAB
        assert said.reasons == {0: "stop"}
    running.close()


def test_ids_that_the_model_lacks_are_never_picked() -> None:
    """Ids that the model has no logits for: their bits are cut off."""
    entry = zoo.ZOO[MODEL]
    narrow = replace(entry, config={**entry.config, "vocab_size": N_VOCAB - 60})
    running = Harness(lambda: with_caches(zoo.build_entry(narrow)), cache_nbytes=None)
    grammar = Compiler(tokenizer(), vocab_size=N_VOCAB - 60).compile(Grammar("regex", "[a-z]{9}"))
    said = running.ask(PROMPT, 20, eos=EOS, grammar=grammar)
    assert re.fullmatch("[a-z]{9}", text_of(said.reply))
    running.close()


# --- pipelining ----------------------------------------------------------------------------


def test_only_a_group_with_a_grammar_reads_ahead(lab: Harness) -> None:
    """Without one, a launch waits for nothing: the previous step is still unread after it."""

    def steps(grammar: CompiledGrammar | None) -> list[bool]:
        def run(parts: Any) -> list[bool]:
            runner = parts.runner
            row = runner.start(None)
            prompt = Prompt(np.array(PROMPT))
            job = Job(RequestId("x"), prompt, 8, GREEDY, grammar=grammar)
            runner.prefill(row, job.prompt, len(job.prompt) - 1)
            rows = runner.choices(row, job, [0])
            runner.join(rows[0], 7)
            runner.launch(rows)
            runner.launch(rows)
            is_read = [step._taken is not None for step in rows[0].group.unread]
            assert len(runner.collect(rows, keep_in_flight=1)) == 1
            runner.leave(rows)
            return is_read

        return lab.engine.call(run).result(30)

    assert steps(None) == [False, False]
    assert steps(compiled("json_schema", ENDLESS)) == [True, False]


# --- without a model -----------------------------------------------------------------------


def test_masks_follow_the_text_and_not_its_tokens() -> None:
    start = compiled("choice", '["abc", "abd"]').start()
    pieces = {tokenizer().decode([t]) for t in allowed(start)}
    assert pieces <= {"a", "ab", "abc", "abd"}
    start.take(tokenizer().encode("ab", add_special=False))
    assert {tokenizer().decode([t]) for t in allowed(start)} <= {"c", "d"}


def test_a_walk_through_a_grammar_ends_in_what_it_says() -> None:
    for seed in range(5):
        walk = wander(compiled("regex", "[a-z]{2,5}!").start(), EOS, seed=seed, n_most=50)
        assert walk is not None
        assert re.fullmatch("[a-z]{2,5}!", text_of(walk))


class CountingMatcher:
    """Counts how often the text that must come next is computed."""

    def __init__(self, constraint: Constraint) -> None:
        self._matcher = constraint.matcher
        self.n_computed = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)

    def compute_ff_tokens(self) -> list[int]:
        self.n_computed += 1
        return self._matcher.compute_ff_tokens()


def watched(grammar: CompiledGrammar) -> tuple[Constraint, CountingMatcher]:
    constraint = grammar.start()
    matcher = CountingMatcher(constraint)
    constraint.matcher = matcher  # type: ignore[assignment]
    return constraint, matcher


def test_text_that_must_come_next_is_not_computed_for_each_token() -> None:
    """That takes as long as the text is: a long constant would hold up every other reply."""
    rng = random.Random(0)
    text = json.dumps("".join(rng.choice("abcdefgh ") for _ in range(3000)))
    grammar = compiled("json_schema", json.dumps({"const": json.loads(text)}))
    follows, matcher = watched(grammar)
    said: list[int] = []
    while tokens := follows.forced(31):
        assert len(tokens) <= 31
        follows.take(tokens)
        said += tokens
    assert text.startswith(text_of(said))
    assert len(text_of(said)) > 2900
    assert matcher.n_computed <= 3
    splits, matcher = watched(grammar)
    for i, letter in enumerate(text[:1000], 1):  # in other tokens than those that were forced
        token = tokenizer().token_id(letter)
        assert token is not None
        splits.take([token])
        assert text[i:].startswith(text_of(splits.forced(31)))
    assert splits.fault is None
    assert 10 < matcher.n_computed < 100


def test_text_that_must_come_next_follows_what_was_picked() -> None:
    """After a choice it is that choice's, whatever was computed before."""
    texts = ["the same words, and then one", "the same, or another"]
    for text in texts:
        constraint, said = compiled("choice", json.dumps(texts)).start(), ""
        while said != text:
            forced = constraint.forced(4)
            assert text.startswith(said + text_of(forced))
            ahead = forced[:1] or tokenizer().encode(text[len(said) :], add_special=False)[:1]
            constraint.take(ahead)
            said += text_of(ahead)
        assert constraint.fault is None
