"""A prediction head that cannot be read or run costs drafts, never the start."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from firn.assembly.speculation import with_head
from firn.backends.contract import ComputeBackend
from firn.config import Config, EngineConfig, ModelConfig
from firn.core.errors import SetupError
from firn.models.load.loader import LoadedModel
from firn.models.model_arguments import IdsOnly
from firn.models.speculation.mtp import MtpModel
from tests.hash_runner import HashRunner
from tests.models.speculation.drafters.test_mtp import as_published, random_head
from tests.zoo import ZOO, build

NAME = "glm4_moe"


def loaded_from(folder: Path) -> LoadedModel:
    """A model with a sound head in its folder."""
    model = build(NAME)
    folder.mkdir(exist_ok=True)
    tensors = as_published(random_head(model, NAME), NAME)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    (folder / "config.json").write_text(json.dumps(ZOO[NAME].config))
    info = HashRunner().info
    info = type(info)(**{f: getattr(info, f) for f in info.__slots__} | {"path": str(folder)})
    return LoadedModel(model, info, lambda: list(make_prompt_cache(model)), [], IdsOnly())


def add_broken_file(folder: Path) -> None:
    """A leftover of a download, which mlx-lm does not read."""
    (folder / "consolidated.safetensors").write_bytes(b"version https://git-lfs")


def heads(folder: Path, option: Any, loaded: LoadedModel) -> LoadedModel:
    config = Config(model=ModelConfig(path=str(folder)), engine=EngineConfig(speculation=option))
    return with_head(config, loaded, exact=False, backend=ComputeBackend())


def test_a_sound_head_drafts(tmp_path: Path) -> None:
    loaded = loaded_from(tmp_path)
    assert isinstance(heads(tmp_path, "auto", loaded).model, MtpModel)


def test_a_head_that_cannot_draft_is_left_out_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = loaded_from(tmp_path)
    add_broken_file(tmp_path)
    with caplog.at_level(logging.INFO):
        assert heads(tmp_path, "auto", loaded) is loaded
    (said,) = caplog.messages
    assert "cannot draft tokens" in said
    with pytest.raises(SetupError, match="--speculation mtp: "):
        heads(tmp_path, "mtp", loaded)
