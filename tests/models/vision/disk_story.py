"""Prompts with pictures that go through a small memory and a folder. See test_disk.py.

As a program it plays a restarted server: it asks everything again, and prints the answers.
"""

from __future__ import annotations

import json
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from firn.cache.tiers import TierOptions
from firn.cache.tiers.ssd import SsdTier
from firn.core.values import Message, Prompt
from tests import one_blas
from tests.harness import Harness, running
from tests.models.vision import gallery
from tests.models.vision.gallery import said, user

KINDS = ("qwen2_5_vl", "qwen3_5", "gemma3", "gemma4")
"""Pages; states and positions on three axes; windows; pictures that are read in one piece."""
CHUNK = BLOCK = 16
N_REPLY = 2
GIB = 1 << 30
BEHIND = "Grains packed by their own weight, not yet ice."


def chats() -> dict[str, list[Message]]:
    """They differ from the first chunk on."""
    return {
        "one": [user("1. Look: ", 1, BEHIND)],
        "two in one turn": [user("2. Look: ", 2, " and ", 3), said(BEHIND), user("?")],
        "two turns": [user("3. Look: ", 3), said("Firn."), user("And ", 1, BEHIND)],
        "text alone": [user("4. Snow that outlives its season is firn. " + BEHIND)],
    }


def another() -> list[Message]:
    """As "one", but with another picture."""
    return [user("1. Look: ", 5, BEHIND)]


def prompts(name: str) -> dict[str, Prompt]:
    return {label: gallery.prompt_of(name, *chat) for label, chat in chats().items()}


def an_engine(
    name: str, folder: Path | None, *, memory_nbytes: int = GIB
) -> AbstractContextManager[Harness]:
    """All families share one folder: each has its own weights, and so its own records."""
    return running(
        gallery.build(name),
        chunk=CHUNK,
        block=BLOCK,
        exact=True,
        cache_nbytes=memory_nbytes,
        fingerprint=name.encode(),
        tier=SsdTier(TierOptions(str(folder), GIB)) if folder is not None else None,
    )


def n_looks(harness: Harness) -> int:
    """How often the features of a picture were asked for, held or not."""
    features: Any = harness.runner._forward.arguments.features  # type: ignore[union-attr]
    return int(features.n_hits + features.n_misses)


def main(folder: Path) -> int:
    told: dict[str, Any] = {}
    for name in KINDS:
        with an_engine(name, folder) as h:
            found = {label: h.ask(p, N_REPLY) for label, p in prompts(name).items()}
        told[name] = {label: (r.tiers, r.reply, r.logprobs[0]) for label, r in found.items()}
    print(json.dumps(told))
    return 0


if __name__ == "__main__":
    one_blas.find()
    sys.exit(main(Path(sys.argv[1])))
