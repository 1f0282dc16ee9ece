"""Excerpts of prompts for the dashboard, where --show-text allows it. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from firn.api.services import Services
from firn.api.session import Session

N_TOKENS = 48
MAX_CHARS = 160


def first_difference(services: Services, session: Session) -> str | None:
    """The text of the first prompt that goes on where nothing stored does, from that token on; None:
    no prompt did, or text must not be shown."""
    if not services.show_text:
        return None
    for prompt, admitted in session.prompts:
        at = admitted.reason.at if admitted.reason else None
        if at is not None:
            return excerpt(services, prompt.ids[at : at + N_TOKENS].tolist())
    return None


def excerpt(services: Services, ids: Iterable[int]) -> str:
    """The beginning of these tokens' text, on one line. Ids that are not tokens of the model, such
    as the digest that stands for a picture, are left out."""
    known = [id for id in ids if 0 <= id < services.engine.model.n_ids]
    return " ".join(services.tokenizer.decode(known).split())[:MAX_CHARS]
