"""What a conversation writes to the disk each turn, and that its newest resume point survives a kill."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from firn.cache.ledger import Ledger
from firn.cache.parts import Part
from firn.cache.storage.held import HOLD_S, HeldWindows
from firn.cache.tiers import TierOptions
from firn.cache.tiers.ssd import SsdTier
from firn.cache.tree import CheckpointKind, Tree
from firn.core.keys import Key
from firn.core.values import CacheControl, Namespace, PackedTokens
from tests.cache.lab import ALL_KINDS, HYBRID, WINDOWED, LabEngine, Shape
from tests.cache.test_decisions import admission, ask, drop_memory, server, settle
from tests.hash_runner import prompt_of as words

SYSTEM, QUESTION, N_REPLY, N_TURNS = 40, 48, 40, 6
BEGIN, END = [7, 8], [5]
History = Callable[[list[int]], list[int]]


class Chat:
    """Each turn appends what the history says of the last reply, and a question."""

    def __init__(self, seed: int, history: History) -> None:
        self.tokens, self.boundaries = words(seed, SYSTEM), [SYSTEM]
        self._seed = seed
        self._history = history

    def turn(self, lab: LabEngine) -> int:
        """Returns how many tokens of the prompt were computed."""
        self._seed += 100
        self._say(words(self._seed, QUESTION))
        prompt = [*self.tokens, *BEGIN]
        outcome = ask(lab, prompt, N_REPLY, boundaries=self.boundaries)
        self._say([*BEGIN, *self._history(outcome.tokens()), *END])
        return len(prompt) - admission(outcome).n_cached

    def _say(self, message: list[int]) -> None:
        self.tokens += message
        self.boundaries.append(len(self.tokens))


def as_it_was(reply: list[int]) -> list[int]:
    return reply


def without_thinking(reply: list[int]) -> list[int]:
    return reply[N_REPLY // 2 :]


@pytest.mark.parametrize("history", [as_it_was, without_thinking])
@pytest.mark.parametrize("shape", [HYBRID, WINDOWED, ALL_KINDS], ids=["hybrid", "window", "both"])
def test_the_newest_resume_point_of_each_chat_survives_a_kill(
    tmp_path: Path, shape: Shape, history: History
) -> None:
    """After every turn: the next one computes no more than it would have without a restart, except
    for what begins a reply."""
    for n_turns in range(1, 4):
        folder, copy = tmp_path / f"{n_turns}", tmp_path / f"{n_turns} killed"
        chats = [Chat(seed, history) for seed in (1, 2)]
        with server(folder, shape) as lab:
            for _ in range(n_turns):
                for chat in chats:
                    chat.turn(lab)
            settle(lab)
            shutil.copytree(folder, copy)  # what a kill would leave
            want = [chat.turn(lab) for chat in chats]
        with server(copy, shape) as lab:
            for chat, n_computed in zip(chats, want, strict=True):
                prompt = [*chat.tokens[: chat.boundaries[-2]], *BEGIN]
                found = admission(ask(lab, prompt, 1, control=CacheControl(write=False)))
                assert len(prompt) - found.n_cached <= n_computed + len(BEGIN)


LONG, BLOCK = words(9, 200), 8
"""25 blocks, of which the model needs the windows of two to resume."""


def n_windows(folder: Path) -> int:
    return len(list(folder.glob("??/*.window.*")))


def test_a_long_prompt_writes_the_windows_that_are_resumed_from(tmp_path: Path) -> None:
    """Those at its end, where it is continued, and those at the end of the system prompt."""
    copy = tmp_path / "killed"
    with server(tmp_path / "live", WINDOWED) as lab:
        ask(lab, LONG, N_REPLY, boundaries=[SYSTEM])
        settle(lab)
        shutil.copytree(tmp_path / "live", copy)
    assert 2 <= n_windows(copy) <= 6
    with server(copy, WINDOWED) as lab:
        other = [*LONG[:SYSTEM], *words(8, 30)]
        assert admission(ask(lab, other, control=CacheControl(write=False))).n_cached == SYSTEM


def test_windows_that_leave_memory_are_written(tmp_path: Path) -> None:
    """Somebody who goes back in a chat resumes there."""
    copy = tmp_path / "killed"
    back = [*LONG[:120], *words(8, 30)]
    for leaves in (False, True):
        with server(tmp_path / "live", WINDOWED) as lab:
            ask(lab, LONG, N_REPLY)
            settle(lab)
            if leaves:
                drop_memory(lab)
                settle(lab)
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(tmp_path / "live", copy)
        with server(copy, WINDOWED) as lab:
            found = admission(ask(lab, back, control=CacheControl(write=False)))
            assert (found.n_cached == 120) == leaves


def test_where_a_prompt_has_branched_off_another_can_after_a_kill(tmp_path: Path) -> None:
    copy = tmp_path / "killed"
    with server(tmp_path / "live", WINDOWED) as lab:
        ask(lab, LONG, N_REPLY)
        ask(lab, [*LONG[:120], *words(8, 30)])
        settle(lab)
        shutil.copytree(tmp_path / "live", copy)
    with server(copy, WINDOWED) as lab:
        third = [*LONG[:120], *words(7, 30)]
        assert admission(ask(lab, third, control=CacheControl(write=False))).n_cached == 120


def test_windows_of_a_long_reply_do_not_wait_for_its_end() -> None:
    """A kill in the middle of it costs seconds, however fast it grows."""
    tree = Tree(BLOCK)
    root = tree.root(Key(b"root"), Namespace(""))
    held, node = HeldWindows(tree, WINDOWED.window), root
    tokens = PackedTokens(np.arange(BLOCK * 40, dtype=np.uint64))
    tree.lease(root)
    newest: list[int] = []
    for i in range(40):
        child = tree.child(node, tokens, BLOCK * i, BLOCK * (i + 1))
        tree.move_lease(node, child)
        node = child
        record = tree.add(node, Part.WINDOW, nbytes=1, kind=CheckpointKind.TURN)
        Ledger(tree).hold(record, object(), nbytes=1)
        held.add(record, float(i))
        newest += [i - r.node.start // BLOCK for r, _ in held.take_due(float(i))]
    assert newest == [0] * len(newest), "only the newest is written"
    assert 40 / (HOLD_S + 1) - 1 <= len(newest) <= 40 / HOLD_S


def test_a_budget_that_runs_low_is_kept_for_what_chats_continue_from(tmp_path: Path) -> None:
    def n_written(budget_nbytes: int | None) -> int:
        folder = tmp_path / f"{budget_nbytes}"
        tier = SsdTier(TierOptions(str(folder), 1 << 30, budget_nbytes))
        with server(folder, WINDOWED, tier=tier) as lab:
            ask(lab, LONG, N_REPLY)
            settle(lab)
            n_before = n_windows(folder)
            drop_memory(lab)
            settle(lab)
            return n_windows(folder) - n_before

    assert n_written(None) > 15
    probe = SsdTier(TierOptions(str(tmp_path / "None"), 1 << 30))
    list(probe.scan())
    written = probe.usage().day_nbytes or 0
    assert n_written(written // 2) < n_written(written * 4)


def test_a_turn_writes_the_one_state_that_the_next_turn_needs(tmp_path: Path) -> None:
    def n_states() -> int:
        return len(list(tmp_path.glob("??/*.state.*")))

    chat = Chat(1, as_it_was)
    with server(tmp_path, HYBRID) as lab:
        chat.turn(lab)
        settle(lab)
        written = []
        for _ in range(N_TURNS):
            n_before = n_states()
            assert chat.turn(lab) <= QUESTION + len(BEGIN) + len(END) + 1
            settle(lab)
            written.append(n_states() - n_before)
    assert written == [1] * N_TURNS


def test_where_replies_change_in_the_history_the_start_of_the_turn_is_written(
    tmp_path: Path,
) -> None:
    """The next turn resumes there, after a restart, too."""
    chat = Chat(1, without_thinking)
    with server(tmp_path, HYBRID) as lab:
        for _ in range(3):
            chat.turn(lab)
    with server(tmp_path, HYBRID) as lab:
        assert chat.turn(lab) < 2 * QUESTION + N_REPLY


def test_a_held_window_may_be_forgotten_meanwhile() -> None:
    tree = Tree(BLOCK)
    tokens = PackedTokens(np.arange(BLOCK, dtype=np.uint64))
    node = tree.child(tree.root(Key(b"root"), Namespace("")), tokens, 0, BLOCK)
    held, record = (
        HeldWindows(tree, 6),
        tree.add(node, Part.WINDOW, nbytes=1, kind=CheckpointKind.TURN),
    )
    held.add(record, 0.0)
    Ledger(tree).forget(record)
    assert list(held.take_due(1.0)) == []
    assert not held
