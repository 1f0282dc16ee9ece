"""Small products get one thread, large ones all; the number is set only where it changes."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx import nn

from firn.backends.cpu.threads import WORTHWHILE, Threads, weights_a_product


class Library:
    def __init__(self, n: int) -> None:
        self.n_threads = n
        self.calls: list[int] = []

    def set_threads(self, n: int) -> None:
        self.calls.append(n)


def model_of(n_weights: int) -> nn.Module:
    model = nn.Linear(1, 1, bias=False)
    model.weight = mx.zeros((1, n_weights))
    return model


def test_small_products_get_one_thread_and_large_ones_all() -> None:
    library = Library(8)
    threads = Threads(library, model_of(WORTHWHILE // 4))
    for n_tokens in (256, 1, 1, 3, 4, 16, 1):
        threads.prepare(n_tokens)
    assert library.calls == [1, 8, 1]


@pytest.mark.parametrize(("n_all", "weights"), [(8, WORTHWHILE), (1, 10)])
def test_nothing_is_set_where_there_is_no_choice(n_all: int, weights: int) -> None:
    library = Library(n_all)
    threads = Threads(library, model_of(weights))
    for n_tokens in (1, 256, 1):
        threads.prepare(n_tokens)
    assert library.calls == []


def test_norms_and_biases_do_not_count_as_products() -> None:
    model = nn.Sequential(nn.Linear(10, 20), nn.LayerNorm(20), nn.Linear(20, 30))
    assert weights_a_product(model) == (10 * 20 + 20 * 30) // 2


def test_a_model_without_matrices_has_no_products() -> None:
    assert weights_a_product(nn.LayerNorm(20)) == 0
