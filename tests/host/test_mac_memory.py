"""What a Mac has available: the same whether or not its GPU is at work, and less when it is pressed."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import pytest

from firn.backends.memory import active_nbytes, used_nbytes
from firn.backends.metal import MetalMemory
from firn.core.memory_plan import MachineMemory
from firn.host.mac import is_short_of_memory
from firn.host.machine import vm_stat_available
from tests.backends.fakes import FakeMetal


@dataclass(frozen=True)
class Pages:
    """Of a Mac, in pages. mlx: what firn's buffers take; wired while the GPU uses them."""

    free: int = 90_000
    wired: int = 140_000
    active: int = 300_000
    inactive_anonymous: int = 120_000
    on_disk: int = 200_000
    speculative: int = 9_000
    purgeable: int = 3_000

    def text(self) -> str:
        inactive = self.inactive_anonymous + self.on_disk // 2 - self.speculative
        anonymous = self.active + self.inactive_anonymous - self.on_disk // 2
        rows = {
            "Pages free": self.free,
            "Pages active": self.active,
            "Pages inactive": inactive,
            "Pages speculative": self.speculative,
            "Pages throttled": 0,
            "Pages wired down": self.wired,
            "Pages purgeable": self.purgeable,
            "Pages copy-on-write": 70_123_456,
            "File-backed pages": self.on_disk,
            "Anonymous pages": anonymous,
            "Pages stored in compressor": 50_000,
        }
        head = "Mach Virtual Memory Statistics: (page size of 16384 bytes)\n"
        return head + "".join(f"{name}: {n}.\n" for name, n in rows.items())

    def available(self) -> int | None:
        return vm_stat_available(self.text(), page_nbytes=1)


@pytest.mark.parametrize("n_mlx", [0, 1_000, 400_000])
def test_buffers_are_counted_once_whether_or_not_the_gpu_is_at_work(n_mlx: int) -> None:
    """macOS unwires them after a second without use: then they are inactive."""
    rest = Pages()
    busy = replace(rest, wired=rest.wired + n_mlx)
    idle = replace(rest, inactive_anonymous=rest.inactive_anonymous + n_mlx)
    assert busy.available() == idle.available() == rest.available()
    assert rest.available() == rest.free + rest.on_disk + rest.purgeable


def test_another_program_takes_what_it_takes() -> None:
    rest = Pages()
    grown = replace(rest, free=rest.free - 50_000, active=rest.active + 50_000)
    before, after = rest.available(), grown.available()
    assert before is not None
    assert after == before - 50_000


@pytest.mark.parametrize(("level", "is_short"), [("1", False), ("2", True), ("4", True)])
def test_the_pressure_level_is_the_kernels(level: str, is_short: bool) -> None:
    def output(command: Sequence[str]) -> str:
        assert command[-1] == "kern.memorystatus_vm_pressure_level"
        return f"{level}\n"

    assert is_short_of_memory(output=output) == is_short


def test_a_kernel_without_a_level_is_not_short() -> None:
    def fails(command: Sequence[str]) -> str:
        raise subprocess.CalledProcessError(1, list(command))

    assert not is_short_of_memory(output=fails)
    assert not is_short_of_memory(output=lambda _: "")


def test_a_server_gives_memory_back_when_it_is_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    metal = FakeMetal()
    pressed = MetalMemory(metal.profile, metal.recorded, is_short=lambda: True)
    calm = MetalMemory(metal.profile, metal.recorded, is_short=lambda: False)
    now = MachineMemory("metal", 1 << 34, 1 << 34, 1 << 33)
    freed: list[MetalMemory] = []
    for memory in (pressed, calm):
        monkeypatch.setattr(memory, "now", lambda: now)
        monkeypatch.setattr(memory, "free_unused", lambda memory=memory: freed.append(memory))
    held = mx.ones(1 << 20)
    mx.eval(held)
    assert held.nbytes <= active_nbytes() <= used_nbytes()
    assert pressed.while_serving() == replace(now, available_nbytes=active_nbytes())
    assert freed == [pressed]
    assert calm.while_serving() == now
    assert freed == [pressed]
