"""Caches what transformers finds out at every import, for all processes of the tests.

It scans its two thousand modules for the names in them, and reads the file list of every installed
package: more than a third of a server's start, and the tests start a hundred servers. Python runs a
module of this name before anything else if its folder is in PYTHONPATH (tests/conftest.py), so it
imports as little as possible until it is needed.

With TESTS_DEVICE=metal all of them pretend to run on another device, too.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder, SourceFileLoader

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from pathlib import Path
    from types import ModuleType
    from typing import Any

MODULE = "transformers.utils.import_utils"
BACKENDS = "firn.backends"
DEVICE = os.environ.get("TESTS_DEVICE", "")
"""The device that processes of the tests pretend to have; empty: the machine's own."""


class Finder:
    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == BACKENDS and DEVICE:
            return spec_of_pretender(name, path, target)
        if name != MODULE:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = Loader(name, spec.loader.path)
        return spec


class Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        import importlib.metadata as metadata
        from pathlib import Path

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


def spec_of_pretender(
    name: str, path: Sequence[str] | None, target: ModuleType | None
) -> ModuleSpec | None:
    spec = PathFinder.find_spec(name, path, target)
    if spec is not None and type(spec.loader) is SourceFileLoader:
        spec.loader = Pretender(name, spec.loader.path)
    return spec


class Pretender(SourceFileLoader):
    """firn.backends, whose `find` gives the tests' fake of DEVICE."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)

        def find() -> Any:
            from importlib.util import module_from_spec, spec_from_file_location
            from pathlib import Path

            if "firn_test_fakes" not in sys.modules:
                place = Path(__file__).parents[1] / "backends" / "fakes.py"
                spec = spec_from_file_location("firn_test_fakes", place)
                assert spec is not None
                assert spec.loader is not None
                fakes = sys.modules["firn_test_fakes"] = module_from_spec(spec)
                spec.loader.exec_module(fakes)
            return sys.modules["firn_test_fakes"].FAKES[DEVICE]()

        names: Any = module
        names.find = find


def outermost(find: Callable[[Any], Any], packages: Path) -> Callable[[Any], Any]:
    """Caches only the outermost call: `find` calls itself, by its name, for each subfolder."""
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
    """find(*args), cached until something is installed into the folder of packages."""
    import contextlib
    import marshal
    import os
    import zlib
    from pathlib import Path

    asked = repr((packages, packages.stat().st_mtime_ns, sys.version, args))
    memory = Path(__file__).with_name("__pycache__")
    path = memory / f"{find.__name__}-{zlib.crc32(asked.encode()):08x}.marshal"
    with contextlib.suppress(OSError, EOFError, ValueError, TypeError):
        known, found = marshal.loads(path.read_bytes())
        if known == asked:
            return found
    found = find(*args)
    with contextlib.suppress(OSError, ValueError):
        memory.mkdir(exist_ok=True)
        own = path.with_suffix(f".{os.getpid()}")
        own.write_bytes(marshal.dumps((asked, found)))
        own.replace(path)
    return found


sys.meta_path.insert(0, Finder)
