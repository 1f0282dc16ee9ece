"""Several tokens a step of vision models: behind pictures, too, the text is that of one token a step."""

from __future__ import annotations

import random

import pytest

from firn.models.raggedcheck import ragged_fault, rewind_fault
from tests.harness import running
from tests.models.drafting import Bold, Knowing
from tests.vision import gallery
from tests.vision.test_mixed_batches import KINDS, chats


@pytest.mark.parametrize("name", KINDS)
def test_guesses_behind_pictures(name: str) -> None:
    rng = random.Random(4)
    wanted = [(c, rng.randint(10, 24)) for c in chats(rng, 5)]
    prompts = [gallery.prompt_of(name, *c) for c, _ in wanted]
    known = {}
    for prompt, (chat, n) in zip(prompts, wanted, strict=True):
        known[tuple(prompt.ids.tolist()), 0] = gallery.reference(name, chat, n)[1]
    speculation = Bold(Knowing(known, right=0.8, vocab_size=200))
    model, make_layers = gallery.build(name)()
    assert rewind_fault(model, make_layers) is None
    speculation.in_groups = ragged_fault(model, make_layers) is None
    with running(
        gallery.build(name), chunk=16, block=16, max_rows=3, speculation=lambda: speculation
    ) as h:
        results = [h.submit(p, n) for p, (_, n) in zip(prompts, wanted, strict=True)]
        for result, (chat, n) in zip(results, wanted, strict=True):
            result.wait()
            _, tokens, margins = gallery.reference(name, chat, n)
            assert gallery.agree(result.reply, tokens, margins)
        assert not h.cache.stats.faults
    assert speculation.totals.n_accepted > 20 or not speculation.in_groups
