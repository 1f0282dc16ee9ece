"""What all routes of Ollama's API share: model names with tags, durations. Pure."""

from __future__ import annotations

import time

from firn.api.http.fields import Fields

TAG = ":latest"
"""Clients append it to a name without a tag."""
RENAMED = {"repetition_penalty": "repeat_penalty"}
"""Ollama's names for options that have other names in OpenAI's API."""


def model_name(body: Fields) -> str:
    """The body's model, without the tag; empty if it names none."""
    return (body.string("model") or "").removesuffix(TAG)


def durations(began_ns: int, first_token_at: float | None) -> dict[str, int]:
    """Durations in nanoseconds. first_token_at: by `time.perf_counter`; None: there was no token,
    so all of the time counts as decoding."""
    now_ns = time.perf_counter_ns()
    first_ns = began_ns if first_token_at is None else int(first_token_at * 1e9)
    return {
        "total_duration": now_ns - began_ns,
        "load_duration": 0,
        "prompt_eval_duration": first_ns - began_ns,
        "eval_duration": max(now_ns - first_ns, 1),
    }
