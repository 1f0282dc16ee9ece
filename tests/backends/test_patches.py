"""What firn replaces in MLX: all of it is in a backend's list, and is taken out again."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from tools.house import replacements

from firn.backends.contract import BackendOptions
from firn.backends.cuda import products
from firn.backends.cuda.device import CudaBackend
from firn.models.patches import Patches
from tests.test_imports import SOURCES, all_places

LIST = "models/patches"
"""The only file that replaces an attribute of somebody else's module or class."""


class Owner:
    @staticmethod
    def one() -> int:
        return 1


def test_patches_are_listed_and_taken_out_in_reverse() -> None:
    patches, undone = Patches(), []
    plain: Any = Owner.one
    patches.replace(Owner, "one", lambda: 2)
    patches.replace(Owner, "one", lambda: 3)
    patches.add("a table", lambda: undone.append(Owner.one()))
    assert patches.names == ["Owner.one", "Owner.one", "a table"]
    assert Owner.one() == 3
    patches.undo()
    assert Owner.one is plain
    assert (undone, patches.names) == ([3], [])


@pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="there is a GPU here")
def test_what_a_cpu_replaces_can_be_taken_out(tmp_path: Path) -> None:
    """In a process of its own: the tests of this one share a BLAS."""
    code = f"""if True:
        from pathlib import Path
        import mlx.core as mx
        from firn import backends
        from firn.backends.contract import BackendOptions
        from firn.backends.cpu import softmax
        from firn.backends.cpu.imports import MLX, find_slots
        ours = softmax.attention
        softmax._seconds = lambda function: 1.0 if function is ours else 2.0
        def product():
            a = mx.random.normal((64, 64), key=mx.random.key(0))
            return (a @ a).tolist()
        def state():
            slots = find_slots(MLX, ("cblas_sgemm", "powf"))
            functions = mx.fast.rope, mx.fast.scaled_dot_product_attention, mx.sigmoid
            return functions, [slot.get() for slot in slots.values()]
        mx.eval(mx.ones(1) ** 2)
        product()
        before = state()
        backend = backends.named("cpu")
        backend.install(BackendOptions(cache_folder=Path({str(tmp_path)!r})))
        product()
        assert state()[0] != before[0]
        print(*backend.patches.names, sep="\\n")
        backend.uninstall()
        assert state() == before, (state(), before)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    wanted = {"fast.rope", "fast.scaled_dot_product_attention", "sigmoid"}
    assert {f"mlx.core.{name}" for name in wanted} <= set(done.stdout.split())


def functions() -> list[Any]:
    fast = mx.fast.rope, mx.fast.scaled_dot_product_attention
    return [*fast, mx.sigmoid, nn.Linear.__call__, nn.Embedding.as_linear]


@pytest.mark.parametrize("exact", [False, True])
def test_what_a_gpu_replaces_can_be_taken_out(exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "fault", lambda: None)
    before, backend = functions(), CudaBackend()
    backend.install(BackendOptions(exact=exact))
    replaced = {
        "mlx.core.fast.scaled_dot_product_attention",
        "Linear.__call__",
        "Embedding.as_linear",
    }
    assert set(backend.patches.names) == (set() if exact else replaced)
    assert sum(a is not b for a, b in zip(before, functions(), strict=True)) == len(
        backend.patches.names
    )
    backend.uninstall()
    assert functions() == before


def test_what_is_replaced_for_a_pass_is_in_the_list_as_long() -> None:
    patches, plain = Patches(), Owner.one
    patches.replace(Owner, "one", lambda: 2)
    installed = Owner.one

    def fail() -> None:
        with patches.during(Owner, "one", lambda: 3):
            assert (Owner.one(), patches.names) == (3, ["Owner.one", "Owner.one"])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert Owner.one is installed
    assert patches.names == ["Owner.one"]
    patches.undo()
    assert Owner.one is plain


# --- nothing else does ---------------------------------------------------------------------


@pytest.mark.parametrize("place", [place for place in all_places() if place != LIST])
def test_libraries_are_replaced_in_the_list_alone(place: str) -> None:
    source = (SOURCES / f"{place}.py").read_text(encoding="utf-8")
    assert list(replacements(ast.parse(source))) == []


@pytest.mark.parametrize(
    "line",
    [
        "mx.fast.rope = f",
        "setattr(mx.fast, name, f)",
        "setattr(nn.Linear, '__call__', f)",
        "nn.Linear.__call__ = f",
        "del mx.fast.rope",
        "cache.KVCache.step = 512",
        "vars_of.__dict__['a'] = f",
    ],
)
def test_a_replacement_is_seen(line: str) -> None:
    imports = "import mlx.core as mx\nfrom mlx import nn\nfrom mlx_lm.models import cache\n"
    imports += "from mlx_lm.utils import load as vars_of\n"
    assert list(replacements(ast.parse(imports + line)))
    assert not list(replacements(ast.parse(line))), "the names are somebody else's"
