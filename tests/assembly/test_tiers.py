"""The tiers below memory, as a server has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from firn.assembly import cache
from firn.config import CacheConfig, Config, ModelConfig
from tests.api.real import serving


def test_what_was_measured_is_kept_under_the_machines_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Mac's host name changes with the network that it is in."""
    monkeypatch.setattr(cache, "machine_id", lambda: "Mac16,5-137438953472")
    config = Config(
        model=ModelConfig(path="firn-demo"), cache=CacheConfig(ssd_cache_dir=tmp_path / "ssd")
    )
    with serving(Path("firn-demo"), config=config) as real:
        real.openai().completions.create(model="firn-demo", prompt="Hello! " * 600, max_tokens=2)
    (kept,) = (tmp_path / "ssd" / "models").glob("*.estimates")
    assert kept.name.endswith("-Mac16-5-137438953472.estimates")
