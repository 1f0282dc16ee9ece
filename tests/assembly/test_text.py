"""What is told when a model's tokenizer and template are loaded."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from firn.assembly.text import load_text
from firn.config import Config
from firn.text.prompt.template_losses import TOOLS_MOVE
from tests import families


def told(caplog: pytest.LogCaptureFixture, config: Config, folder: Path) -> str:
    caplog.clear()
    with caplog.at_level(logging.INFO, "firn.models"):
        load_text(config, folder, with_pictures=False)
    return caplog.text


def test_what_the_chat_template_loses_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    families.write(tmp_path, families.FAMILIES["nemo"], families.template("nemo"))
    assert f"the chat template: {TOOLS_MOVE}" in told(caplog, Config(), tmp_path)


def test_what_a_variable_of_the_server_keeps_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = families.template("glm").replace(
        "loop.index0 > turns.question",
        "(loop.index0 > turns.question or preserve_thinking is defined)",
    )
    families.write(tmp_path, families.FAMILIES["glm"], source)
    config = Config()
    assert "preserve_thinking" in told(caplog, config, tmp_path)
    kept = '{"preserve_thinking": true}'
    sampling = replace(config.sampling, default_chat_template_kwargs=kept)
    assert told(caplog, replace(config, sampling=sampling), tmp_path) == ""
