"""Which model this is: a digest of its configuration and of a sample of every weight tensor.

Neither the folder's name nor its path counts, nor how the tensors are spread over files: the same
weights elsewhere are the same model, other weights under the same name are another one.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from firn.core.errors import SetupError

SAMPLE_NBYTES = 1024
MAX_HEADER_NBYTES = 512 << 20
IGNORED_CONFIG = frozenset({"_name_or_path", "transformers_version", "mlx_lm_version"})


def fingerprint(model: Path, *, adapter: Path | None = None) -> bytes:
    """32 bytes. Raises SetupError when a weight file cannot be read."""
    digest = hashlib.blake2b(digest_size=32, person=b"firn-model")
    _add(digest, model / "config.json", "model*.safetensors")
    if adapter is not None:
        _add(digest, adapter / "adapter_config.json", "adapters.safetensors")
    return digest.digest()


def _add(digest: hashlib.blake2b, config: Path, weights: str) -> None:
    """What mlx-lm reads of a folder, and nothing that merely lies beside it."""
    for entry in _config_entries(config):
        _frame(digest, entry)
    for entry in sorted(_tensor_entries(config.parent, weights)):
        _frame(digest, entry)


def _config_entries(path: Path) -> Iterator[bytes]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        kept = {k: v for k, v in config.items() if k not in IGNORED_CONFIG}
        yield json.dumps(kept, sort_keys=True).encode()
        if "model_file" in config:  # the model's own code
            yield (path.parent / config["model_file"]).read_bytes()
    except (OSError, ValueError, TypeError, AttributeError) as e:
        raise SetupError(f"{path} cannot be read: {e}") from e


def _tensor_entries(folder: Path, pattern: str) -> Iterator[bytes]:
    """One entry a tensor: name, dtype, shape, and its first and last bytes."""
    for path in folder.glob(pattern):
        try:
            yield from _entries_of(path)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, struct.error) as e:
            raise SetupError(
                f"{path.name} in {folder} is not a readable safetensors file: {e}"
            ) from e


def _entries_of(path: Path) -> Iterator[bytes]:
    with path.open("rb") as f:
        (n_header,) = struct.unpack("<Q", f.read(8))
        if n_header > MAX_HEADER_NBYTES:
            raise ValueError("header too large")
        header: dict[str, Any] = json.loads(f.read(n_header))
        base = 8 + n_header
        size = path.stat().st_size
        if base > size:
            raise ValueError("the header ends past the end of the file")
        for name, tensor in header.items():
            if name == "__metadata__":
                continue
            start, end = tensor["data_offsets"]
            if not 0 <= start <= end <= size - base:
                raise ValueError(f"{name} lies outside of the file")
            f.seek(base + start)
            head = f.read(min(SAMPLE_NBYTES, end - start))
            f.seek(base + max(start, end - SAMPLE_NBYTES))
            tail = f.read(min(SAMPLE_NBYTES, end - start))
            label = json.dumps([name, tensor["dtype"], tensor["shape"]]).encode()
            yield label + b"\0" + hashlib.blake2b(head + tail, digest_size=32).digest()


def _frame(digest: hashlib.blake2b, field: bytes) -> None:
    digest.update(len(field).to_bytes(8, "little"))
    digest.update(field)
