"""Defaults of sampling and thinking: flags, and the model's own generation_config.json.

generation_config.json comes from those who trained the model. A value in it that is out of bounds
causes a warning, and the rest of the file is used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from firn.config.options import BadValue, option
from firn.core.bounds import GREEDY_BELOW, SAMPLING

if TYPE_CHECKING:  # values imports numpy, and the settings are read before anything heavy
    from firn.core.values import Defaults

GENERATION_CONFIG = "generation_config.json"
LEAST = 0.001
"""The lower bound of settings that must be above 0."""


def json_object(text: str) -> str:
    """A JSON object, kept as it was written."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise BadValue(f"{text[:60]!r} is not a JSON object")
    return text


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    generation_config: Literal["model", "none"] = option(
        "model",
        "model: use the sampling defaults of the model's generation_config.json; none: ignore them.",
    )
    default_temperature: float | None = option(
        None, "Temperature of requests that set none.", low=0, high=100
    )
    default_top_p: float | None = option(
        None, "top_p of requests that set none.", low=LEAST, high=1
    )
    default_top_k: int | None = option(
        None, "top_k of requests that set none; 0 is off.", low=-1, high=2**31 - 1
    )
    default_min_p: float | None = option(None, "min_p of requests that set none.", low=0, high=1)
    default_repetition_penalty: float | None = option(
        None, "repetition_penalty of requests that set none.", low=LEAST, high=100
    )
    default_presence_penalty: float | None = option(
        None, "presence_penalty of requests that set none.", low=-2, high=2
    )
    default_frequency_penalty: float | None = option(
        None, "frequency_penalty of requests that set none.", low=-2, high=2
    )
    default_thinking_token_budget: int | None = option(
        None, "Thinking tokens of requests that set no budget.", low=0, high=2**31 - 1
    )
    default_chat_template_kwargs: str | None = option(
        None,
        "Variables of the chat template that requests do not set, as a JSON object.",
        metavar="JSON",
        check=json_object,
    )

    def defaults(self) -> Defaults:
        """The defaults in the form that decoding uses: temperature 0 is greedy, top_k 0 is off."""
        from firn.core.values import Defaults, Sampling

        options = {name: getattr(self, f"default_{name}") for name in SAMPLING}
        given = {name: value for name, value in options.items() if value is not None}
        if given.get("temperature", 1.0) < GREEDY_BELOW:
            given["temperature"] = 0.0
        given["top_k"] = max(given.get("top_k", 0), 0)
        kwargs = self.default_chat_template_kwargs
        return Defaults(
            sampling=Sampling(**given),
            template_kwargs=json.loads(kwargs) if kwargs else {},
            thinking_budget=self.default_thinking_token_budget,
        )


# --- the model's own -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelDefaults:
    """values: by the names of `Sampling`. warnings: a line for each value that cannot be used."""

    path: Path
    values: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


def of_model(folder: Path) -> ModelDefaults:
    """The sampling defaults in the folder's generation_config.json; empty if there is no file."""
    path = folder / GENERATION_CONFIG
    try:
        given = json.loads(path.read_bytes())
    except FileNotFoundError:
        return ModelDefaults(path)
    except (OSError, ValueError, RecursionError) as error:
        return ModelDefaults(path, warnings=(f"{path} cannot be read: {error}",))
    if not isinstance(given, dict):
        return ModelDefaults(path, warnings=(f"{path} is not a JSON object",))
    values: dict[str, Any] = {}
    warnings: list[str] = []
    for name, bound in SAMPLING.items():
        value = given.get(name)
        if value is None:
            continue
        if bound.whole and isinstance(value, float) and value.is_integer():
            value = int(value)
        fault = bound.fault(value)
        if fault is None:
            values[name] = value
        else:
            warnings.append(f"{path}: {name} {str(value)[:60]} is ignored: it {fault}")
    if given.get("do_sample") is False:  # then transformers applies nothing but the penalties
        values = {name: value for name, value in values.items() if name.endswith("penalty")}
        values["temperature"] = 0.0
    return ModelDefaults(path, values, tuple(warnings))
