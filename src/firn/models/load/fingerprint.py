"""The identity of a model: its configuration, every byte of its weights, and the code that runs it.

The folder's name and path do not count, nor how the tensors are spread over files: the same weights
elsewhere are the same model, other weights under the same name are another one. Separate threads
hash the weights while the loader reads them. The digest is remembered under the files' identities
(`weight_memory`), so that only the first start pays for it.
"""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import os
import platform
import threading
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlx.core as mx

from firn.core.errors import SetupError
from firn.models.load.weight_hash import FileIdentity, WeightHash, identities
from firn.models.load.weight_memory import WeightMemory

log = logging.getLogger("firn.models")

IGNORED_CONFIG = frozenset({"_name_or_path", "transformers_version", "mlx_lm_version"})
SIDE_CONFIG = "hf_quant_config.json"
"""Where some exporters keep the quantisation; both loaders read it."""
REWRITTEN_DTYPES = frozenset({"F8_E8M0"})
"""MLX cannot read these: mlx-vlm changes such a file's header, loads it, and changes it back."""
LOGGED_NBYTES = 1 << 30


class Fingerprint:
    """Computed in threads from the moment it is made; `result` waits for them. Owner: its maker.

    vision: mlx-vlm loads the model, with its own rules for which files are weights.
    """

    def __init__(
        self,
        model: Path,
        *,
        adapter: Path | None = None,
        vision: bool = False,
        memory: WeightMemory | None = None,
    ) -> None:
        """Raises SetupError for what shows immediately: a bad configuration, a bad header."""
        self._memory = memory
        self._began = time.perf_counter()
        self._code = _Code(vision=vision)
        self._config = list(_config_entries(model / "config.json", vision=vision))
        self._parts = [_Weights(weight_files(model, vision=vision), memory)]
        if adapter is not None:
            self._config += _config_entries(adapter / "adapter_config.json", vision=False)
            self._parts.append(_Weights(adapter_files(adapter), memory))

    def result(self) -> bytes:
        """32 bytes. Call it after the weights are loaded: what was hashed must be what was loaded.

        Raises SetupError if a file cannot be read, or has changed in the meantime.
        """
        digest = hashlib.blake2b(digest_size=32, person=b"firn-model")
        for entry in (self._code.result(), *self._config):
            _frame(digest, entry)
        for part in self._parts:
            _frame(digest, part.result())
        hashed = [p for p in self._parts if p.was_hashed]
        nbytes = sum(p.nbytes for p in hashed)
        if nbytes >= LOGGED_NBYTES:
            took = time.perf_counter() - self._began
            log.info("%.1f GiB of weights hashed while they loaded (%.1f s)", nbytes / 2**30, took)
        return digest.digest()


class _Weights:
    """The digest of one folder's weight files: remembered, or being computed."""

    def __init__(self, paths: list[Path], memory: WeightMemory | None) -> None:
        self._paths = paths
        self._memory = memory
        self._files = _identities(paths)
        self.nbytes = sum(f.size for f in self._files)
        self._known = memory.recall(self._files) if memory else None
        self._hash = None if self._known else WeightHash(paths)
        if self._hash is not None and self._hash.dtypes & REWRITTEN_DTYPES:
            self._known = self._hash.result()

    @property
    def was_hashed(self) -> bool:
        return self._hash is not None

    def result(self) -> bytes:
        digest = self._known or self._hashed()
        now = _identities(self._paths)
        if now == self._files:
            if self._hash is not None and self._memory is not None:
                self._memory.remember(now, digest)
        elif self._known is None or WeightHash(self._paths).result() != digest:
            # A digest known before loading that still holds afterwards was right throughout. One
            # that was computed during loading may be of files that changed after they were loaded.
            raise self._changed()
        return digest

    def _hashed(self) -> bytes:
        assert self._hash is not None
        try:
            return self._hash.result()
        except SetupError as e:
            if _identities(self._paths) != self._files:
                raise self._changed() from e  # it was read while being rewritten
            raise

    def _changed(self) -> SetupError:
        where = self._paths[0].parent
        return SetupError(f"{where}: the weights changed while they were loaded; start again.")


def _identities(paths: list[Path]) -> tuple[FileIdentity, ...]:
    try:
        return identities(paths)
    except OSError as e:
        raise SetupError(f"{e.filename} cannot be read: {e.strerror}") from e


# --- which files ---------------------------------------------------------------------------


def weight_files(folder: Path, *, vision: bool) -> list[Path]:
    """The files that the loader reads, in its order: if two have a tensor, the last one counts."""
    if not vision:
        return [Path(p) for p in glob.glob(str(folder / "model*.safetensors"))]
    named = [folder / shard for shard in sorted(set(_weight_map(folder).values()))]
    files = [path for path in named if path.exists()]
    if not files:
        every = [Path(p) for p in glob.glob(str(folder / "*.safetensors"))]
        files = [path for path in every if not path.name.endswith("consolidated.safetensors")]
    return files


def _weight_map(folder: Path) -> Mapping[str, str]:
    """Tensor names to files. Empty if the index cannot be read: the loader will complain."""
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
        named = index["weight_map"]
        return {str(k): str(v) for k, v in named.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def adapter_files(folder: Path) -> list[Path]:
    """mlx-lm reads the first name; mlx-vlm reads the second if the first does not exist."""
    for name in ("adapters.safetensors", "weights.safetensors"):
        if (folder / name).exists():
            return [folder / name]
    return []


# --- configuration and code ----------------------------------------------------------------


def _config_entries(path: Path, *, vision: bool) -> Iterator[bytes]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        kept = {k: v for k, v in config.items() if k not in IGNORED_CONFIG}
        yield json.dumps(kept, sort_keys=True).encode()
        if "model_file" in config:  # the model's own code
            yield (path.parent / config["model_file"]).read_bytes()
        side = path.parent / SIDE_CONFIG
        if side.exists():
            yield b"quantization\0" + side.read_bytes()
        if vision:
            yield json.dumps(sorted(_weight_map(path.parent))).encode()
            if _reads_elsewhere(path.parent, config):
                log.warning(
                    "%s keeps weights outside its safetensors files: its records are not used "
                    "after a restart",
                    path.parent,
                )
                yield os.urandom(32)
    except (OSError, ValueError, TypeError, AttributeError) as e:
        raise SetupError(f"{path} cannot be read: {e}") from e


def _reads_elsewhere(folder: Path, config: Mapping[str, Any]) -> bool:
    """Whether mlx-vlm maps further files while it runs. Their bytes are not hashed, so records
    cannot be trusted after a restart."""
    text = config.get("text_config") or {}
    return bool(text.get("ple_storage")) or (folder / "offload_index.json").exists()


class _Code:
    """A digest, being computed, of the libraries that run the model: versions and sources.

    Versions alone are not enough: people patch installed packages. The device counts, too, since
    devices round differently.
    """

    def __init__(self, *, vision: bool) -> None:
        self._packages = ("mlx_lm", "mlx_vlm") if vision else ("mlx_lm",)
        self._digest = b""
        self._thread = threading.Thread(target=self._read, name="firn-code", daemon=True)
        self._thread.start()

    def result(self) -> bytes:
        self._thread.join()
        return self._digest

    def _read(self) -> None:
        digest = hashlib.blake2b(digest_size=32, person=b"firn-code")
        for name in ("mlx", *self._packages):
            _frame(digest, f"{name} {_version(name)}".encode())
        _frame(digest, _device().encode())
        for package in self._packages:
            for path in sorted(_sources(package)):
                _frame(digest, path.name.encode())
                _frame(digest, _source(path))
        self._digest = digest.digest()


def _version(package: str) -> str:
    try:
        return distribution(package.replace("_", "-")).version
    except PackageNotFoundError:
        return "none"


def _device() -> str:
    if mx.default_device() == mx.Device(mx.cpu):
        return f"cpu {platform.machine()}"
    return f"gpu {mx.device_info().get('architecture')}"


def _sources(package: str) -> Iterator[Path]:
    spec = find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        yield from (Path(folder) / "models").rglob("*.py")


def _source(path: Path) -> bytes:
    """The file's bytes; random ones if it cannot be read, since it may have changed."""
    try:
        return path.read_bytes()
    except OSError as e:
        log.warning(
            "%s cannot be read (%s): records are not used after a restart", path, e.strerror
        )
        return os.urandom(32)


def _frame(digest: hashlib.blake2b, field: bytes) -> None:
    digest.update(len(field).to_bytes(8, "little"))
    digest.update(field)
