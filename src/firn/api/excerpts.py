"""Excerpts of prompts, for people who may read them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

from firn.api.services import Services
from firn.api.session import Session

N_TOKENS = 48
MAX_CHARS = 160
_DIVERGED = re.compile(r"diverged at token (\d+)")


def first_difference(services: Services, session: Session) -> str | None:
    """How the first prompt that differs from everything stored goes on where it differs; None: none
    does, or nobody may read it."""
    if not services.show_text:
        return None
    for prompt, admitted in session.prompts:
        place = _DIVERGED.match(admitted.reason)
        if place is not None:
            at = int(place[1])
            return excerpt(services, prompt.ids[at : at + N_TOKENS].tolist())
    return None


def excerpt(services: Services, ids: Iterable[int]) -> str:
    """The beginning of these tokens' text, on one line. What is no token of the model's, such as the
    digest that stands for a picture, is left out."""
    known = [id for id in ids if 0 <= id < services.engine.model.n_ids]
    return " ".join(services.tokenizer.decode(known).split())[:MAX_CHARS]
