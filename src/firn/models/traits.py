"""What steps of several tokens cost on each kind of device, before anything is measured.

CUDA: a step takes about as long as its kernel launches, however many tokens it has; but attention
of several tokens is planned anew for each shape, which takes longer than many steps. So steps have
few widths there, and see whole blocks of columns, the last ones masked.
"""

from __future__ import annotations

from dataclasses import dataclass

from firn.core.memory_plan import DeviceKind
from firn.models.decode.ragged import ALL_COLUMNS, Columns


@dataclass(frozen=True, slots=True)
class Traits:
    """slope: what each additional token of each row adds to a step, in plain steps. flat: what any
    step of several tokens adds. widths: to choose from, in tokens of a row. shapes: widths that are
    computed; a narrower step is padded to one of them where that does no harm. n_preparing: the
    first steps of a shape, which compile kernels or are traced, and are not measured.
    layers_per_dispatch: layers that are dispatched together while the host builds the next ones; 0: a
    step is dispatched as a whole, as on a CPU, where the host computes it itself. soon_nbytes: a
    restored past of up to this size is computed with the first chunk: waiting for it would include
    the step in flight, and it takes less time than a decode step."""

    slope: float
    flat: float = 0.0
    widths: tuple[int, ...] = (1, 2, 3, 5, 9, 17)
    shapes: tuple[int, ...] = ()
    columns: Columns = ALL_COLUMNS
    n_preparing: int = 0
    layers_per_dispatch: int = 0
    soon_nbytes: int = 0

    def shape(self, width: int) -> int:
        """The width in which a step of at least this width is computed."""
        return next((w for w in self.shapes if w >= width), width)


TRAITS: dict[DeviceKind, Traits] = {
    "cpu": Traits(slope=0.12),
    "metal": Traits(slope=0.15),
    "cuda": Traits(
        slope=0.008,
        flat=0.1,
        widths=(1, 2, 4, 8, 16, 32),
        shapes=(4, 8, 16, 32),
        columns=Columns(block=512),
        n_preparing=5,
        layers_per_dispatch=6,
        soon_nbytes=64 << 20,
    ),
}
