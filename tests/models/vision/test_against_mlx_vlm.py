"""Vision models in a batch say what mlx-vlm says, one request at a time, with the same weights."""

from __future__ import annotations

from tests.harness import running
from tests.models.vision import gallery
from tests.models.vision.gallery import said, user

CHATS = {
    "no picture": [user("Who keeps the snow of last year?")],
    "one": [user("Look: ", 1, " What is it?")],
    "text after a picture's turn": [user(7, "Describe."), said("Firn."), user("Shorter.")],
    "first and last": [user(2, "and at the end", 3)],
    "three in two turns": [user("One ", 4, 5), said("Yes."), user("and one more ", 6, "?")],
}
ONE_PICTURE = {"paddleocr_vl"}
"""Families for which mlx-vlm's own processor fails on several pictures."""


@gallery.every_family
def test_a_batch_says_what_mlx_vlm_says_alone(name: str) -> None:
    asked = dict(list(CHATS.items())[:3]) if name in ONE_PICTURE else CHATS
    wanted = {label: gallery.reference(name, chat, 10) for label, chat in asked.items()}
    prompts = {label: gallery.prompt_of(name, *chat) for label, chat in asked.items()}
    for label, (ids, _, _) in wanted.items():
        assert prompts[label].ids.tolist() == ids, label
        n_images = sum(len(m.parts) for m in asked[label])
        assert len(prompts[label].picture_spans) == len(prompts[label].picture_inputs) <= n_images
    with running(gallery.build(name), chunk=16, cache_nbytes=None) as h:
        results = {label: h.submit(p, 10) for label, p in prompts.items()}
        for label, (_, tokens, margins) in wanted.items():
            got = results[label].wait()
            assert got.error is None, label
            assert gallery.agree(got.reply, tokens, margins), label
    assert len({tuple(tokens) for _, tokens, _ in wanted.values()}) == len(asked)
