"""What transformers finds out at every import is found out once for all processes of the tests.

It reads each of its two thousand modules for the names in them, and of every installed package the list
of its files: more than a third of a server's start, and the tests start a hundred of them. Python runs a
module of this name before anything else, where its folder is in PYTHONPATH (tests/conftest.py).
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import marshal
import os
import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

MODULE = "transformers.utils.import_utils"
MEMORY = Path(__file__).with_name("__pycache__")


class Loader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        import importlib.metadata as metadata

        packages = Path(self.path).parents[2]
        real = metadata.packages_distributions
        metadata.packages_distributions = lambda: remembered(real, packages)  # type: ignore[assignment]
        try:
            super().exec_module(module)
        finally:
            metadata.packages_distributions = real
        names: Any = module
        names.create_import_structure_from_path = outermost(
            names.create_import_structure_from_path, packages
        )


def outermost(find: Callable[[Any], Any], packages: Path) -> Callable[[Any], Any]:
    """It calls itself, by its name, for each folder below."""
    within: list[Any] = []

    def call(path: Any) -> Any:
        if within:
            return find(path)
        within.append(path)
        try:
            return remembered(find, packages, str(path))
        finally:
            within.clear()

    return call


def remembered(find: Callable[..., Any], packages: Path, *args: str) -> Any:
    """find(*args) of the time when something was last installed into the folder of packages."""
    asked = repr((packages, packages.stat().st_mtime_ns, sys.version, args))
    path = MEMORY / f"{find.__name__}-{zlib.crc32(asked.encode()):08x}.marshal"
    with contextlib.suppress(OSError, EOFError, ValueError, TypeError):
        known, found = marshal.loads(path.read_bytes())
        if known == asked:
            return found
    found = find(*args)
    with contextlib.suppress(OSError, ValueError):
        MEMORY.mkdir(exist_ok=True)
        own = path.with_suffix(f".{os.getpid()}")
        own.write_bytes(marshal.dumps((asked, found)))
        own.replace(path)
    return found


class Finder:
    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = Loader(name, spec.loader.path)
        return spec


sys.meta_path.insert(0, Finder)
