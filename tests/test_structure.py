"""The shape of the house: what `tools/house.py` counts, and how much of it there may be.

Read from the syntax tree, like the directions of imports (`test_imports`).
"""

from __future__ import annotations

import ast
from functools import cache

import pytest
from tools import house

from tests.test_imports import SOURCES, all_places

MAX_CALLABLES = 15
"""Parameters of the cache that are functions to call back, at most."""
LEANING = ("firn.models.speculation.",)
"""Whose docstrings may still begin with what the one before says."""
SAID = {
    "assembly/memory": "the option's name, which users of other servers know",
    "cli/options/compat": "another server's option",
    "cli/doctor/examine": "the extra's name in pyproject.toml",
    "config/engine": "the option's name, and help texts",
    "kv_events": "the medium's name in the protocol",
    "models/load/fingerprint": "the device is a part of every key",
}
"""Files that may name a device, and why."""
N_SAID = 12
"""How many names there are in those files, at most."""


@cache
def sources() -> house.Tree:
    return house.Tree(SOURCES)


def parsed(*sources: str) -> dict[str, ast.Module]:
    return {f"m{i}": ast.parse(source) for i, source in enumerate(sources)}


# --- circles -------------------------------------------------------------------------------


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert house.cycles(sources().imports()) == []


def test_a_circle_is_seen() -> None:
    ring = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}}
    assert house.cycles(ring) == [["a", "b", "c"]]
    assert house.cycles({"a": {"b"}, "b": set()}) == []


def test_every_way_to_name_a_module_is_an_import() -> None:
    graph = sources().imports()
    assert "firn.cache.arrays.transfers" in graph["firn.backends.contract"]
    assert "firn.host.machine" in graph["firn.backends"], "under TYPE_CHECKING"
    assert "firn.backends.warm_up" in graph["firn.backends.cuda.device"]


# --- devices -------------------------------------------------------------------------------


def devices_in(place: str) -> list[str]:
    return house.devices_in(ast.parse((SOURCES / f"{place}.py").read_text(encoding="utf-8")))


OUTSIDE = [p for p in all_places() if not p.startswith("backends/")]


@pytest.mark.parametrize("place", [p for p in OUTSIDE if p not in SAID])
def test_only_backends_know_devices(place: str) -> None:
    assert devices_in(place) == []


def test_who_may_name_a_device_does_so_no_more_often() -> None:
    named = {place: devices_in(place) for place in SAID}
    assert all(named.values()), "a file that names none is not in the list"
    assert sum(map(len, named.values())) <= N_SAID, named


@pytest.mark.parametrize(
    "source",
    [
        'if kind == "cuda": pass',
        "if kind == 'CUDA': pass",
        "x = mx.metal.is_available()",
        "x = mx.default_device() == mx.cpu",
        "x = mx.gpu",
        "x = getattr(mx, 'metal')",
        "from mlx.core import metal as m",
        "from mlx.core import default_device",
        "import firn.backends.cuda.pool as pool",
        "def is_cuda(): pass",
        "async def on_metal(): pass",
        "class MetalRunner: pass",
        "f(traced=None)",
        "f(few_shapes=True)",
        "from firn.backends.cuda import pool",
        "from firn import backends; backends.named('metal')",
        'kind in ("cpu", "metal")',
        "text = f'{a} on cuda'",
        "text = f'gpu {a}'",
        "if profile.name.startswith('met' + 'al'): pass; x = 'nvidia-smi'",
        "if few_shapes: pass",
        "if row.is_traced: pass",
        "info = mx.device_info()",
        "match kind:\n    case 'cuda': pass",
        "match kind:\n    case metal: pass",
        "global is_gpu",
        "x = {'metal': 1}['cpu']",
        "isCuda = 1",
    ],
)
def test_a_question_about_the_device_is_seen(source: str) -> None:
    assert house.devices_in(ast.parse(source))


def test_the_processors_time_and_what_is_said_in_docstrings_are_no_device() -> None:
    source = (
        "'''On CUDA.'''\ncpu_s = process_time()\ncpu_dtype = 'auto'\n'''For Metal.'''\n'on a cpu'"
    )
    assert house.devices_in(ast.parse(source)) == []


# --- strategies ----------------------------------------------------------------------------


ROOM = [p for p in all_places() if p.startswith(("models/decode/", "assembly/"))]


@pytest.mark.parametrize("place", ROOM)
def test_nobody_asks_whether_a_strategy_is_there(place: str) -> None:
    source = (SOURCES / f"{place}.py").read_text(encoding="utf-8")
    assert house.optional_strategies(ast.parse(source)) == []


@pytest.mark.parametrize(
    "source",
    [
        "if self._mtp is not None: pass",
        "x = None if speculation is None else speculation.view()",
        "self.speculator = speculator or NoSpeculation()",
        "if self._traced: pass",
        "x = row.group.backlog and row.group.backlog.read()",
    ],
)
def test_such_a_question_is_seen(source: str) -> None:
    assert house.optional_strategies(ast.parse(source))


def test_the_runner_is_read_in_one_go() -> None:
    module = "firn.models.decode.runner"
    n_lines = len((SOURCES / "models/decode/runner.py").read_text(encoding="utf-8").splitlines())
    assert n_lines <= 310
    assert len(sources().imports()[module]) <= 12


# --- nouns ---------------------------------------------------------------------------------


def test_every_protocol_is_the_type_of_something() -> None:
    assert house.idle_protocols(sources().modules) == []


def test_a_protocol_that_types_nothing_is_seen() -> None:
    slices = "class A(Protocol): ...\nclass B(A, Protocol): ...\ndef f(x: B) -> None: ..."
    assert house.idle_protocols(parsed(slices)) == ["m0.A"]
    for use in (
        "x: A",
        "def f() -> list[A]: ...",
        "cast('A', x)",
        "class C(A): ...",
        "X = A | int",
    ):
        assert house.idle_protocols(parsed("class A(Protocol): ...", use)) == []


def test_no_class_has_more_attributes_than_a_head_holds() -> None:
    found = house.large_classes(sources().modules)
    assert found == {}


def test_fields_and_what_methods_assign_are_attributes() -> None:
    source = "class A:\n a: int\n def f(self) -> None:\n  self.b, self.c = 1, 2\n  x.d = 3"
    (cls,) = ast.parse(source).body
    assert isinstance(cls, ast.ClassDef)
    assert house.attributes(cls) == {"a", "b", "c"}


def test_the_cache_is_called_back_in_few_places() -> None:
    found = house.callables_taken(dict(house._files(sources(), "firn.cache")))
    assert len(found) <= MAX_CALLABLES, found


def test_callables_are_seen_by_whatever_name_they_are_taken() -> None:
    source = """
Done = Callable[[int], None]
def f(a: Callable[[], float], *, b: Done | None = None, c: int = 0) -> Done: ...
@dataclass(frozen=True)
class A:
    done: Done
    n: int
class B:
    done: Done
"""
    found = house.callables_taken(parsed(source))
    assert [text.split(" ")[1] for text in found] == ["f(a)", "f(b)", "A.done"]


# --- docstrings ----------------------------------------------------------------------------


def test_every_docstring_can_be_read_alone() -> None:
    found = house.leaning_docs(sources().modules)
    assert [text for text in found if not text.startswith(LEANING)] == []


@pytest.mark.parametrize("opening", ["...", "... and", "Nor", "Likewise,", "The same"])
def test_one_that_leans_on_the_one_before_is_seen(opening: str) -> None:
    for source in (
        f"'''{opening} x'''",
        f"A = 1\n'''{opening} x'''",
        f"class A:\n    a: int\n    '''\n    {opening} x'''",
        f"if x:\n    def f():\n        '''{opening} x'''",
    ):
        assert house.leaning_docs(parsed(source))
