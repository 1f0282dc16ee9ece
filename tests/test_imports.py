"""Who may import whom: cli -> app -> assembly -> {api -> text, engine -> cache, models} -> core.

And the core imports no extra: `CORE` and `EXTRAS` in tools/house.py say what is which.

Read from the syntax tree, so an import inside a function or under TYPE_CHECKING counts too.
Allowing a new dependency means changing a line of `MAY_IMPORT`, which makes it a visible decision.

Names that begin with an underscore are private to their package, module or object. A package in
`FACADES` is used only through the names of its __init__.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import pytest
from tools.house import CORE, EXTRAS, group_of

import firn

SOURCES = Path(firn.__file__).parent

EVERYTHING = {
    "api", "app", "assembly", "backends", "bench", "cache", "cli", "config", "core", "demo", "engine",
    "fleet", "host", "kv_events", "listener", "logs", "media", "models", "ranks", "sparse", "text",
    "traces", "welcome",
}  # fmt: skip
# fmt: off
MAY_IMPORT: dict[str, set[str]] = {
    "core": set(),
    "host": {"core"},
    "config": {"core"},
    "logs": {"config"},
    "text": {"core"},
    "media": {"core"},
    "cache": {"core"},
    "traces": {"core", "cache"},
    "bench": {"core", "traces"},
    "models": {"core", "host"},
    "backends": {"cache", "config", "core", "host", "models"},
    "api": {"core", "text"},
    "engine": {"core", "cache"},
    "listener": {"api", "core", "host"},
    "welcome": {"config", "listener"},
    "kv_events": {"cache", "core"},
    "ranks": {"app", "assembly", "backends", "cache", "config", "core", "host", "models"},
    "sparse": {"core", "engine", "models"},
    "assembly": {
        "api", "backends", "cache", "config", "core", "demo", "engine", "host", "kv_events", "media",
        "models", "sparse", "text", "traces",
    },
    "fleet": {
        "api", "app", "assembly", "backends", "config", "core", "demo", "engine", "host", "listener",
        "logs", "models", "text", "welcome",
    },
    "app": EVERYTHING - {"bench", "cli", "fleet", "kv_events", "ranks", "sparse", "traces"},
    "cli": EVERYTHING,
    "demo": EVERYTHING,
    "__main__": {"cli"},
}
# fmt: on
# The folders (or files, without .py) that may use a library; all others must not.
MAY_USE: dict[str, tuple[str, ...]] = {
    "mlx": (
        "backends",
        "models",
        "sparse",
        "ranks/group",
        "ranks/runner",
        "cache/codecs",
        "cache/arrays",
        "demo",
    ),
    "mlx_lm": ("backends", "models", "ranks/group", "demo"),
    "mlx_vlm": ("models", "demo"),
    "PIL": ("media", "models"),
    "llguidance": ("models",),
    "tokenizers": ("models",),
    "obstore": ("cache/tiers/s3",),
    "boto3": ("cache/tiers/s3",),
    "redis": ("cache/tiers/redis",),
    "zmq": ("kv_events",),
    "msgpack": ("kv_events",),
}
FACADES = ("cache/tree", "config", "core/ports", "core/values", "engine")
"""Packages whose modules nobody else imports: their __init__ lists what they offer."""
INSIDES: dict[str, tuple[str, ...]] = {
    "cache": (
        "arrays/host", "arrays/payload", "commit", "cursor", "garbage", "loading", "memory", "planning",
        "restore", "stats",
        "storage/catalogue", "storage/desk", "storage/index", "storage/places", "storage/spill",
        "storage/tally", "storage/tier_records",
    ),
}  # fmt: skip
"""Modules and folders that only their own package imports."""
REACHES: dict[str, tuple[str, ...]] = {
    "a library's way to say it": ("os._exit", "_replace", "ctypes._NamedFuncPointer"),
    "mlx-lm's own fields, which contract tests pin": (
        "layer._idx", "lone._idx", "layer._temporal_order", "mlx_utils._download",
        "wrapper._tokenizer", "self._wrapper._chat_template",
        "chat_template_utils._compile_jinja_template",
        "inner._apply_blockwise_bidirectional_overlay", "inner._block_sequence_ids_for_mask",
    ),
    "another object of the same class": ("more._grow", "last._seen", "last._counts"),
}  # fmt: skip
"""Names with an underscore that may be read from outside, by reason."""
BORROWS: dict[str, tuple[tuple[str, str], ...]] = {
    "the folder's layout, for what people ask of it": (("cache", "firn.cache.tiers._folder"),),
    "a rank's slices are payloads, too": (
        ("ranks", "firn.cache.arrays.host"),
        ("ranks", "firn.cache.arrays.payload"),
    ),
}
"""Modules of another package's inside that may be imported, by reason: (the importing package, the
module)."""
HEAVY = ("mlx", "mlx_lm", "mlx_vlm", "transformers", "numpy", "fastapi", "uvicorn", "httpx")


@dataclass(frozen=True)
class Import:
    """`place` is the importing file below firn/, without .py; `target` is the full dotted name."""

    place: str
    line: int
    target: str

    def __str__(self) -> str:
        return f"{self.place}.py:{self.line} imports {self.target}"


@lru_cache(maxsize=1)
def nodes_of(source: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(source)))


def imports_of(source: str, place: str) -> Iterator[Import]:
    package = ["firn", *place.split("/")[:-1]]
    for node in nodes_of(source):
        for target in _targets(node, package):
            yield Import(place, node.lineno, target)  # type: ignore[attr-defined]


def _targets(node: ast.AST, package: list[str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = package[: len(package) - node.level + 1] if node.level else []
        module = ".".join([*base, *([node.module] if node.module else [])])
        # `from firn import app` names a module, and so does `from mlx import core`.
        yield from (f"{module}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Call) and _name(node.func) in ("import_module", "__import__"):
        yield from (arg.value for arg in node.args[:1] if _is_text(arg))  # type: ignore[attr-defined]


def _name(func: ast.expr) -> str:
    return func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def faults(found: Iterator[Import]) -> list[str]:
    checks = (_direction_ok, _core_ok, _library_ok, _private_ok, _facade_ok, _inside_ok)
    return [str(item) for item in found if not all(check(item) for check in checks)]


def _direction_ok(item: Import) -> bool:
    top, _, rest = item.target.partition(".")
    package, target = item.place.split("/")[0], rest.split(".")[0]
    if top != "firn" or target not in EVERYTHING or target == package:
        return True
    return target in MAY_IMPORT.get(package, ())


def _core_ok(item: Import) -> bool:
    """A module of the core imports no extra; `from firn.x import y` may name a module, too."""
    if group_of(item.place) != "core" or not item.target.startswith("firn."):
        return True
    return group_of("/".join(item.target.split(".")[1:])) != "extras"


def _library_ok(item: Import) -> bool:
    allowed = MAY_USE.get(item.target.split(".")[0])
    if allowed is None:
        return True
    return any(item.place == home or item.place.startswith(f"{home}/") for home in allowed)


def _private_ok(item: Import) -> bool:
    """Private modules are imported only within their package, private names by no other module."""
    parts = item.target.split(".")
    if parts[0] != "firn":
        return True
    for i, part in enumerate(parts):
        if part.startswith("_") and not part.startswith("__"):
            home, module = "/".join(parts[1:i]), ".".join(parts[: i + 1])
            return item.place.startswith(f"{home}/") or _borrows(item.place, module)
    return True


def _borrows(place: str, module: str) -> bool:
    return any((place.split("/")[0], module) in pairs for pairs in BORROWS.values())


@cache
def modules_of(package: str) -> set[str]:
    return {path.stem for path in SOURCES.joinpath(package).glob("*.py")}


def _facade_ok(item: Import) -> bool:
    parts = item.target.split(".")
    for facade in FACADES:
        names = ["firn", *facade.split("/")]
        inside = item.place.startswith(f"{facade}/")
        # firn.config.Config is a name of the package; firn.config.tree and what is in it are not.
        if parts[: len(names)] != names or inside:
            continue
        if len(parts) > len(names) + 1 or parts[-1] in modules_of(facade):
            return False
    return True


def _inside_ok(item: Import) -> bool:
    target = "/".join(item.target.split(".")[1:]) + "/"
    return not any(
        target.startswith(f"{package}/{name}/")
        and not item.place.startswith(f"{package}/")
        and not _borrows(item.place, f"firn.{package}.{name}".replace("/", "."))
        for package, inner in INSIDES.items()
        for name in inner
    )


def reaches_of(source: str, place: str) -> list[str]:
    """Places that read a name with an underscore from something other than `self`."""
    allowed = tuple(name for names in REACHES.values() for name in names)
    found = []
    for node in nodes_of(source):
        if not isinstance(node, ast.Attribute) or not node.attr.startswith("_"):
            continue
        if node.attr.startswith("__"):
            continue
        text = ast.unparse(node)
        owner = ast.unparse(node.value)
        own = owner in ("self", "cls") or owner.startswith("super()")
        if not own and not text.endswith(allowed):
            found.append(f"{place}.py:{node.lineno} reaches for {text}")
    return found


def all_places() -> list[str]:
    files = SOURCES.rglob("*.py")
    return sorted(path.relative_to(SOURCES).with_suffix("").as_posix() for path in files)


@pytest.mark.parametrize("place", all_places())
def test_imports_go_one_way(place: str) -> None:
    source = (SOURCES / f"{place}.py").read_text(encoding="utf-8")
    assert faults(imports_of(source, place)) == []
    assert reaches_of(source, place) == []


def test_every_file_is_core_extra_or_a_command() -> None:
    places = all_places()
    assert [place for place in places if group_of(place) == "nowhere"] == []
    tops = {place.split("/")[0] for place in places}
    assert tops >= CORE
    for extra in EXTRAS:
        assert any(place == extra or place.startswith(f"{extra}/") for place in places), extra


@pytest.mark.parametrize(
    ("place", "source"),
    [
        ("app", "from firn.ranks.leader import Leader"),
        ("assembly/parts", "def f():\n    from firn.assembly.extras import sparse"),
        ("assembly/parts", "from firn.assembly.extras.sparse import EXTRA"),
        ("assembly/extras/__init__", "from . import sparse"),
        ("assembly/services", "import importlib\nimportlib.import_module('firn.traces.record')"),
        ("api/server", "from firn.api.routes.rerank import PATHS"),
        ("api/services", "if TYPE_CHECKING:\n    from firn.text.prompt.rerank import question"),
        ("api/dialects/_openai", "from firn.api.routes.ollama_fields import TAG"),
        ("backends/metal", "from firn.backends.cuda import smi"),
        ("cache/tiers/__init__", "from firn.cache.tiers import s3"),
    ],
)
def test_a_core_that_names_an_extra_is_seen(place: str, source: str) -> None:
    assert [item for item in imports_of(source, place) if not _core_ok(item)] != []


@pytest.mark.parametrize(
    ("place", "source"),
    [
        ("app", "from firn.assembly.extras import open_extras"),
        ("cli/serve", "from firn.ranks.serve import serve"),
        ("assembly/extras/sparse", "from firn.sparse.rules import SparseRules"),
        ("fleet/routes", "from firn.api.routes.ollama import model_routes"),
    ],
)
def test_others_may_name_an_extra(place: str, source: str) -> None:
    assert [item for item in imports_of(source, place) if not _core_ok(item)] == []


def test_every_package_has_its_line() -> None:
    packages = {place.split("/")[0] for place in all_places()} - {"__init__"}
    assert packages <= set(MAY_IMPORT)
    assert set(MAY_IMPORT) == EVERYTHING | {"__main__"}


@pytest.mark.parametrize(
    ("place", "source"),
    [
        ("core/values", "import firn.text"),
        ("core/values", "from firn import text"),
        ("core/values", "from firn.engine.scheduler import plan"),
        ("core/values", "from ..text import prompt"),
        ("core/values", "from .. import text"),
        ("text/prompt/maker", "def f():\n    from firn.api import server"),
        ("text/prompt/maker", "import mlx.core as mx"),
        ("engine/engine", "from mlx import core"),
        ("engine/engine", "from firn.models.decode.runner import Runner"),
        ("engine/engine", "if TYPE_CHECKING:\n    import mlx.core"),
        ("engine/engine", "import importlib\nimportlib.import_module('mlx_lm')"),
        ("api/server", "import firn.engine.engine"),
        ("api/dialects/chat", "from ...engine import engine"),
        ("media/decode", "import mlx.core"),
        ("media/fetch", "from firn.text import prompt"),
        ("text/prompt/maker", "from PIL import Image"),
        ("cache/prefix", "import mlx.core"),
        ("cache/records", "from firn.cache.tree.nodes import Node"),
        ("assembly/cache", "from firn.cache.planning.plan import make_plan"),
        ("assembly/cache", "from firn.cache.storage.desk import TierDesk"),
        ("cache/arraysish", "import mlx.core"),
        ("cache/codecs/pages", "from mlx_lm.models.cache import KVCache"),
        ("models/decode/runner", "from firn.demo import model"),
        ("models/decode/runner", "from firn.engine import sequence"),
        ("ranks/cache/tree", "from firn.cache.storage.desk import TierDesk"),
        ("config/tree", "from firn import app"),
        ("app", "import firn.cli"),
        ("__init__", "from firn import core"),
        ("cli/cache/commands", "from firn.cache.tiers._known import Known"),
        ("cli/cache/commands", "from firn.cache.tiers import _known"),
        ("cli/cache/work", "from firn.cache.tiers._folder import Disk"),
        ("cache/prefix", "from firn.cache.restore import _segments"),
        ("engine/loop", "import firn.engine.recovery._back"),
        ("cli/options/show", "from firn.config.tree import Config"),
        ("cli/options/show", "from firn.config import tree"),
        ("assembly/parts", "import firn.engine.loop.Loop"),
        ("engine/loop", "from firn.core.ports.runner import Runner"),
    ],
)
def test_a_wrong_import_is_seen(place: str, source: str) -> None:
    assert len(faults(imports_of(source, place))) == 1


@pytest.mark.parametrize(
    ("place", "source"),
    [
        ("core/events", "from firn.core.values import Usage"),
        ("core/events", "from .values import Usage"),
        ("core/events", "import numpy, mlxish"),
        ("api/server", "from firn.text import prompt\nfrom .sse import data"),
        ("models/load/loader", "import mlx.core as mx\nfrom mlx_lm import utils\nimport mlx_vlm"),
        ("cache/codecs/pages", "import mlx.core"),
        ("cache/records", "from firn.cache.storage.desk import TierDesk"),
        ("assembly/cache", "from firn.cache.storage.worker import TierWorker"),
        ("cache/arrays/host", "import mlx.core"),
        ("ranks/cache/slices", "from firn.cache.arrays.host import to_host"),
        ("cli/doctor/examine", "from firn.models.load.inspect import inspect_folder"),
        ("cli/__init__", "from firn import __version__"),
        ("demo/model", "import mlx_lm\nfrom firn import app"),
        ("cache/tiers/ssd", "from firn.cache.tiers._known import Known\nfrom . import _folder"),
        ("cache/admin/inventory", "from firn.cache.tiers._folder import Disk"),
        ("cli/options/show", "from firn.config import Config\nfrom firn import __version__"),
        ("config/sources", "from firn.config.tree import Config"),
        ("core/ports/cache", "from firn.core.ports.runner import Runner"),
    ],
)
def test_a_right_import_passes(place: str, source: str) -> None:
    assert faults(imports_of(source, place)) == []


HTTP = [place for place in all_places() if place.startswith("api/http/")]


@pytest.mark.parametrize("place", HTTP)
def test_an_exchange_knows_no_call(place: str) -> None:
    source = (SOURCES / f"{place}.py").read_text(encoding="utf-8")
    targets = [item.target for item in imports_of(source, place)]
    in_api = [target for target in targets if f"{target}.".startswith("firn.api.")]
    assert [target for target in in_api if not target.startswith("firn.api.http.")] == []


def test_a_reach_past_somebodys_own_names_is_seen() -> None:
    assert reaches_of("class A:\n    def f(self, loop):\n        loop._say(1)", "a") == [
        "a.py:3 reaches for loop._say"
    ]
    assert reaches_of("self._a.b\nsuper().__init__()\ncls._b\nos._exit(1)\na.__name__", "a") == []
    assert reaches_of("self._a._b", "a") == ["a.py:1 reaches for self._a._b"]


def test_help_does_not_wait_for_heavy_libraries() -> None:
    """One process for all commands: each prints what it and the earlier ones have imported."""
    script = (
        "import sys\n"
        "from firn.cli import main\n"
        "for arguments in (['--help'], ['serve', '--help'], ['--version']):\n"
        "    sys.argv = ['firn', *arguments]\n"
        "    try:\n        main()\n"
        "    except SystemExit as end:\n        assert not end.code, end.code\n"
        f"    print('heavy:', [name for name in {HEAVY!r} if name in sys.modules])\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    heavy = [line for line in run.stdout.splitlines() if line.startswith("heavy:")]
    assert heavy == ["heavy: []"] * 3
