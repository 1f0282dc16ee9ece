"""What the results and the speed of an Apple GPU depend on, besides the model: the system, the wheel of
MLX's kernels, and the variables by which MLX chooses among them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

from firn.host import mac

KERNELS = "mlx-metal"
CHOICES = ("MLX_ENABLE_TF32", "MLX_SDPA_")
"""Variables, or what they begin with, that change which kernels compute, and so the bits."""
NEW_PRODUCTS = 17
"""The generation of the M5. Its GPU has units for products that only the wheel for macOS 26 uses."""
NEW_SYSTEM = 26
M1 = 13
"""The generation of the M1, in `applegpu_g13s`."""


@dataclass(frozen=True, slots=True)
class AppleKernels:
    """system: '26.1'. build: '25B78'. wheel: the least macOS that MLX's kernels were built for, as in
    'macosx_26_0_arm64'; "": unknown. generation: of the GPU, 13 for an M1; 0: unknown."""

    system: str
    build: str
    wheel: str
    architecture: str
    generation: int

    @classmethod
    def here(cls, info: Mapping[str, Any]) -> AppleKernels:
        """info: what MLX says of the device."""
        architecture = str(info.get("architecture", ""))
        number = re.search(r"_g(\d+)", architecture)
        generation = int(number[1]) if number else 0
        return cls(mac.version(), mac.build(), wheel_platform(), architecture, generation)

    def identity(self, environ: Mapping[str, str] = os.environ) -> str:
        """What the bits of a result depend on."""
        chosen = sorted(f"{k}={v}" for k, v in environ.items() if k.startswith(CHOICES))
        return " ".join(("macos", self.build, self.wheel or "unknown", *chosen))

    @property
    def lacks_new_products(self) -> bool:
        """Whether the kernels are an older system's, and the GPU's best ones are not used."""
        is_new = self.generation >= NEW_PRODUCTS and _major(self.system) >= NEW_SYSTEM
        return is_new and 0 < _major(self.wheel.removeprefix("macosx_")) < NEW_SYSTEM

    def findings(self) -> Iterator[tuple[str, str, bool]]:
        """Topic, text, and whether it is a reason to do something."""
        if self.generation >= M1:
            yield (
                "GPU",
                f"{self.architecture}, of the M{self.generation - M1 + 1}'s generation",
                False,
            )
        if not self.wheel:
            yield "kernels", f"it is unknown for which macOS {KERNELS} was built", False
        elif self.lacks_new_products:
            text = (
                f"{KERNELS} is built for {self.wheel}: it does not use this GPU's units for products, "
                "and prompts are read several times slower. Install firn again with a newer Python, "
                f"one that calls this system {self.system}"
            )
            yield "kernels", text, True
        else:
            yield "kernels", f"{KERNELS} for {self.wheel}", False


def wheel_platform(package: str = KERNELS) -> str:
    """'macosx_26_0_arm64'; '' if it is not installed or was not installed from a wheel."""
    try:
        text = distribution(package).read_text("WHEEL") or ""
    except PackageNotFoundError:
        return ""
    tags = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("Tag:")]
    return tags[0].split("-")[-1] if tags else ""


def _major(version: str) -> int:
    number = re.match(r"\d+", version)
    return int(number[0]) if number else 0
