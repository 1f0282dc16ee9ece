"""An NVIDIA GPU, where what the host does takes as long as what the device does.

    shapes      prompts are read in passes of few shapes: attention is planned for each new one
    traced      decode steps whose graph is traced once for each shape, not built in Python every time
    products    of a few tokens: a kernel of its own instead of cuBLAS, which takes more host time
    attention   of a few tokens: a kernel that accepts masks, instead of many operations or cuDNN
    delta       the gated delta rule, whose state a kernel keeps in registers
    bias        whether masks are added instead of applied
    kernels     MLX's own: where they are kept, and which are compiled ahead
    bus         copies between the host and the device
    pool        memory that the driver keeps after MLX has freed it
    smi         the device's memory for a process without MLX

With exact reuse, results are MLX's own, bit for bit: no kernel is replaced, and no pass is padded. Only
the gated delta rule, for which MLX has no kernel here, is not; how it is computed is part of the root.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from firn.backends.cuda.device import CudaBackend


def backend() -> CudaBackend:
    from firn.backends.cuda.device import CudaBackend  # the front imports `smi`, without MLX

    return CudaBackend()
