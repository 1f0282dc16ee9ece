"""The processes that compute one model together, as MLX's group, and whether a model can be sharded.

MLX does the communication (TCP rings, RDMA, NCCL): every rank must call the same functions in the same
order.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any

import mlx.core as mx
from mlx_lm import utils as mlx_utils

from firn.core.errors import SetupError
from firn.models.load.recognise import is_vision

HOW = "start it as `mlx.launch -n 2 firn serve MODEL --tensor-parallel`"
MESSAGE_NBYTES = 1024
HEADS = {
    "num_attention_heads": "attention heads",
    "num_key_value_heads": "key-value heads",
    "num_attention_groups": "key-value heads",
    "linear_num_key_heads": "key heads in its linear layers",
    "linear_num_value_heads": "value heads in its linear layers",
    "num_heads": "heads in its linear layers",
    "index_n_heads": "index heads",
}
"""Keys of configurations, and their names in errors."""
KV_HEADS = ("num_key_value_heads", "num_attention_groups")
REPEATS_KV = ("qwen3_5",)
"""Modules of mlx-lm that give several ranks the same key-value head if there are too few."""
NOT_TEXT = ("vision_config", "audio_config", "mtp_config")


class RankGroup:
    """Wraps MLX's group. Owner: the process."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.rank = int(group.rank())
        self.size = int(group.size())

    @classmethod
    def join(cls) -> RankGroup:
        """Waits for the others. Raises SetupError."""
        try:
            group = mx.distributed.init()
        except (RuntimeError, ValueError) as e:
            raise SetupError(
                f"--tensor-parallel: the ranks cannot connect to each other: {e}"
            ) from e
        if group.size() < 2:
            raise SetupError(f"--tensor-parallel needs several processes: {HOW}")
        return cls(group)

    def shard(self, model: Any) -> None:
        """Reduce a model to this rank's slice, before its weights are read."""
        if not hasattr(model, "shard"):
            raise SetupError("mlx-lm cannot divide this model among ranks")
        model.shard(self._group)

    def share(self, tokens: mx.array) -> mx.array:
        """Rank 0's tokens, on every rank; the others pass zeros. Lazy: nothing waits here."""
        return self.add(tokens.astype(mx.int32))

    def add(self, array: mx.array) -> mx.array:
        """The sum over all ranks, on every rank. Lazy."""
        return mx.distributed.all_sum(array, group=self._group)

    def from_first(self, message: bytes) -> bytes:
        """Broadcast a message of at most MESSAGE_NBYTES from rank 0."""
        own = message.ljust(MESSAGE_NBYTES, b"\0") if self.rank == 0 else bytes(MESSAGE_NBYTES)
        total = self.add(mx.array(list(own), dtype=mx.int32))
        mx.eval(total)
        values: list[int] = total.tolist()  # type: ignore[assignment]
        return bytes(values).rstrip(b"\0")


# --- can it be sharded ---------------------------------------------------------------------


def check(config: Mapping[str, Any], size: int, *, name: str, text_only: bool) -> None:
    """Raises SetupError if `size` ranks cannot serve this model. Reads no weights."""
    if is_vision(config) and not text_only:
        raise SetupError("--tensor-parallel serves no pictures: add --text-only to serve text only")
    kind = str(config["model_type"])
    module = mlx_utils.MODEL_REMAPPING.get(kind, kind)
    if "model_file" not in config and not _can_shard(module):
        raise SetupError(
            f"--tensor-parallel: mlx-lm cannot divide the architecture {kind} among ranks"
        )
    latent = "kv_lora_rank" in config or "kv_lora_rank" in (config.get("text_config") or {})
    for key, n in _heads(config):
        if n % size == 0 or (key in KV_HEADS and latent):
            continue
        if key in KV_HEADS and module.startswith(REPEATS_KV) and size % n == 0:
            continue
        raise SetupError(
            f"--tensor-parallel: {name} has {n} {HEADS[key]}, which {size} ranks cannot share evenly"
        )


def _can_shard(module: str) -> bool:
    try:
        imported = importlib.import_module(f"mlx_lm.models.{module}")
    except ImportError:
        return False
    return hasattr(getattr(imported, "Model", None), "shard")


def _heads(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    for key, value in config.items():
        if isinstance(value, Mapping) and key not in NOT_TEXT:
            yield from _heads(value)
        elif key in HEADS and isinstance(value, int) and value > 0:
            yield key, value
