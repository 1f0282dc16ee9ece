"""What every drafter promises. A new file in models/speculation/drafters is tested automatically."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Hashable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from firn.cache.off import CacheOff
from firn.core.values import Job, Prompt, RequestId
from firn.models.decode.batch import Group, Row
from firn.models.decode.mtp_hidden import HiddenAt, first_hidden
from firn.models.speculation import drafters
from firn.models.speculation.drafters import NO_DRAFT, Draft, Drafter
from firn.models.speculation.mtp import MtpModel, with_head_layer
from firn.models.speculation.speculator import MAX_DRAFT
from tests.models.speculation.drafters.test_mtp import random_head
from tests.zoo import build

PROMPT = [5, 6, 7, 8, 9, 10, 5, 6]


class OnRows:
    """Stands in for the runner, on whose rows a prediction head drafts."""

    is_free = False

    def __init__(self, drafter: Any, model: MtpModel) -> None:
        self._model = model
        self._drafter = drafter(model)
        self._make_layers = with_head_layer(lambda: list(make_prompt_cache(model.base)))
        self._rows: dict[Hashable, Row] = {}
        self.odds = self._drafter.odds

    def open(self, name: Hashable, job: Job) -> None:
        ids = job.prompt.ids.tolist()
        row = self._rows[name] = Row(self._make_layers())
        Group.of_one(row, ids[0])
        self._drafter.open(row, job)
        self.extend(name, ids[1:])

    def prepare(self, name: Hashable) -> bool:
        return bool(self._drafter.prepare(self._rows.get(name)))

    def extend(self, name: Hashable, tokens: Sequence[int]) -> None:
        row = self._rows.get(name)
        if row is None or row.group is None:
            return
        fed = [*row.pending, *tokens[:-1]]
        self._model(mx.array([fed]), cache=row.group.layers, mtp_hidden=first_hidden([row.hidden]))
        row.n_tokens += len(fed)
        row.pending = [tokens[-1]]
        row.hidden = [HiddenAt(self._model.hidden, 0, len(fed) - 1)]

    def draft(self, names: Sequence[Hashable], n_most: int) -> list[Draft]:
        rows = [self._rows.get(name) for name in names]
        return list(self._drafter.draft(rows, n_most))

    def close(self, name: Hashable) -> None:
        self._drafter.close(self._rows.pop(name, None))

    def end(self) -> None:
        self._drafter.end()


def every_drafter() -> list[str]:
    return [m.name for m in pkgutil.iter_modules(drafters.__path__) if not m.name.startswith("_")]


def made(name: str) -> Any:
    """A drafter for these tests, on a tiny model if it needs one."""
    module = importlib.import_module(f"firn.models.speculation.drafters.{name}")
    if name not in drafters.ON_A_MODEL:
        return module.DRAFTER()
    model = build("llama")
    if name == "mtp":
        return OnRows(module.DRAFTER, MtpModel(model, random_head(model, "llama")))
    return module.DRAFTER(
        model, lambda: make_prompt_cache(model), cache=CacheOff(), batchable=True, chunk=4
    )


@pytest.fixture(params=every_drafter())
def drafter(request: pytest.FixtureRequest) -> Drafter:
    found: Drafter = made(request.param)
    return found


def job(prompt: list[int] = PROMPT) -> Job:
    ids = np.array(prompt, dtype=np.int64)
    return Job(id=RequestId("1"), prompt=Prompt(ids), max_tokens=32)


def prepare(drafter: Drafter, row: str) -> None:
    assert any(drafter.prepare(row) for _ in range(100)), "it is ready after a while"


def test_rows_that_it_was_not_told_of_are_none_of_its_business(drafter: Drafter) -> None:
    assert drafter.draft(["nobody"], 4) == [NO_DRAFT]
    assert not drafter.prepare("nobody")
    drafter.extend("nobody", [1, 2])
    drafter.close("nobody")


def test_drafts_are_no_longer_than_asked_for_and_each_token_has_a_kind(drafter: Drafter) -> None:
    drafter.open("row", job())
    prepare(drafter, "row")
    for n in (1, 3, MAX_DRAFT):
        (draft,) = drafter.draft(["row"], n)
        assert len(draft.tokens) <= n
        assert len(draft.kinds) == len(draft.tokens)
        assert all(type(t) is int for t in draft.tokens)
        assert all(0 < drafter.odds(kind) < 1 for kind in draft.kinds)


def test_drafting_twice_changes_nothing(drafter: Drafter) -> None:
    drafter.open("row", job())
    prepare(drafter, "row")
    drafter.extend("row", [7])
    assert drafter.draft(["row"], 4) == drafter.draft(["row"], 4)


def test_rows_do_not_disturb_each_other(drafter: Drafter) -> None:
    drafter.open("one", job())
    prepare(drafter, "one")
    drafter.extend("one", [7, 8])
    (alone,) = drafter.draft(["one"], 4)
    drafter.open("two", job([20, 21, 22, 20, 21]))
    prepare(drafter, "two")
    drafter.extend("two", [22])
    both = drafter.draft(["one", "two", "nobody"], 4)
    assert len(both) == 3
    assert both[0] == alone
    assert both[2] == NO_DRAFT
    drafter.close("one")
    assert drafter.draft(["one", "two"], 4)[0] == NO_DRAFT
    assert drafter.draft(["one", "two"], 4)[1] == both[1]
