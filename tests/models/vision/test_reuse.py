"""Reuse of prompts with pictures: warm equals cold, bit for bit in exact mode.

The requests have 0, 1 and 3 pictures before and after the point where they resume.

Slow: every prompt is read three times in small chunks; mlx-vlm's gated delta takes 6 ms for each.
"""

from __future__ import annotations

import pytest
from PIL import Image, ImageOps

from firn.core.values import Message, PictureSpan, Prompt, TextPart
from tests.harness import Harness, Result, running
from tests.models.vision import gallery
from tests.models.vision.gallery import every_family, picture, said, user
from tests.sweep.checks import same_tokens

CHUNK, BLOCK = 32, 32
SYSTEM = Message(
    "system", (TextPart("You read layers of snow, older than this winter, and say so."),)
)
LONG = (
    "Snow that outlives its season becomes firn: grains packed by their own weight, not yet ice. "
)


KINDS = ("qwen3_vl", "qwen3_5", "gemma4", "lfm2_vl", "idefics3")
every_kind = pytest.mark.parametrize(
    "name",
    [
        *KINDS,
        *(
            pytest.param(name, marks=pytest.mark.sweep)
            for name in (*gallery.FAMILIES, *gallery.MORE)
            if name not in KINDS
        ),
    ],
)


class Cold:
    """Answers without a cache. Each is computed once, in aligned chunks, for both modes of reuse."""

    def __init__(self, harness: Harness) -> None:
        self._harness = harness
        self._known: dict[tuple[bytes, tuple[PictureSpan, ...]], Result] = {}

    def ask(self, prompt: Prompt, n_reply: int) -> Result:
        key = (prompt.ids.tobytes(), prompt.picture_spans)
        if key not in self._known:
            self._known[key] = self._harness.ask(prompt, n_reply)
        return self._known[key]


class Pair:
    """The same requests with and without the cache."""

    def __init__(self, name: str, cold: Cold, warm: Harness, *, exact: bool) -> None:
        self.name, self.cold, self.warm, self.exact = name, cold, warm, exact

    def ask(self, *messages: Message) -> tuple[Prompt, Result]:
        prompt = gallery.prompt_of(self.name, SYSTEM, *messages)
        a, b = self.cold.ask(prompt, 5), self.warm.ask(prompt, 5)
        if self.exact:
            assert b.n_cached % CHUNK == 0
            assert (a.logprobs, a.tokens) == (b.logprobs, b.tokens), f"after {b.n_cached}"
        else:
            assert same_tokens(a, b), f"after {b.n_cached} of {len(prompt)}"
        if prompt.whole_pictures:
            assert not any(m.start < b.n_cached < m.end for m in prompt.picture_spans)
        return prompt, b


def script(pair: Pair) -> None:
    one = [user(LONG, 1, "What is it?")]
    three = [user(LONG, 1, " and ", 2, " and ", 3, "?")]
    first, seen = pair.ask(*one)
    assert seen.n_cached == 0
    _, again = pair.ask(*one)
    assert again.n_cached >= len(first) - 1 - (CHUNK if pair.exact else 0)
    # a picture after the resume point, and one before it
    grown = [*one, said("It is firn."), user("Look at this too: ", 2, LONG)]
    _, later = pair.ask(*grown)
    assert later.n_cached > 0
    _, no_more = pair.ask(*grown, said("Yes."), user("Thank you. " + LONG))
    assert no_more.n_cached > gallery.prompt_of(pair.name, SYSTEM, *grown).picture_spans[1].start
    # three before, one of them new, and text alone
    shared, _ = pair.ask(*three)
    _, repeated = pair.ask(*three, said("Three."), user("And now?"))
    if not (pair.exact and shared.whole_pictures):  # its pictures cover nearly every boundary
        assert repeated.n_cached > shared.picture_spans[2].start
    whole, other = pair.ask(user(LONG, 1, " and ", 2, " and ", 4, "?"))
    assert other.n_cached <= whole.picture_spans[2].start
    pair.ask(user(LONG))
    pair.ask(user(LONG), said("Snow."), user(5, "?"))
    assert not pair.warm.cache.stats.faults


@every_family
def test_warm_equals_cold(name: str) -> None:
    """Token for token; for one family of each kind also bit for bit."""
    build = gallery.build(name)
    with running(build, cache_nbytes=None, chunk=CHUNK, exact=True) as alone:
        cold = Cold(alone)
        for exact in (True, False) if name in KINDS else (False,):
            with running(build, chunk=CHUNK, block=BLOCK, exact=exact) as warm:
                script(Pair(name, cold, warm, exact=exact))


def history(n: int) -> list[Message]:
    """A turn with n pictures, and more text than a chunk after the last of them."""
    return [user("See: ", *range(n), "!"), said("Snow that outlives its season, not yet ice.")]


@every_kind
def test_pictures_on_either_side_of_the_resume_point(name: str) -> None:
    """0, 1 and 3 before it, 0, 1 and 3 after it, all nine combinations bit for bit."""
    build = gallery.build(name)
    with (
        running(build, cache_nbytes=None, chunk=CHUNK, exact=True) as cold,
        running(build, chunk=CHUNK, block=BLOCK, exact=True) as warm,
    ):
        for n_before in (0, 1, 3):
            warm.ask(gallery.prompt_of(name, *history(n_before), user("Go on.")), 1)
            for n_behind in (0, 1, 3):
                new = range(10 * n_behind, 11 * n_behind)  # LLaVA has a turn's pictures first
                asked = user(f"{n_behind} more: ", *new, "?")
                prompt = gallery.prompt_of(name, *history(n_before), asked)
                want, got = cold.ask(prompt, 2), warm.ask(prompt, 2)
                assert got.n_cached % CHUNK == 0 < got.n_cached
                sides = [m.end <= got.n_cached for m in prompt.picture_spans]
                assert sides == [True] * n_before + [False] * n_behind
                assert all(m.start >= got.n_cached for m in prompt.picture_spans[n_before:])
                assert (got.logprobs, got.tokens) == (want.logprobs, want.tokens)


def variants() -> dict[str, list[Message]]:
    """Prompts that differ in nothing but their pictures."""
    base = picture(11, 64, 64)
    see_through = base.convert("RGBA")
    see_through.putalpha(Image.linear_gradient("L").resize(base.size))
    text = (LONG, "What is it?")
    return {
        "base": [user(text[0], base, text[1])],
        "another picture": [user(text[0], picture(12, 64, 64), text[1])],
        "transposed": [user(text[0], base.transpose(Image.Transpose.TRANSPOSE), text[1])],
        "mirrored": [user(text[0], ImageOps.mirror(base), text[1])],
        "alpha": [user(text[0], see_through, text[1])],
        "elsewhere": [user(base, *text)],
        "two": [user(text[0], base, picture(12, 64, 64), text[1])],
        "two, swapped": [user(text[0], picture(12, 64, 64), base, text[1])],
    }


@every_kind
def test_a_picture_is_its_content(name: str) -> None:
    """Whatever was asked before, each prompt gets its own answer."""
    build = gallery.build(name)
    cold: dict[str, Result] = {}
    prompts = {k: gallery.prompt_of(name, SYSTEM, *chat) for k, chat in variants().items()}
    with running(build, cache_nbytes=None, chunk=CHUNK, exact=True) as h:
        for label, prompt in prompts.items():
            cold[label] = h.ask(prompt, 3)
    # LLaVA's template puts pictures first, wherever they were.
    n_different = len({(p.ids.tobytes(), p.picture_spans) for p in prompts.values()})
    assert n_different >= len(prompts) - 1
    assert len({tuple(r.logprobs[0]) for r in cold.values()}) == n_different
    with running(build, chunk=CHUNK, block=BLOCK, exact=True) as h:
        for _ in range(2):
            for label, prompt in prompts.items():
                warm = h.ask(prompt, 3)
                assert warm.logprobs == cold[label].logprobs, label
        assert h.ask(prompts["base"], 3).n_cached > 0


@every_kind
def test_the_text_before_a_picture_hits_whatever_the_picture_is(name: str) -> None:
    with running(gallery.build(name), chunk=CHUNK, block=BLOCK) as h:
        chats = variants()
        prompts = {
            k: gallery.prompt_of(name, SYSTEM, *chats[k]) for k in ("base", "another picture")
        }
        start = prompts["base"].picture_spans[0].start
        assert prompts["another picture"].picture_spans[0].start == start
        h.ask(prompts["base"], 4)
        h.ask(prompts["another picture"], 4)
        third = gallery.prompt_of(name, SYSTEM, *chats["mirrored"])
        seen = h.ask(third, 4)
        # A recurrent model resumes at the branch that the second prompt has shown.
        assert start - 4 <= seen.n_cached <= start
