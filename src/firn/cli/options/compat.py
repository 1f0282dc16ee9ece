"""Flags of other servers that people have in their scripts, and how firn treats each of them.

A flag that firn has by the same name does the same (SAME). Any other is one of three: another name
for one of firn's options (AliasFlag); something that firn always does, or that needs no setting
(IgnoredFlag: one line says so); something that firn does not do (RefusedFlag: one line says what to
do instead). docs/from-vllm-mlx.md is this table for people; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class AliasFlag:
    """key: of the option it sets. unset: the value that means "not given" to the other server."""

    key: str
    metavar: str = "N"
    unset: str | None = None


@dataclass(frozen=True, slots=True)
class IgnoredFlag:
    """metavar None: a switch, without a value."""

    text: str
    metavar: str | None = None


@dataclass(frozen=True, slots=True)
class RefusedFlag:
    """unless: values that ask for what firn does anyway."""

    text: str
    metavar: str | None = None
    unless: tuple[str, ...] = ()


ForeignFlag = AliasFlag | IgnoredFlag | RefusedFlag

_OTHER_DRAFTS = "these are heads for one model: see --draft-model for a small model that drafts"
_ONE_TOKEN = "firn has its own drafters: see --speculation"
_SPARSE = "see --sparse-prefill, --sparse-prefill-over, --sparse-prefill-keep and --draft-model"
_TABLES = "write a [models.NAME] table for each model in the TOML file of --config"
_LAZY = "with several models, or with --keep-alive, a model is loaded on first use"
_EMBEDDINGS = "serve the embedding model next to the other: firn serve MODEL EMBEDDING-MODEL"
_RERANKER = "serve the reranker next to the other: firn serve MODEL RERANKER"
_BYTES = "the cache is bounded by bytes: see --cache-memory-mb and --ssd-cache-max-gb"
_NO_AUDIO = "firn serves no audio: there is nothing to limit"

VLLM_MLX: Mapping[str, ForeignFlag] = MappingProxyType(
    {
        # --- several models
        "--models-config": RefusedFlag(_TABLES, "FILE"),
        "--memory-budget-gb": AliasFlag("fleet.model_memory_gb", "X"),
        "--lazy-load-model": RefusedFlag(_LAZY),
        "--auto-unload-idle-seconds": AliasFlag("fleet.keep_alive", "X", unset="0"),
        # --- batching
        "--continuous-batching": IgnoredFlag("continuous batching is always on"),
        "--max-num-seqs": AliasFlag("engine.max_concurrency"),
        "--prefill-batch-size": IgnoredFlag(
            "prompts are read one chunk at a time, in turn: see --prefill-chunk", "N"
        ),
        "--completion-batch-size": IgnoredFlag(
            "all replies decode in one batch: see --max-concurrency", "N"
        ),
        "--stream-interval": IgnoredFlag(
            "the tokens of a step are sent immediately, in one write", "N"
        ),
        "--chunked-prefill-tokens": AliasFlag("engine.prefill_chunk", unset="0"),
        "--prefill-step-size": AliasFlag("engine.prefill_chunk"),
        "--mllm-prefill-step-size": AliasFlag("engine.prefill_chunk", unset="0"),
        # --- the cache
        "--enable-prefix-cache": IgnoredFlag(
            "the prefix cache is always on, unless --disable-prefix-cache"
        ),
        "--prefix-cache-size": IgnoredFlag(_BYTES, "N"),
        "--no-memory-aware-cache": IgnoredFlag(_BYTES),
        "--kv-cache-min-quantize-tokens": IgnoredFlag(
            "stored prefixes are quantised in blocks, whatever the prompt's length", "N"
        ),
        "--max-kv-size": RefusedFlag(
            "firn never forgets the beginning of a prompt; --max-context refuses longer ones",
            "N",
        ),
        "--use-paged-cache": IgnoredFlag("the cache is always kept in blocks"),
        "--paged-cache-block-size": AliasFlag("cache.cache_block_tokens"),
        "--max-cache-blocks": IgnoredFlag(_BYTES, "N"),
        "--prefix-trie-cache": IgnoredFlag("prefixes are always kept in one tree"),
        "--prefix-trie-cache-size": IgnoredFlag(_BYTES, "N"),
        "--prefix-trie-cache-memory-mb": AliasFlag("cache.cache_memory_mb"),
        # --- speculation
        "--enable-mtp": RefusedFlag(_ONE_TOKEN),
        "--mtp-num-draft-tokens": RefusedFlag(_ONE_TOKEN, "N"),
        "--mtp-optimistic": RefusedFlag("firn never accepts a token that the model did not pick"),
        "--mllm-draft-model": RefusedFlag(_OTHER_DRAFTS, "MODEL"),
        "--mllm-draft-kind": RefusedFlag(_ONE_TOKEN, "KIND"),
        "--mllm-draft-block-size": RefusedFlag(_ONE_TOKEN, "N"),
        "--default-mllm-draft": RefusedFlag(_ONE_TOKEN),
        "--specprefill": RefusedFlag(_SPARSE),
        "--specprefill-threshold": RefusedFlag(_SPARSE, "N"),
        "--specprefill-keep-pct": RefusedFlag(_SPARSE, "X"),
        "--specprefill-backbone-pct": RefusedFlag(_SPARSE, "X"),
        "--specprefill-draft-model": RefusedFlag(_SPARSE, "MODEL"),
        # --- tools, pictures, sound
        "--enable-auto-tool-choice": IgnoredFlag("tool calls are read wherever tools are offered"),
        "--mcp-config": RefusedFlag(
            "tools are run by the client: connect MCP servers to the agent that calls this one",
            "FILE",
        ),
        "--mllm": IgnoredFlag(
            "config.json tells whether a model accepts pictures; see --text-only"
        ),
        "--max-audio-upload-mb": IgnoredFlag(_NO_AUDIO, "N"),
        "--max-tts-input-chars": IgnoredFlag(_NO_AUDIO, "N"),
        # --- embeddings
        "--embedding-model": RefusedFlag(_EMBEDDINGS, "MODEL"),
        "--embedding-max-length": RefusedFlag(
            "a text may be as long as the embedding model can read; longer ones are a 400", "N",
            unless=("auto",),
        ),
        "--embedding-overflow-policy": RefusedFlag(
            "texts are not cut: one that is too long is a 400", "truncate|error",
            unless=("error",),
        ),
        "--rerank-model": RefusedFlag(_RERANKER, "MODEL"),
        # --- the rest
        "--enable-metrics": IgnoredFlag("/metrics is always available"),
    }
)  # fmt: skip

SAME = (
    "--served-model-name", "--host", "--port", "--api-key", "--trust-remote-code",
    "--max-tokens", "--max-request-tokens", "--timeout", "--rate-limit", "--warm-prompts",
    "--disable-prefix-cache", "--cache-memory-mb", "--cache-memory-percent",
    "--kv-cache-quantization", "--kv-cache-quantization-bits", "--kv-cache-quantization-group-size",
    "--ssd-cache-dir", "--ssd-cache-max-gb", "--gpu-memory-utilization",
    "--tool-call-parser", "--reasoning-parser",
    "--default-temperature", "--default-top-p", "--default-top-k", "--default-min-p",
    "--default-presence-penalty", "--default-repetition-penalty",
    "--default-thinking-token-budget", "--default-chat-template-kwargs",
    "--download-timeout", "--download-retries", "--offline",
)  # fmt: skip
"""Flags of vllm-mlx that are options of firn by the same name."""

PARSERS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "model.tool_call_parser": {
            "generic": "auto",
            "glm4": "glm47",
            "granite3": "granite",
            "gpt-oss": "harmony",
            "nous": "hermes",
            "moonshot": "kimi",
            "llama4": "llama",
            "qwen3.5": "qwen3_xml",
            "step": "step3p5",
        },
        "model.reasoning_parser": {
            "deepseek_v4": "think",
            "glm4": "think",
            "poolside_v1": "think",
            "step3p5": "think",
        },
    }
)
"""vllm-mlx's names of formats that firn calls by another name."""
