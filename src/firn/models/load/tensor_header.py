"""The header of a safetensors file: where each tensor is. The numbers are not read."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from firn.core.units import MIB

LFS_POINTER = b"version https://git-lfs"
MAX_NBYTES = 512 * MIB


class TensorPlace(NamedTuple):
    """Its bytes are file[start : start + nbytes]."""

    dtype: str
    """As the format names it: BF16, U32."""
    shape: Any
    start: int
    nbytes: int


def read_header(path: Path, *, exact: bool = False) -> dict[str, TensorPlace]:
    """The tensors by name. exact: nothing may follow the last one. Raises OSError, and ValueError with
    what is wrong with the file."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        first = file.read(8)
        if LFS_POINTER.startswith(first) and first:
            raise ValueError("is a git-lfs pointer, not the weights; run `git lfs pull`.")
        base = 8 + int.from_bytes(first, "little")
        if len(first) < 8 or base > min(size, MAX_NBYTES):
            raise ValueError("is truncated or not a safetensors file; download it again.")
        text = file.read(base - 8)
    try:
        entries: dict[str, Any] = json.loads(text)
        places = ((k, given) for k, given in entries.items() if k != "__metadata__")
        tensors = {name: _place(given, base) for name, given in places}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError("has a damaged header; download it again.") from error
    end = max((t.start + t.nbytes for t in tensors.values()), default=base)
    if end > size or (exact and end < size):
        raise ValueError(f"has {size} bytes where its header promises {end}; download it again.")
    return tensors


def _place(given: dict[str, Any], base: int) -> TensorPlace:
    start, end = given["data_offsets"]
    if not 0 <= start <= end:
        raise ValueError("a tensor ends before it begins")
    return TensorPlace(str(given["dtype"]), given["shape"], base + start, end - start)
