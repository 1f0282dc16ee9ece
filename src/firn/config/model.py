"""Settings of the model: which one, where from, and how its replies are read."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from firn.config.options import option

BUILTIN_MODEL = "firn-demo"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    path: str = option(
        BUILTIN_MODEL,
        "A model folder, the id of a model on the Hugging Face hub, or smollm2.",
        flag=None,
        env="FIRN_MODEL",
        metavar="MODEL",
        check=os.path.expanduser,
    )
    adapter: Path | None = option(
        None, "Folder with a LoRA adapter to load on top of the model.", metavar="FOLDER"
    )
    trust_remote_code: bool = option(
        False, "Allow the model's folder to run its own Python code. Only for models you trust."
    )
    offline: bool = option(False, "Download nothing: serve only models that are on this machine.")
    download_timeout: int | None = option(
        None, "Seconds without data after which a download fails.", low=1, high=86400
    )
    download_retries: int = option(3, "How often a broken download is resumed.", low=0, high=100)
    text_only: bool = option(False, "Serve the text part of a vision model, without images.")
    tensor_parallel: bool = option(
        False, "Shard the model over the processes that mlx.launch started."
    )
    tool_call_parser: str = option(
        "auto",
        "The format of the model's tool calls; auto finds it in the chat template.",
        metavar="NAME",
    )
    reasoning_parser: str = option(
        "auto",
        "The format of the model's thinking; auto finds it in the chat template.",
        metavar="NAME",
    )
