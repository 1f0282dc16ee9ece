"""Mamba 2's state space layers in shorter chunks.

mlx-lm computes them in chunks as well, of 256 tokens, with several matrices (tokens, tokens) for each
head, one of them of exponentials. Where those take longer than the products, shorter chunks pay.
"""

from __future__ import annotations

import sys
from functools import partial

from mlx_lm.models import ssm

from firn.models.patches import Patches

HOMES = (ssm.__name__, "mlx_vlm.models.ssm")
NAME = "ssm_attn"


def shorten(patches: Patches, *, step: int) -> None:
    """In every module of HOMES that is imported now. Calling it again replaces it in later ones."""
    for module in filter(None, map(sys.modules.get, HOMES)):
        plain = getattr(module, NAME)
        if not isinstance(plain, partial):
            patches.replace(module, NAME, partial(plain, step=step))
