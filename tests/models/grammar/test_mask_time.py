"""An owner whose grammars take long for each token holds up the others only for a share of the time."""

from __future__ import annotations

import numpy as np
import pytest

from firn.core.errors import KeyLimit
from firn.core.values import Grammar
from firn.models.decode.masks import Masks
from firn.models.grammar import mask_time
from firn.models.grammar.compiler import Compiler, Constraint
from firn.models.grammar.mask_time import BURST_S, SHARE, SLOW_S, MaskTimes
from tests.models.grammar.grammar_lab import N_VOCAB, tokenizer

LETTERS = Grammar("regex", "a+b")
OTHERS = Grammar("regex", "c+d")


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Lab:
    def __init__(self) -> None:
        self.clock = Clock()
        self.times = MaskTimes(self.clock)
        self.compiler = Compiler(tokenizer(), vocab_size=N_VOCAB, mask_times=self.times)

    def begun(self, grammar: Grammar, owner: str) -> Constraint:
        return self.compiler.compile(grammar, owner).start()

    def wastes(self, owner: str) -> None:
        self.times.of(owner).spend(2 * BURST_S)


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> Lab:
    """What its own masks take does not count, however slow the machine is."""
    monkeypatch.setattr(mask_time, "SLOW_S", 1.5 * BURST_S)
    return Lab()


def fill(*constraints: Constraint) -> None:
    Masks(N_VOCAB).fill(constraints)


def write(constraint: Constraint, text: str) -> None:
    constraint.take(tokenizer().encode(text, add_special=False))


def test_only_what_is_slow_counts_and_time_pays_it_back() -> None:
    clock = Clock()
    time = MaskTimes(clock).of("x")
    assert not time.spend(SLOW_S)
    assert not time.is_spent
    assert time.spend(BURST_S)
    assert not time.is_spent
    assert time.spend(SHARE)
    assert time.is_spent
    assert time.recovers_in_s == 1
    clock.now_s = 1.5
    assert not time.is_spent
    clock.now_s = 1000.0
    assert time.spend(BURST_S)
    assert not time.is_spent, "it does not save up"


def test_replies_of_an_owner_whose_time_is_spent_end(lab: Lab) -> None:
    choices = [lab.begun(LETTERS, "x") for _ in range(20)]
    other = lab.begun(LETTERS, "y")
    lab.wastes("x")
    fill(*choices, other)
    assert all(c.fault and "too much time" in str(c.fault) for c in choices)
    assert not choices[0].forced(1)
    assert not choices[0].permitted([0])
    assert other.fault is None


def test_new_grammars_of_an_owner_whose_time_is_spent_wait(lab: Lab) -> None:
    fill(lab.begun(LETTERS, "x"))
    lab.wastes("x")
    for grammar in (LETTERS, OTHERS):
        with pytest.raises(KeyLimit) as e:
            lab.begun(grammar, "x")
        assert e.value.retry_after_s == BURST_S / SHARE
    assert lab.begun(OTHERS, "y").fault is None
    lab.clock.now_s += BURST_S / SHARE
    begun = lab.begun(LETTERS, "x")
    fill(begun)
    assert begun.fault is None, "nothing that was refused stays refused"


def test_a_grammar_that_is_known_to_be_fast_goes_on(lab: Lab) -> None:
    write(lab.begun(LETTERS, "x"), "aab")
    lab.wastes("x")
    begun = lab.begun(LETTERS, "x")
    fill(begun)
    assert begun.fault is None


def test_a_slow_mask_is_charged_to_its_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_time, "SLOW_S", 0.0)
    monkeypatch.setattr(mask_time, "BURST_S", 0.0)
    lab = Lab()
    begun = lab.begun(LETTERS, "x")
    bits = np.zeros(-(-begun.n_tokens // 32), dtype=np.uint32)
    begun.fill(bits.ctypes.data, bits.nbytes)
    assert lab.times.of("x").is_spent
    assert not lab.times.of("y").is_spent
    assert begun.fault is None
    write(begun, "aab")
    assert begun.fault is not None
