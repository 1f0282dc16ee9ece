"""Runs a module with a bound on the buffers that MLX keeps for reuse.

    python benchmarks/bounded.py MODULE ARGUMENTS...

Servers that are measured in turns share one GPU. A server that sets no bound itself would keep
every buffer it has ever used, and the others would run out of memory.
"""

from __future__ import annotations

import runpy
import sys

import mlx.core as mx

BUFFERS_NBYTES = 8 << 30

if __name__ == "__main__":
    mx.set_cache_limit(BUFFERS_NBYTES)
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
