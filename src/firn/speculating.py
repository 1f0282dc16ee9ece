"""Who guesses tokens: the part of the composition root that is about speculation."""

from __future__ import annotations

import logging

from firn.config import EngineConfig
from firn.engine.loop import Parts
from firn.models import loader
from firn.models.drafters.lookup import Lookup
from firn.models.raggedcheck import ragged_fault
from firn.models.runner import Runner
from firn.models.speculation import Speculation

log = logging.getLogger("firn")


def build(config: EngineConfig, loaded: loader.LoadedModel, *, exact: bool) -> Speculation | None:
    """On the engine thread. None where no tokens are guessed."""
    if config.speculation == "off":
        return None
    if exact:  # a step of several tokens is not to the bit what several steps are
        log.warning("no tokens are guessed (--speculation): reuse is exact")
        return None
    why = ragged_fault(loaded.model, loaded.make_layers) if loaded.info.batchable else None
    if why:
        log.warning("%s guesses tokens of lone requests only: %s", loaded.info.name, why)
    return Speculation(Lookup(), in_groups=why is None)


def view(parts: Parts) -> dict[str, int]:
    """Counters, from any thread; empty where no tokens are guessed."""
    runner = parts.runner
    speculation = runner.speculation if isinstance(runner, Runner) else None
    return speculation.totals.view() if speculation else {}
