"""Settings of the prefix cache and its tiers, and the folder where a user's caches are kept."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from firn.config.options import option
from firn.core.errors import SetupError


def default_write_budget_gb(platform: str = sys.platform) -> float:
    """GiB a day. On macOS, Time Machine's local snapshots keep what was written and deleted again for
    a day, so a day's writes must fit on the disk beside the cache."""
    return 20.0 if platform == "darwin" else 64.0


@dataclass(frozen=True, slots=True)
class CacheConfig:
    disable_prefix_cache: bool = option(False, "Recompute every prompt and store nothing.")
    cache_memory_mb: int = option(
        0,
        "Memory for computed prefixes, in MiB; auto (or 0) depends on what is free once the model is "
        "loaded.",
        low=0,
        high=1 << 30,
        words={"auto": 0},
    )
    """0: depends on the free memory."""
    cache_memory_percent: float = option(
        0.2,
        "Share of the free memory that auto means for --cache-memory-mb: 0.2 is a fifth.",
        low=0.001,
        high=1,
    )
    cache_block_tokens: int = option(256, "Tokens in a block of the cache.", low=16, high=8192)
    reuse: Literal["full", "exact"] = option(
        "full",
        "full: reuse to the token. exact: resume only at the ends of prefill chunks, so that "
        "cached output is bit for bit the uncached output.",
    )
    kv_cache_quantization: bool = option(
        False, "Quantise the stored prefixes of plain attention: smaller, slightly inexact."
    )
    kv_cache_quantization_bits: Literal[8, 4] = option(8, "Bits of a quantised value.")
    kv_cache_quantization_group_size: Literal[32, 64, 128] = option(
        64, "Values that share a scale."
    )
    cache_pin_max_mb: int = option(
        1024, "Memory that pinned prefixes may use, in MiB.", low=0, high=1 << 30
    )
    warm_prompts: Path | None = option(
        None,
        "JSON file of prompts to compute at start: a list of texts, message lists, or objects "
        "with messages and tools.",
        metavar="FILE",
    )
    no_ssd_cache: bool = option(False, "Keep computed prefixes in memory only.")
    ssd_cache_dir: Path | None = option(
        None, "Folder for computed prefixes (otherwise the user's cache folder).", metavar="DIR"
    )
    ssd_cache_max_gb: float = option(
        0.0,
        "Limit of that folder in GiB, for all processes that share it; auto is 10, less when the "
        "disk is small.",
        low=0,
        high=1 << 20,
        words={"auto": 0.0},
    )
    """0: depends on the free disk space."""
    ssd_write_budget_gb_per_day: float = option(
        default_write_budget_gb(),
        "GiB that may be written to that folder in 24 hours, so that the disk lasts; 0 for no limit.",
        low=0,
        high=1 << 20,
    )
    ssd_cache_key_file: Path | None = option(
        None, "Encrypt the records of every tier with the key in this file.", metavar="FILE"
    )
    tiers: tuple[str, ...] = option(
        (),
        "Store that servers share, a tier below the folder: s3://bucket/prefix or redis://host/0; "
        "repeat it for both.",
        flag="--tier",
        metavar="ADDRESS",
        secret=True,
    )
    kv_events: str | None = option(
        None,
        "Tell routers which blocks are stored, at an address like tcp://127.0.0.1:5557; subscribers see "
        "tokens.",
        metavar="ADDRESS",
    )
    share_cache: bool = option(
        False, "Use one cache for all API keys (otherwise each key has a private one)."
    )


def default_cache_dir(
    environ: Mapping[str, str] = os.environ, *, platform: str = sys.platform
) -> Path:
    """Where this platform keeps a user's caches."""
    if platform == "darwin":
        return _home() / "Library" / "Caches" / "firn"
    base = environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base.startswith("/") else _home() / ".cache") / "firn"


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError as e:
        raise SetupError("This user has no home folder; set HOME or XDG_CACHE_HOME.") from e


def kernels_dir() -> Path:
    """Where compiled GPU kernels are kept."""
    return default_cache_dir() / "kernels"


def converted_dir() -> Path:
    """Where models converted from other formats are kept: in the cache, next to the records."""
    return default_cache_dir() / "converted"
