"""Settings of the engine: lengths, rows, prefill chunks, speculation, memory and arithmetic."""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from firn.config.options import BadValue, option

DRAFTERS = Path(__file__).parents[1] / "models" / "speculation" / "drafters"
"""Listed, never imported: a wrong name must be reported before a model is loaded, without MLX."""
BlasChoice = Literal["auto", "system", "bundled", "none"]
WeightsDtype = Literal["auto", "model", "float32"]


def speculation(text: str) -> str:
    """auto, off, or the name of a drafter: a file in models/speculation/drafters."""
    name = text.lower()
    modules = pkgutil.iter_modules([str(DRAFTERS)])
    known = ("auto", "off", *sorted(m.name for m in modules if not m.name.startswith("_")))
    if name not in known:
        raise BadValue(f"{text!r} is not one of {', '.join(known)}")
    return name


@dataclass(frozen=True, slots=True)
class EngineConfig:
    max_tokens: int = option(
        32768, "Longest reply in tokens, if a request sets no limit.", low=1, high=2**31 - 1
    )
    max_request_tokens: int = option(
        0,
        "Longest reply in tokens that a request may ask for; 0 for no limit but the context.",
        low=0,
        high=2**31 - 1,
    )
    max_context: int = option(
        0,
        "Prompt and reply together, in tokens; auto is what the model can attend to.",
        low=0,
        high=2**31 - 1,
        words={"auto": 0},
    )
    """0: the model's own limit."""
    max_concurrency: int = option(
        32, "Requests that generate at the same time; more wait in the queue.", low=1, high=4096
    )
    max_queue: int = option(
        256,
        "Requests that may wait for a free row; more get a 429 and are told when to try again.",
        low=0,
        high=1_000_000,
    )
    prefill_chunk: int = option(
        0,
        "Prompt tokens read between two decoding steps; auto depends on the device, on the length of "
        "the context and on who else is waiting.",
        low=0,
        high=65536,
        words={"auto": 0},
    )
    """0: depends on the device."""
    speculation: str = option(
        "auto",
        "Draft several tokens per step and have the model check them; the text stays the same. "
        "lookup: what followed the same words in the prompt, the reply or an earlier reply; model: "
        "what --draft-model proposes; mtp: what the model's own prediction head proposes; auto: "
        "all that are available, where it pays.",
        metavar="auto|off|lookup|model|mtp",
        check=speculation,
    )
    draft_model: str | None = option(
        None,
        "A small model with the same tokenizer, which drafts tokens for this one or scores its prompts "
        "(--sparse-prefill): a folder, or the id of a model on the Hugging Face hub.",
        metavar="MODEL",
    )
    max_step_ms: float = option(
        0.0,
        "How long reading a prompt may hold up requests that generate, in milliseconds; chunks are "
        "sized to fit. auto is what the usual chunk takes after a short context.",
        low=0,
        high=600_000,
        words={"auto": 0.0},
    )
    scheduler_headroom_gb: float | None = option(
        None,
        "Device memory left free, in GiB; requests wait when less is left. auto leaves the system an "
        "eighth of memory, and a GPU 2.",
        low=0,
        high=4096,
        words={"auto": None},
    )
    wired_limit: float = option(
        0.0,
        "macOS: GiB of the weights that may not be paged out, never more than the weights. "
        "auto is off: kernel panics have been traced to it.",
        low=0,
        high=4096,
        metavar="auto|off|GB",
        words={"auto": 0.0, "off": 0.0},
    )
    blas: BlasChoice = option(
        "auto",
        "Linux, CPU: the library that multiplies matrices. system: the system's OpenBLAS; bundled: the "
        "one that firn[cpu] installs; none: MLX's own; auto: the fastest.",
    )
    cpu_dtype: WeightsDtype = option(
        "auto",
        "CPU: compute 16-bit and quantised weights in float32, or as the model has them; "
        "auto: in float32 where that is faster and there is memory for it.",
    )
    gpu_memory_utilization: float | None = option(
        None,
        "Share of the device's memory to use, in place of --scheduler-headroom-gb.",
        low=0.01,
        high=1,
    )
