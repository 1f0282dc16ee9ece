"""What a kind of device thinks of steps of several tokens, before anything is measured on it.

CUDA: a step takes about as long as its launches, however many tokens it has; but attention to several
tokens at once is planned anew for each shape, which takes longer than many steps. So there the steps
come in few widths, and see blocks of columns, the last ones masked.
"""

from __future__ import annotations

from dataclasses import dataclass

from firn.core.memory_plan import DeviceKind
from firn.models.ragged import ALL_COLUMNS, Columns


@dataclass(frozen=True, slots=True)
class Traits:
    """slope: of a plain step's time, for each further token of each row. flat: so much of it any step
    of several tokens takes more. widths: tokens of a row in one step that are thought about. shapes:
    those that are computed; a narrower step is padded to one of them, where that does no harm.
    n_preparing: steps of a shape that may prepare kernels, and say nothing."""

    slope: float
    flat: float = 0.0
    widths: tuple[int, ...] = (1, 2, 3, 5, 9, 17)
    shapes: tuple[int, ...] = ()
    columns: Columns = ALL_COLUMNS
    n_preparing: int = 0

    def shape(self, width: int) -> int:
        """How wide a step is computed that must be so wide."""
        return next((w for w in self.shapes if w >= width), width)


TRAITS: dict[DeviceKind, Traits] = {
    "cpu": Traits(slope=0.12),
    "metal": Traits(slope=0.15),
    "cuda": Traits(
        slope=0.003,
        flat=0.25,
        widths=(1, 2, 3, 5, 8, 16, 32),
        shapes=(8, 16, 32),
        columns=Columns(block=512),
        n_preparing=2,
    ),
}
