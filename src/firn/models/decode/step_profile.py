"""What steps of several tokens cost on a device, before anything is measured."""

from __future__ import annotations

from dataclasses import dataclass

from firn.models.decode.ragged import ALL_COLUMNS, Columns


@dataclass(frozen=True, slots=True)
class StepProfile:
    """slope: what each additional token of each row adds to a step, in plain steps. flat: what any
    step of several tokens adds. widths: to choose from, in tokens of a row. shapes: widths that are
    computed; a narrower step is padded to one of them where that does no harm.
    layers_per_dispatch: layers that are dispatched together while the host builds the next ones; 0: a
    step is dispatched as a whole."""

    slope: float = 0.12
    flat: float = 0.0
    widths: tuple[int, ...] = (1, 2, 4, 8, 16)
    shapes: tuple[int, ...] = ()
    columns: Columns = ALL_COLUMNS
    layers_per_dispatch: int = 0

    def shape(self, width: int) -> int:
        """The width in which a step of at least this width is computed."""
        return next((w for w in self.shapes if w >= width), width)


PLAIN_PROFILE = StepProfile()
"""Of a device about which nothing is known."""
