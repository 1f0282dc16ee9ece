"""Where computing a few more tokens takes no longer, a hit of a few tokens is not used."""

from __future__ import annotations

import pytest

from firn.cache.planning.estimates import Estimates
from firn.core.events import Admitted
from firn.core.values import CacheControl, Namespace
from tests.cache.lab import DENSE, HYBRID, IN_ROWS, WINDOWED, LabEngine, Shape, prompt_of, tree
from tests.hash_engine import Outcome
from tests.hash_runner import prompt_of as words

BLOCK = 8
SHAPES = pytest.mark.parametrize(
    "shape", [DENSE, HYBRID, WINDOWED], ids=["dense", "hybrid", "window"]
)


class Gpu(Estimates):
    """A token takes a millisecond, and filling a row as long as twenty tokens."""

    knows_prefill = True

    def prefill_s(self, start: int, end: int) -> float:
        return 0.001 * (end - start)

    def fill_s(self, nbytes: int) -> float:
        return 0.02


class SlowCopies(Gpu):
    def fill_s(self, nbytes: int) -> float:
        return 1.0


class Untried(Gpu):
    knows_prefill = False


def engine(
    shape: Shape, *, weighs_hits: bool = True, estimates: type[Estimates] = Gpu
) -> LabEngine:
    cache = tree(shape, block=BLOCK, weighs_hits=weighs_hits)
    cache.records.estimates = estimates()
    return LabEngine(shape, cache=cache, chunk=16)


def ask(lab: LabEngine, ids: list[int], **options: object) -> Admitted:
    outcome: Outcome = lab.submit(ids, 4, **options).wait()
    outcome.check()
    return outcome.of(Admitted)[-1]


def branch(n_shared: int) -> list[int]:
    return [*words(1, 100)[:n_shared], *words(2, 300)]


@SHAPES
@pytest.mark.parametrize("n_shared", [7, 16])
def test_a_hit_that_costs_more_than_it_saves_is_not_used(shape: Shape, n_shared: int) -> None:
    with engine(shape) as lab:
        ask(lab, words(1, 100), boundaries=[7, 16])
        said = ask(lab, branch(n_shared))
        assert (said.n_cached, said.why) == (0, "slower to load")
        lab.check()


@SHAPES
def test_a_hit_that_saves_time_is_used(shape: Shape) -> None:
    with engine(shape) as lab:
        ask(lab, words(1, 100), boundaries=[32])
        assert ask(lab, branch(32)).n_cached == 32


@pytest.mark.parametrize(
    ("weighs_hits", "estimates", "n_shared"),
    [(False, Gpu, 7), (True, Untried, BLOCK)],
    ids=["elsewhere", "untried"],
)
def test_a_short_hit_is_used(weighs_hits: bool, estimates: type[Estimates], n_shared: int) -> None:
    with engine(DENSE, weighs_hits=weighs_hits, estimates=estimates) as lab:
        ask(lab, words(1, 100))
        assert ask(lab, branch(n_shared)).n_cached == n_shared


class FreeCopies(Gpu):
    """The only fills it has measured are ones that nobody waited for."""

    def fill_s(self, nbytes: int) -> float:
        return 0.0


def test_less_than_a_block_is_computed_with_the_rest_whatever_the_estimates_say() -> None:
    with engine(DENSE, estimates=FreeCopies) as lab:
        ask(lab, words(1, 100))
        assert ask(lab, branch(BLOCK - 1)).n_cached == 0
        assert ask(lab, branch(BLOCK)).n_cached == BLOCK


def test_a_hit_of_much_of_the_prompt_is_used() -> None:
    with engine(DENSE, estimates=SlowCopies) as lab:
        ask(lab, words(1, 16))
        assert ask(lab, words(1, 16)).n_cached == 15
        assert ask(lab, [*words(1, 16), *words(2, 112)]).n_cached == 16
        assert ask(lab, [*words(1, 16), *words(3, 120)]).n_cached == 0


def test_a_parked_row_is_taken_over_whatever_a_copy_costs() -> None:
    with engine(IN_ROWS, estimates=SlowCopies) as lab:
        lab.submit(words(1, 40), 4).wait()
        assert ask(lab, [*words(1, 40)[:20], *words(2, 400)]).n_cached == 0
        assert ask(lab, [*words(1, 40), *words(3, 400)]).n_cached == 40


def test_a_probe_says_the_same() -> None:
    with engine(DENSE) as lab:
        ask(lab, words(1, 100))
        probes = [
            lab.between_steps(lambda n=n: lab.tree.probe(prompt_of(branch(n)), Namespace("")))
            for n in (7, 32)
        ]
        assert [p.match.n_tokens for p in probes] == [0, 32]
        assert (str(probes[0].reason), probes[0].n_shared) == ("slower to load", 7)


def test_only_the_shared_part_of_a_block_fills_a_row() -> None:
    cache = tree(DENSE, block=BLOCK)
    with LabEngine(DENSE, cache=cache, chunk=16) as lab:
        ask(lab, words(1, 100))

        def nbytes(n_shared: int) -> tuple[int, int]:
            cursor = cache.open(prompt_of(branch(n_shared)), Namespace(""), CacheControl())
            restored = cursor.restore()
            assert restored is not None
            cursor.close(None)
            return restored.n_tokens, restored.nbytes

        (n_whole, whole), (n_part, part) = (
            lab.between_steps(lambda n=n: nbytes(n)) for n in (BLOCK, 2)
        )
        assert (n_whole, n_part) == (BLOCK, 2)
        assert part == whole // 4
