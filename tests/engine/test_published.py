"""When a reply's tokens reach its client while another prompt is being read."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from firn.core.events import Token
from firn.core.ports import Delivery
from tests.hash_engine import HashEngine
from tests.hash_runner import Faults, HashRow, prompt_of


@pytest.mark.parametrize("dispatch_waits", [True, False])
def test_tokens_are_sent_before_a_chunk_whose_dispatch_takes_long(dispatch_waits: bool) -> None:
    n_launched: list[int] = []
    n_sent: list[int] = []
    sent = 0

    def publish(batch: Sequence[Delivery]) -> None:
        nonlocal sent
        sent += sum(isinstance(event, Token) for _, event in batch)

    def prefill(row: HashRow, chunk: Sequence[int]) -> None:
        if lab.runner.groups():
            n_launched.append(lab.runner.n_launched)
            n_sent.append(sent)

    with HashEngine(
        Faults(prefill=prefill), chunk=8, publish=publish, dispatch_waits=dispatch_waits
    ) as lab:
        held = lab.hold()
        first, second = lab.submit(prompt_of(1, 9), 40), lab.submit(prompt_of(2, 80), 3)
        held.set()
        first.wait().check()
        second.wait().check()
        assert lab.leftovers() == {}
    assert len(n_sent) >= 8, "no chunk was read between two steps"
    unsent = {launched - sent for launched, sent in zip(n_launched, n_sent, strict=True)}
    assert unsent == ({0} if dispatch_waits else {1})
