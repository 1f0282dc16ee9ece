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
    for folder in (model, adapter):
        if folder is None:
            continue
        for entry in _config_entries(folder):
            _frame(digest, entry)
        for entry in sorted(_tensor_entries(folder)):
            _frame(digest, entry)
    return digest.digest()


def _config_entries(folder: Path) -> Iterator[bytes]:
    for name in ("config.json", "adapter_config.json"):
        path = folder / name
        if path.exists():
            config = json.loads(path.read_text(encoding="utf-8"))
            kept = {k: v for k, v in config.items() if k not in IGNORED_CONFIG}
            yield json.dumps(kept, sort_keys=True).encode()


def _tensor_entries(folder: Path) -> Iterator[bytes]:
    """One entry a tensor: name, dtype, shape, and its first and last bytes."""
    for path in folder.glob("*.safetensors"):
        try:
            yield from _entries_of(path)
        except (OSError, ValueError, KeyError, struct.error) as e:
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
        for name, tensor in header.items():
            if name == "__metadata__":
                continue
            start, end = tensor["data_offsets"]
            if base + end > size:
                raise ValueError(f"{name} ends past the end of the file")
            f.seek(base + start)
            head = f.read(min(SAMPLE_NBYTES, end - start))
            f.seek(base + max(start, end - SAMPLE_NBYTES))
            tail = f.read(min(SAMPLE_NBYTES, end - start))
            label = json.dumps([name, tensor["dtype"], tensor["shape"]]).encode()
            yield label + b"\0" + hashlib.blake2b(head + tail, digest_size=32).digest()


def _frame(digest: hashlib.blake2b, field: bytes) -> None:
    digest.update(len(field).to_bytes(8, "little"))
    digest.update(field)
