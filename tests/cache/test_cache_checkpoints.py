"""Where a recurrent model's state is kept, and that later prompts find it there."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firn.cache.planning.checkpoints import LATTICE_FROM_TOKENS, MIN_GAP_TOKENS, N_TURNS, due
from firn.cache.tree import CheckpointKind
from firn.core.events import Admitted
from tests.cache.lab import (
    ALL_KINDS,
    HYBRID,
    RECURRENT,
    WINDOW_AND_STATE,
    LabEngine,
    Shape,
    nodes_of,
    tree,
)
from tests.hash_engine import Outcome
from tests.hash_runner import prompt_of

# A chat: system [0, 700), user [.., 900), assistant [.., 1500), user [.., 1800), generation prompt.
CHAT = (700, 900, 1500, 1800)


@pytest.mark.parametrize(
    ("what", "boundaries", "n_prompt", "options", "want"),
    [
        (
            "a first sight: the shared front, the last turns, the end",
            CHAT,
            1804,
            {},
            {
                700: CheckpointKind.SHARED,
                900: CheckpointKind.TURN,
                1500: CheckpointKind.TURN,
                1800: CheckpointKind.TURN,
                1803: CheckpointKind.PROMPT_END,
            },
        ),
        (
            "old turns in the middle are not kept",
            (700, 900, 1100, 1300, 1500, 1800),
            1804,
            {},
            {
                700: CheckpointKind.SHARED,
                1300: CheckpointKind.TURN,
                1500: CheckpointKind.TURN,
                1800: CheckpointKind.TURN,
                1803: CheckpointKind.PROMPT_END,
            },
        ),
        (
            "nothing before what was restored",
            CHAT,
            1804,
            {"n_restored": 1500, "n_shared": 1500},
            {1800: CheckpointKind.TURN, 1803: CheckpointKind.PROMPT_END},
        ),
        (
            "a branch that a lookup has just found",
            CHAT,
            1804,
            {"n_restored": 700, "n_shared": 1200},
            {
                900: CheckpointKind.TURN,
                1200: CheckpointKind.BRANCH,
                1500: CheckpointKind.TURN,
                1800: CheckpointKind.TURN,
                1803: CheckpointKind.PROMPT_END,
            },
        ),
        (
            "a branch next to what was restored is not worth a state",
            (700,),
            1804,
            {"n_restored": 700, "n_shared": 700 + MIN_GAP_TOKENS},
            {1803: CheckpointKind.PROMPT_END},
        ),
        (
            "a branch just before the end of the system prompt: others depart there",
            (20_000, 21_000, 21_500),
            22_000,
            {"n_shared": 19_980},
            {
                4096: CheckpointKind.LATTICE,
                8192: CheckpointKind.LATTICE,
                16384: CheckpointKind.LATTICE,
                19_980: CheckpointKind.BRANCH,
                20_000: CheckpointKind.SHARED,
                21_000: CheckpointKind.TURN,
                21_500: CheckpointKind.TURN,
                21_999: CheckpointKind.PROMPT_END,
            },
        ),
        ("raw text has no boundaries", (), 500, {}, {499: CheckpointKind.PROMPT_END}),
        ("a prompt of one token has nothing to keep", (), 1, {}, {}),
        ("all of it was restored", CHAT, 1804, {"n_restored": 1803, "n_shared": 1804}, {}),
        (
            "exact mode keeps on the grid",
            CHAT,
            1804,
            {"grid": 512},
            {512: CheckpointKind.SHARED, 1024: CheckpointKind.TURN, 1536: CheckpointKind.TURN},
        ),
        (
            "exact mode: shorter than a chunk",
            (100,),
            300,
            {"grid": 512},
            {},
        ),
        (
            "a lattice in very long prompts",
            (700,),
            40_000,
            {},
            {
                700: CheckpointKind.SHARED,
                4096: CheckpointKind.LATTICE,
                8192: CheckpointKind.LATTICE,
                16384: CheckpointKind.LATTICE,
                32768: CheckpointKind.LATTICE,
                39_999: CheckpointKind.PROMPT_END,
            },
        ),
        (
            "a short system prompt is shared all the same",
            (10, 20),
            60,
            {},
            {10: CheckpointKind.SHARED, 59: CheckpointKind.PROMPT_END},
        ),
    ],
)
def test_table(
    what: str,
    boundaries: tuple[int, ...],
    n_prompt: int,
    options: dict[str, int],
    want: dict[int, CheckpointKind],
) -> None:
    kinds = due(boundaries, n_prompt, **{"n_restored": 0, "n_shared": 0, **options})
    assert kinds == want
    assert list(kinds) == sorted(kinds)


@settings(max_examples=400)
@given(
    n_prompt=st.integers(1, 200_000),
    where=st.lists(st.floats(0, 1), max_size=40),
    restored=st.floats(0, 1),
    shared=st.floats(0, 1),
    grid=st.sampled_from([1, 16, 512, 2048]),
)
def test_properties(
    n_prompt: int, where: list[float], restored: float, shared: float, grid: int
) -> None:
    boundaries = sorted({int(w * n_prompt) for w in where})
    n_restored = int(restored * (n_prompt - 1))
    n_restored -= n_restored % grid
    n_shared = max(n_restored, int(shared * n_prompt))
    kinds = due(boundaries, n_prompt, n_restored=n_restored, n_shared=n_shared, grid=grid)
    assert list(kinds) == sorted(kinds)
    assert all(n_restored < p < n_prompt for p in kinds)
    assert all(p % grid == 0 for p in kinds)
    lattice = max(math.log2(n_prompt / LATTICE_FROM_TOKENS), 0)
    assert len(kinds) <= lattice + 1 + (N_TURNS + 1) + 1 + 1 + 1
    for p, kind in kinds.items():
        if kind is CheckpointKind.SHARED:
            assert p == boundaries[0] - boundaries[0] % grid
    # The shared front and a branch are what others will ask for: no gap rule drops them.
    front = boundaries[0] - boundaries[0] % grid if boundaries else 0
    if n_restored < front < n_prompt:
        assert front in kinds
    branch = n_shared - n_shared % grid
    if n_shared > n_restored + MIN_GAP_TOKENS and n_restored < branch < n_prompt:
        assert branch in kinds
    end = n_prompt - 1 - (n_prompt - 1) % grid
    assert end in kinds or end <= n_restored


# --- through the engine --------------------------------------------------------------------

STATEFUL = pytest.mark.parametrize(
    "shape",
    [HYBRID, RECURRENT, ALL_KINDS, WINDOW_AND_STATE],
    ids=["hybrid", "recurrent", "all kinds", "window and state"],
)
SYSTEM, USER, REPLY, GENERATION = 150, 60, 40, 4


class Chat:
    """A conversation as the server renders it; `boundaries` are where messages end."""

    def __init__(self, lab: LabEngine, seed: int, system: list[int]) -> None:
        self.lab = lab
        self.seed = 100 * seed
        self.ids = list(system)
        self.boundaries = [len(system)]
        self.generation = prompt_of(9999, GENERATION)

    def turn(self, *, n_reply: int = REPLY, thinking: int = 0) -> Outcome:
        """One user message and its reply; the first `thinking` tokens do not stay in history."""
        self.seed += 1
        self.ids += prompt_of(self.seed, USER)
        self.boundaries.append(len(self.ids))
        outcome = ask(self.lab, self.ids + self.generation, self.boundaries, n_reply)
        if thinking:
            self.ids += prompt_of(9998, 3)  # the template renders an old reply differently
            self.ids += outcome.tokens()[thinking:]
        else:
            self.ids += self.generation + outcome.tokens()
        self.boundaries.append(len(self.ids))
        return outcome


def ask(lab: LabEngine, ids: list[int], boundaries: list[int], n_reply: int) -> Outcome:
    outcome = lab.submit(ids, n_reply, boundaries=boundaries).wait()
    outcome.check()
    return outcome


@STATEFUL
@pytest.mark.parametrize("n_system", [150, 20, 64, 128])
def test_a_shared_system_prompt_hits_on_its_second_sighting(shape: Shape, n_system: int) -> None:
    with LabEngine(shape, cache=tree(shape, block=64)) as lab:
        system = prompt_of(1, n_system)
        assert Chat(lab, 2, system).turn().n_cached == 0
        assert Chat(lab, 3, system).turn().n_cached == n_system
        assert Chat(lab, 4, system).turn().n_cached == n_system
        lab.check()


@STATEFUL
def test_a_shared_prefix_without_boundaries_hits_on_its_third_sighting(shape: Shape) -> None:
    """Nothing tells where raw texts will diverge: the second one finds the branch, and keeps it."""
    with LabEngine(shape, cache=tree(shape, block=64)) as lab:
        shared = prompt_of(1, 150)
        n_cached = [
            ask(lab, [*shared, i, *prompt_of(i, 50)], [], 8).n_cached for i in (200, 201, 202)
        ]
        assert n_cached == [0, 0, 150]


@STATEFUL
def test_the_next_turn_of_a_chat_hits(shape: Shape) -> None:
    with LabEngine(shape, cache=tree(shape, block=64)) as lab:
        chat = Chat(lab, 2, prompt_of(1, SYSTEM))
        n_before = 0
        for i in range(5):
            n_cached = chat.turn().n_cached
            assert n_cached == n_before, f"turn {i} resumes at the end of the last reply"
            n_before = len(chat.ids)
        lab.check()


@STATEFUL
def test_a_prompt_sent_again_recomputes_one_token(shape: Shape) -> None:
    with LabEngine(shape, cache=tree(shape, block=64)) as lab:
        ids = prompt_of(1, 333)
        for n_cached in (0, 332, 332):
            n_before = lab.runner.n_prefilled
            assert ask(lab, ids, [150], 8).n_cached == n_cached
            assert lab.runner.n_prefilled - n_before == 332 - n_cached


@STATEFUL
def test_thinking_stripped_from_history_still_hits(shape: Shape) -> None:
    """An old reply is rendered differently: resume before the generation prompt, and say where."""
    with LabEngine(shape, cache=tree(shape, block=64)) as lab:
        chat = Chat(lab, 2, prompt_of(1, SYSTEM))
        chat.turn(thinking=20)
        before_generation = SYSTEM + USER
        outcome = chat.turn(thinking=20)
        assert outcome.n_cached == before_generation
        (admission,) = outcome.of(Admitted)
        assert admission.why in (
            "no state checkpoint",
            f"diverged at token {before_generation}",
        )
        third = chat.turn(thinking=20)
        assert third.n_cached == before_generation + 3 + REPLY - 20 + USER
        lab.check()


@STATEFUL
def test_an_edited_message_resumes_before_it(shape: Shape) -> None:
    with LabEngine(shape, cache=tree(shape, block=64)) as lab:
        chat = Chat(lab, 2, prompt_of(1, SYSTEM))
        for _ in range(3):
            chat.turn()
        start = chat.boundaries[-3]  # the last user message
        edited = Chat(lab, 7, [])
        edited.ids, edited.boundaries = chat.ids[:start], chat.boundaries[:-2]
        n_cached = edited.turn().n_cached
        assert n_cached in (start, start - GENERATION - REPLY)
        assert n_cached >= start - GENERATION - REPLY


@STATEFUL
def test_a_very_long_prompt_is_kept_at_powers_of_two(shape: Shape) -> None:
    with LabEngine(shape, cache=tree(shape, block=512), chunk=2048) as lab:
        ids = prompt_of(1, 9000)
        ask(lab, ids, [], 1)
        for n, want in ((8500, 8192), (5000, 4096), (4000, 0)):
            assert ask(lab, ids[:n] + prompt_of(2, 30), [], 1).n_cached == want


@STATEFUL
def test_exact_mode_keeps_states_on_chunks_only(shape: Shape) -> None:
    cache = tree(shape, block=16, exact_chunk=32)
    with LabEngine(shape, cache=cache, chunk=32) as lab:
        system = prompt_of(1, 150)
        assert Chat(lab, 2, system).turn().n_cached == 0
        assert Chat(lab, 3, system).turn().n_cached == 128
        ids = prompt_of(5, 200)
        assert [ask(lab, ids, [100], 8).n_cached for _ in range(2)] == [0, 192]
        ends = {n.end for n in nodes_of(cache.records.tree) if n.records}
        assert all(e % 16 == 0 for e in ends)
        lab.check()
