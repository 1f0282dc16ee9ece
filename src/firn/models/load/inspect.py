"""What a model folder holds and needs, without reading its weights; and the device.

`firn doctor` prints these reports. A folder's faults are collected, not raised: someone who fixes
one wants to know about the others, too.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
from mlx_lm import utils as mlx_utils
from mlx_lm.models.cache import ChunkedKVCache, RotatingKVCache, make_prompt_cache

from firn.core.errors import SetupError
from firn.core.memory_plan import Transient
from firn.models.faults import first_line
from firn.models.layers import leaves
from firn.models.load.foreign import foreign_format
from firn.models.load.loader import read_config, tokenizer_fault
from firn.models.load.local import find
from firn.models.load.packaged import no_such_model
from firn.models.load.recognise import is_vision, stated_context_length
from firn.models.load.tensor_header import TensorPlace, read_header
from firn.models.load.transient import transient_of
from firn.models.speculation.mtp_load import headless_classes

DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8",
    "F8_E5M2": "float8",
}
PART_NAME = re.compile(r"^(model.*)-(\d{5})-of-(\d{5})\.safetensors$")

# --- a model -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CacheCost:
    """Memory that the context takes. fixed_nbytes: for full windows and recurrent states."""

    per_token_nbytes: int
    fixed_nbytes: int
    n_layers: int
    n_window: int
    n_state: int

    def nbytes(self, n_tokens: int) -> int:
        return self.fixed_nbytes + self.per_token_nbytes * n_tokens


@dataclass(frozen=True, slots=True)
class ModelReport:
    """What a model folder holds. None: it does not say."""

    folder: Path
    architecture: str | None = None
    library: Literal["mlx-lm", "mlx-vlm"] | None = None
    weights_nbytes: int = 0
    float32_nbytes: int = 0
    """Memory that the weights take if they are widened to float32."""
    n_files: int = 0
    dtype: str | None = None
    context_length: int | None = None
    cache: CacheCost | None = None
    transient: Transient | None = None
    """Memory that a prefill chunk takes while it runs."""
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


@dataclass(slots=True)
class _Findings:
    """Collected while one folder is inspected."""

    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def local_folder(name: str) -> Path | None:
    """The folder of a path or of a hub id that was downloaded before; None: not on this machine."""
    folder = Path(os.path.expanduser(name))
    if folder.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        return folder
    try:
        return Path(mlx_utils.hf_repo_to_path(name))
    except FileNotFoundError as error:  # huggingface_hub: no snapshot, or not all of it
        local = find(name)
        if local is None and "/" not in name:
            raise no_such_model(name) from error
        return local
    except ValueError as error:  # huggingface_hub: not the form of an id
        local = find(name)
        if local is not None:
            return local
        raise SetupError(f"{name} is neither a folder nor a hub id (owner/name).") from error


def inspect_folder(
    folder: Path, *, fused_head_dims: frozenset[int] = frozenset(), dtype: str = "bfloat16"
) -> ModelReport:
    """fused_head_dims, dtype: what the device that will compute it has kernels for, and computes in."""
    try:
        config = _config(folder)
    except SetupError as error:
        return ModelReport(folder, problems=(error.message,))
    findings = _Findings()
    _check_tokenizer(folder, findings)
    headers = dict(_headers(folder, findings))
    _check_index(folder, headers, findings)
    library = _library(config, findings)
    cache = None
    if library == "mlx-lm" and "model_file" not in config and not findings.problems:
        cache = _cache_cost(folder, findings)
    return ModelReport(
        folder=folder,
        architecture=str(config["model_type"]),
        library=library,
        weights_nbytes=sum(t.nbytes for header in headers.values() for t in header.values()),
        float32_nbytes=_float32_nbytes(config, headers),
        n_files=len(headers),
        dtype=_dtype(config, headers),
        context_length=stated_context_length(config),
        cache=cache,
        transient=transient_of(config, fused_head_dims=fused_head_dims, dtype=dtype),
        notes=tuple(findings.notes),
        problems=tuple(findings.problems),
    )


def _config(folder: Path) -> dict[str, Any]:
    if not folder.exists():
        raise SetupError(f"There is no folder {folder}.")
    if not folder.is_dir():
        foreign = foreign_format(folder)
        raise SetupError(foreign or f"{folder} is a file; a model is a folder with a config.json.")
    return read_config(folder)


def _check_tokenizer(folder: Path, findings: _Findings) -> None:
    fault = tokenizer_fault(folder)
    if fault is not None:
        findings.problems.append(fault)
    settings = folder / "tokenizer_config.json"
    template = any((folder / f"chat_template.{end}").exists() for end in ("jinja", "json"))
    if settings.exists():
        try:
            template = template or bool(json.loads(settings.read_bytes()).get("chat_template"))
        except (OSError, ValueError, AttributeError) as error:
            findings.problems.append(f"{settings.name} cannot be read: {first_line(error)}")
            return
    if not template:
        findings.notes.append("It has no chat template: a base model, for /v1/completions.")


# --- weights -------------------------------------------------------------------------------


_Header = dict[str, TensorPlace]


def _headers(folder: Path, findings: _Findings) -> Iterator[tuple[str, _Header]]:
    """The tensors of every weight file, by the file's name; damaged files become problems."""
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        foreign = foreign_format(folder)
        findings.problems.append(foreign or "The weights are missing: no model*.safetensors file.")
    for path in files:
        try:
            yield path.name, read_header(path, exact=True)
        except (OSError, ValueError) as error:
            findings.problems.append(f"{path.name}: {first_line(error)}")


def _check_index(folder: Path, headers: Mapping[str, _Header], findings: _Findings) -> None:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        _check_part_names(folder, findings)
        return
    try:
        where: dict[str, str] = dict(json.loads(index.read_bytes())["weight_map"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        findings.problems.append(f"{index.name} cannot be read: {first_line(error)}")
        return
    names = sorted(set(where.values()))
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        findings.problems.append(
            f"{len(missing)} of {len(names)} weight files are missing: {_some(missing)}."
        )
    lost = [t for t, name in where.items() if name in headers and t not in headers[name]]
    if lost:
        findings.problems.append(
            f"{len(lost)} tensors are not in the files that the index names: {_some(lost)}."
        )


def _check_part_names(folder: Path, findings: _Findings) -> None:
    """Names like 00001-of-00004 tell how many files there should be, even without an index."""
    parts = [m for f in folder.glob("model*.safetensors") if (m := PART_NAME.match(f.name))]
    for stem, total in sorted({(m[1], m[3]) for m in parts}):
        present = {int(m[2]) for m in parts if (m[1], m[3]) == (stem, total)}
        missing = [i for i in range(1, int(total) + 1) if i not in present]
        if missing:
            names = [f"{stem}-{i:05d}-of-{total}.safetensors" for i in missing]
            findings.problems.append(
                f"{len(missing)} of {int(total)} weight files are missing: {_some(names)}."
            )


def _dtype(config: Mapping[str, Any], headers: Mapping[str, _Header]) -> str | None:
    nbytes: Counter[str] = Counter()
    for header in headers.values():
        for tensor in header.values():
            if tensor.dtype in DTYPES:
                nbytes[DTYPES[tensor.dtype]] += tensor.nbytes
    if not nbytes:
        return None
    plain = nbytes.most_common(1)[0][0]
    packed = config.get("quantization")
    if isinstance(packed, Mapping) and "bits" in packed:
        return f"{packed['bits']}-bit weights in groups of {packed.get('group_size')}, {plain}"
    return plain


def _float32_nbytes(config: Mapping[str, Any], headers: Mapping[str, _Header]) -> int:
    packed = config.get("quantization")
    bits = packed.get("bits") if isinstance(packed, Mapping) else None
    total = 0
    for header in headers.values():
        for tensor in header.values():
            if tensor.dtype in ("BF16", "F16"):
                total += 2 * tensor.nbytes
            elif tensor.dtype == "U32" and isinstance(bits, int) and bits > 0:
                total += tensor.nbytes * 32 // bits
            else:
                total += tensor.nbytes
    return total


# --- architecture --------------------------------------------------------------------------


def _library(config: Mapping[str, Any], findings: _Findings) -> Literal["mlx-lm", "mlx-vlm"] | None:
    kind = str(config["model_type"])
    module = mlx_utils.MODEL_REMAPPING.get(kind, kind)
    if "model_file" in config:
        findings.notes.append("It contains its own Python code: serve it with --trust-remote-code.")
        return "mlx-lm"
    if is_vision(config):
        if _is_installed("mlx_vlm"):
            return "mlx-vlm"
        findings.notes.append(
            "It accepts pictures: install firn[vision], or serve it without them (--text-only)."
        )
    if _is_installed(f"mlx_lm.models.{module}"):
        return "mlx-lm"
    if _is_installed(f"mlx_vlm.models.{module}"):
        return "mlx-vlm"
    hint = "" if _is_installed("mlx_vlm") else "; if it is a vision model, install firn[vision]"
    findings.problems.append(
        f"The architecture {kind!r} is not known to the installed mlx-lm{hint}."
    )
    return None


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # a parent is missing, or this is not a module name
        return False


def _cache_cost(folder: Path, findings: _Findings) -> CacheCost | None:
    """Build the model on lazy weights and trace two prompts, without reading a weight.

    This also finds tensors that are missing or have the wrong shape.
    """
    try:
        model, _ = mlx_utils.load_model(folder, lazy=True, get_model_classes=headless_classes)
    except Exception as error:  # any module of mlx-lm may run here, and doctor must go on
        findings.problems.append(f"mlx-lm cannot build it: {first_line(error)}")
        return None
    try:
        # Buffers grow in steps of 256 tokens, so this difference is exact for all of them.
        pairs = list(zip(_first_caches(model, 1), _first_caches(model, 257), strict=True))
    except Exception as error:
        findings.notes.append(f"The size of its cache could not be estimated: {first_line(error)}")
        return None
    windows = [long for _, long in pairs if isinstance(long, RotatingKVCache | ChunkedKVCache)]
    others = [(s, b) for s, b in pairs if not isinstance(b, RotatingKVCache | ChunkedKVCache)]
    states = [long.nbytes for short, long in others if short.nbytes == long.nbytes > 0]
    return CacheCost(
        per_token_nbytes=sum(long.nbytes - short.nbytes for short, long in others) // 256,
        fixed_nbytes=sum(states) + sum(map(_window_nbytes, windows)),
        n_layers=len(pairs),
        n_window=len(windows),
        n_state=len(states),
    )


def _first_caches(model: Any, n_tokens: int) -> list[Any]:
    """The layers' caches after a prompt. Nothing is computed: their shapes are known without it."""
    layers = make_prompt_cache(model)
    model(mx.zeros((1, n_tokens), mx.int32), cache=layers)
    return [layer for layer in leaves(layers) if layer is not None]


def _window_nbytes(layer: Any) -> int:
    if layer.keys is None:
        return 0
    n_tokens = layer.max_size if isinstance(layer, RotatingKVCache) else layer.chunk_size
    return int(layer.nbytes // layer.keys.shape[2] * n_tokens)


# --- texts ---------------------------------------------------------------------------------


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
