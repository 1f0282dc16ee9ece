"""For every test: none fails because the machine is busy, or because another one went before it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from firn.models import cpu_powers, cpu_rope

settings.register_profile("firn", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("firn")


@pytest.fixture(autouse=True, scope="session")
def _mlx_stays_as_it_is() -> Iterator[None]:
    """What a server puts in MLX's place is for its whole process; this one has many servers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_powers, "install_if_faster", lambda: False)
        patch.setattr(cpu_rope, "install", lambda: None)
        yield
