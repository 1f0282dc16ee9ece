"""Random use of everything at once: no record and no reply differs from a fresh computation.

Requests branch, repeat, grow, are edited, joined, cancelled and stopped between any two steps, over
every kind of layer, with drafts of every kind and of every width. Afterwards each record of the tree
is compared with what its tokens give in a model of its own, and each reply with the model's own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from firn.cache.layout import Layout
from firn.cache.prefix import CacheSettings, PrefixTree
from firn.core.values import Job, RequestId
from firn.models.mtp import MtpModel, with_head_layer
from firn.models.speculation.drafters import Draft
from firn.models.speculation.drafters.lookup import Lookup
from firn.models.speculation.drafters.model import ModelDrafter
from firn.models.speculation.drafters.mtp import MtpDrafter
from firn.models.speculation.speculator import Speculation
from tests.audit import wrong_records
from tests.harness import Harness, Result, running
from tests.models.alone import TIE, Built, prompt_of
from tests.models.speculation.drafters.test_model import AsksWhenReady
from tests.models.speculation.drafters.test_mtp import random_head
from tests.models.speculation.drafting import AnyWidth
from tests.zoo import VOCAB_SIZE, ZOO, Entry, build_entry


def widened(name: str, window: int) -> Entry:
    entry = ZOO[name]
    return replace(entry, config={**entry.config, "sliding_window": window})


@dataclass(frozen=True)
class Kind:
    """A model, and how its cache is used. longest: of a prompt."""

    entry: Entry
    block: int = 32
    longest: int = 500
    kv_bits: int = 0

    has_head: bool = False

    def build(self) -> Built:
        model = build_entry(self.entry)
        if not self.has_head:
            return model, lambda: list(make_prompt_cache(model))
        head = random_head(model, self.entry.name)
        return MtpModel(model, head), with_head_layer(lambda: list(make_prompt_cache(model)))


KINDS = {
    "dense": Kind(ZOO["qwen3"]),
    "window of a third of a block": Kind(widened("gpt_oss", 44), block=128, longest=700),
    "window smaller than a block": Kind(widened("gpt_oss", 80), block=128, longest=700),
    "window of a block": Kind(ZOO["gemma3_text"], block=32),
    "window just larger than a block": Kind(widened("gemma3_text", 80), block=64),
    "window of many blocks": Kind(widened("gemma3_text", 96), block=16),
    "chunked": Kind(ZOO["llama4_text"]),
    "latent": Kind(ZOO["deepseek_v3"]),
    "hybrid": Kind(ZOO["qwen3_next"]),
    "attention and state in a layer": Kind(ZOO["falcon_h1"]),
    "quantised": Kind(ZOO["qwen3"], kv_bits=8),
    "latent with a head": Kind(ZOO["deepseek_v3"], has_head=True),
    "hybrid with a head": Kind(ZOO["qwen3_next"], has_head=True),
}


@dataclass
class Foreseen:
    """A row's text, what the model will say next, and the model's caches after all but the last token
    of both."""

    text: list[int]
    next: list[int] = field(default_factory=list)
    layers: list[Any] = field(default_factory=list)


class Clairvoyant:
    """Drafts what the model itself would say, with a wrong token now and then. Costs a step a token."""

    is_free = True

    def __init__(self, kind: Kind, *, right: float) -> None:
        self._kind = kind
        self._right = right
        self._rng = random.Random(0)
        self._model: Any = None
        self._rows: dict[Hashable, Foreseen] = {}

    def odds(self, kind: int) -> float:
        return 0.5

    def open(self, row: Hashable, job: Job) -> None:
        if self._model is None:  # on the engine's thread
            self._model, self._make_layers = self._kind.build()
        self._rows[row] = Foreseen(job.prompt.ids.tolist())

    def prepare(self, row: Hashable) -> bool:
        return True

    def took(self, row: Hashable, tokens: Sequence[int]) -> None:
        seen = self._rows[row]
        seen.text += tokens
        if seen.next[: len(tokens)] == list(tokens):
            del seen.next[: len(tokens)]
        else:
            seen.next, seen.layers = [], []

    def draft(self, rows: Sequence[Hashable], n_most: int) -> list[Draft]:
        return [self._draft(self._rows[row], n_most) for row in rows]

    def _draft(self, seen: Foreseen, n: int) -> Draft:
        if not seen.layers:
            seen.layers = self._make_layers()
            if len(seen.text) > 1:
                self._model(mx.array([seen.text[:-1]]), cache=seen.layers)
        while len(seen.next) < n:
            newest = seen.next[-1] if seen.next else seen.text[-1]
            logits = self._model(mx.array([[newest]]), cache=seen.layers)
            seen.next.append(int(mx.argmax(logits[0, -1]).item()))
        tokens = [
            t if self._rng.random() < self._right else (t + 1) % VOCAB_SIZE for t in seen.next[:n]
        ]
        return Draft(tuple(tokens), (0,) * n)

    def close(self, row: Hashable) -> None:
        self._rows.pop(row, None)

    def end(self) -> None:
        self._rows.clear()


def clairvoyant(kind: Kind) -> Speculation:
    return AnyWidth(Clairvoyant(kind, right=0.98), least=2, most=32)


def lookups(kind: Kind) -> Speculation:
    return AnyWidth(Lookup(), most=32)


def draft_model(kind: Kind) -> Speculation:
    model, make_layers = SMALL.build()
    settings = CacheSettings(1 << 30, SMALL.block)
    cache = PrefixTree(Layout.of(make_layers()), settings, fingerprint=b"small", dtype="float32")
    return AsksWhenReady(ModelDrafter(model, make_layers, cache=cache, batchable=True, chunk=32))


SMALL = Kind(widened("gemma3_text", 80), block=128)
DRAFTS: dict[str, Callable[[Kind], Speculation] | None] = {
    "no drafts": None,
    "right drafts": clairvoyant,
    "lookups": lookups,
    "draft model": draft_model,
}
N_ACTIONS = 30
SAMPLED = ("dense", "window smaller than a block", "hybrid")
"""Kinds that are tried with drafts of every sort, and the others only with right ones."""


@dataclass
class User:
    """Does something at random between two steps."""

    harness: Harness
    rng: random.Random
    longest: int
    asked: list[tuple[list[int], Result]] = field(default_factory=list)

    def act(self) -> None:
        running_now = [i for i, (_, r) in enumerate(self.asked) if not r.finished.is_set()]
        choice = self.rng.random()
        if choice < (0.3, 0.15, 0.05, 0.05, 0.05)[min(len(running_now), 4)]:
            self._ask(self._prompt())
        elif choice < 0.33 and running_now:
            gone = self.rng.choice(running_now)
            self.harness.engine.cancel(self._id(gone))
            self.asked[gone][1].finished.set()  # nothing tells of its end
        elif choice < 0.36 and running_now:
            self.harness.engine.stop_choice(self._id(self.rng.choice(running_now)), 0)

    def _ask(self, prompt: list[int]) -> None:
        n_reply = self.rng.choice((1, 3, 40, 200))
        self.asked.append((prompt, self.harness.submit(prompt, n_reply)))

    def _id(self, i: int) -> RequestId:
        return RequestId(str(i))

    def _prompt(self) -> list[int]:
        """New, or something that was said: again, continued, cut off or edited."""
        if not self.asked or self.rng.random() < 0.15:
            return prompt_of(self.rng, self.rng.randint(2, self.longest // 2))
        prompt, result = self.rng.choice(self.asked)
        said = [*prompt, *result.reply]
        how = self.rng.random()
        if how < 0.4:
            return list(prompt)
        if how < 0.5 and len(said) > 4:
            said = said[: self.rng.randint(2, len(said))]
        elif how < 0.6:
            said[self.rng.randrange(len(said))] = 17
        return [*said, *prompt_of(self.rng, self.rng.randint(1, 40))][: self.longest]


def unlike(kind: Kind, asked: list[tuple[list[int], Result]]) -> list[str]:
    """The replies that the model alone would not give."""
    model, make_layers = kind.build()
    wrong = []
    for prompt, result in asked:
        reply = result.reply
        if not reply:
            continue
        layers = make_layers()
        if len(prompt) > 1:
            model(mx.array([prompt[:-1]]), cache=layers)
            mx.eval([layer.state for layer in layers])
        logits = model(mx.array([[prompt[-1], *reply[:-1]]]), cache=layers)[0]
        best = mx.sort(logits, axis=-1)
        margins = (best[:, -1] - best[:, -2]).tolist()
        for i, (got, token) in enumerate(
            zip(reply, mx.argmax(logits, axis=-1).tolist(), strict=True)
        ):
            if got != token:
                if margins[i] > TIE:
                    wrong.append(f"token {i} after {len(prompt)}, {result.n_cached} of them cached")
                break
    return wrong


def audit(harness: Harness, kind: Kind) -> None:
    """Assert that all records of the model, and of a draft model, are right."""

    def wrong_of(cache: PrefixTree, kind: Kind) -> tuple[int, list[str]]:
        model, make_layers = kind.build()
        layers = make_layers()
        model(mx.array([[1]]), cache=layers)  # its heads' width decides how it is quantised
        layout = Layout.of(layers, kv_bits=kind.kv_bits)
        return wrong_records(cache, layout, model, make_layers)

    caches = [(harness.cache, kind)]
    speculator = harness.runner.speculator
    for one in speculator._drafters if isinstance(speculator, Speculation) else ():
        if isinstance(one, ModelDrafter):
            caches.append((one._cache, SMALL))
    for cache, of in caches:
        n_compared, wrong = harness.between_steps(partial(wrong_of, cache, of))
        assert not wrong, f"{len(wrong)} of {n_compared} records: {wrong[:5]}"
        assert not cache.stats.faults, cache.stats.faults


def use(
    kind: Kind, drafts: Callable[[Kind], Speculation] | None, seed: int, n_actions: int
) -> User:
    models: list[Any] = []

    def build() -> Built:
        built = kind.build()
        models.append(built[0])
        return built

    options: dict[str, Any] = {"block": kind.block, "kv_bits": kind.kv_bits, "max_rows": 4}
    if kind.has_head:
        options["speculation"] = lambda: AsksWhenReady(MtpDrafter(models[0]))
    elif drafts is not None:
        options["speculation"] = partial(drafts, kind)
    with running(build, chunk=64, **options) as harness:
        user = User(harness, random.Random(seed), kind.longest)
        while len(user.asked) < n_actions:
            harness.between_steps(user.act)
        for _, result in user.asked:
            result.wait()

        audit(harness, kind)
    assert not any(result.error for _, result in user.asked)
    if not kind.kv_bits:  # quantised prefixes are not exact
        wrong = unlike(kind, user.asked)
        assert not wrong, f"{len(wrong)} of {len(user.asked)} replies: {wrong[:5]}"
    return user


@pytest.mark.parametrize(
    ("name", "drafts"),
    [(n, d) for n in KINDS for d in DRAFTS if n in SAMPLED or d == "right drafts"],
)
def test_random_use(name: str, drafts: str) -> None:
    user = use(KINDS[name], DRAFTS[drafts], 1, N_ACTIONS)
    assert sum(result.n_cached for _, result in user.asked) > 10 * len(user.asked)


@pytest.mark.soak
@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("name", KINDS)
def test_random_use_for_minutes(name: str, drafts: str) -> None:
    for seed in range(100, 105):
        use(KINDS[name], DRAFTS[drafts], seed, 4 * N_ACTIONS)


@pytest.mark.parametrize("name", [name for name in KINDS if name.startswith("window")])
def test_a_row_that_drafts_alone_is_joined_by_a_prompt_that_is_stored_whole(name: str) -> None:
    """The join reads its unread step and changes its layers, before the engine commits its tokens."""
    kind, rng = KINDS[name], random.Random(7)
    speculation = partial(clairvoyant, kind)
    with running(kind.build, chunk=64, block=kind.block, speculation=speculation) as harness:
        stored = prompt_of(rng, 90)
        harness.ask(stored, 1)
        for n in range(20, 130, 11):
            one = harness.submit(prompt_of(rng, 64 + n % 50), 200)
            while len(one.reply) < n:
                harness.between_steps(lambda: None)
            other = harness.between_steps(lambda: harness.submit(stored, 3))
            assert other.wait().n_cached == len(stored) - 1
            one.wait()
        audit(harness, kind)


@pytest.mark.parametrize("right", [True, False])
def test_a_draft_model_with_windows_finds_its_replies_again(right: bool) -> None:
    """It stores its windows while it drafts: right drafts are consumed, wrong ones are cut off."""
    kind = replace(SMALL, block=64) if right else KINDS["dense"]
    made: list[Any] = []

    def speculation() -> Speculation:
        made.append(draft_model(kind))
        return made[0]

    with running(kind.build, chunk=64, speculation=speculation) as harness:
        said = prompt_of(random.Random(3), 60)
        for _ in range(3):
            said += harness.ask(said, 220).reply
        audit(harness, kind)
        own = made[0]._drafters[0]._cache
        assert own.stats.n_tokens_cached > 60 + 2 * 200
    assert made[0].totals.n_drafted > 100


@pytest.mark.parametrize("right", [True, False])
def test_a_draft_model_keeps_true_tokens_only_while_its_rows_come_and_go(right: bool) -> None:
    """A row that leaves, or a pass for one row, drops what was drafted for the others; and a row that
    is left alone has plain layers again."""
    kind, rng = SMALL if right else KINDS["dense"], random.Random(11)
    with running(kind.build, chunk=64, speculation=partial(draft_model, kind)) as harness:
        for _ in range(4):
            asked = [harness.submit(prompt_of(rng, 40), n) for n in (25, 70, 90, 160)]
            for result in asked:
                result.wait()
        audit(harness, kind)
