"""The values of a model's generation_config.json apply unless something overrides them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from firn.cli.commands import make_cli
from firn.config import Config, Origin, load, of_model, with_model
from firn.core.errors import SetupError
from firn.core.values import Defaults, Reasoning, Sampling

QWEN = {
    "bos_token_id": 151643,
    "do_sample": True,
    "eos_token_id": [151645, 151643],
    "repetition_penalty": 1.05,
    "temperature": 0.7,
    "top_k": 20,
    "top_p": 0.8,
    "transformers_version": "4.51.0",
}


def write(folder: Path, given: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(given))
    return folder


def effective(folder: Path, **flags: str) -> Config:
    given = {f"sampling.{name}": value for name, value in flags.items()}
    return with_model(load(given, environ={}), of_model(folder))


def test_the_files_values_hold(tmp_path: Path) -> None:
    config = effective(write(tmp_path, QWEN))
    assert config.sampling.defaults().sampling == Sampling(
        temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05
    )
    origin = Origin("model", str(tmp_path / "generation_config.json"))
    assert config.origin("sampling.default_top_k") == origin
    assert config.origin("sampling.default_min_p").kind == "default"


def test_a_flag_wins_and_none_switches_them_off(tmp_path: Path) -> None:
    folder = write(tmp_path, QWEN)
    config = effective(folder, default_temperature="0", default_min_p="0.1")
    assert config.sampling.defaults().sampling == Sampling(
        temperature=0.0, top_p=0.8, top_k=20, min_p=0.1, repetition_penalty=1.05
    )
    assert config.origin("sampling.default_temperature").kind == "flag"
    off = effective(folder, generation_config="none", default_top_p="0.5")
    assert off.sampling.defaults().sampling == Sampling(top_p=0.5)


def test_no_sampling_is_greedy_and_keeps_penalties(tmp_path: Path) -> None:
    greedy = QWEN | {"do_sample": False}
    found = effective(write(tmp_path, greedy)).sampling.defaults().sampling
    assert found == Sampling(temperature=0.0, repetition_penalty=1.05)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1),
        ("temperature", "warm"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", 2.5),
        ("min_p", [0.1]),
        ("repetition_penalty", 0),
        ("repetition_penalty", float("inf")),
        ("presence_penalty", 7),
    ],
)
def test_a_bad_value_is_a_warning_and_the_rest_holds(tmp_path: Path, name: str, value: Any) -> None:
    good = {"min_p": 0.25} if name != "min_p" else {"top_p": 0.25}
    found = of_model(write(tmp_path, {name: value} | good))
    assert found.values == good
    (line,) = found.warnings
    assert name in line
    assert "generation_config.json" in line


@pytest.mark.parametrize("text", ["{", "[]", "null", "7", "\x00", "[" * 100_000])
def test_a_file_that_is_no_object_is_a_warning(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    found = of_model(tmp_path)
    assert found.values == {}
    assert len(found.warnings) == 1


def test_nulls_and_off_say_nothing_new(tmp_path: Path) -> None:
    given = {"temperature": None, "top_k": 0, "top_p": 1.0, "min_p": None, "max_new_tokens": 5}
    assert effective(write(tmp_path, given)).sampling.defaults() == Defaults()
    assert of_model(tmp_path / "nowhere").warnings == ()


def test_minus_one_is_no_top_k_and_a_whole_float_is_one() -> None:
    found = load({"sampling.default_top_k": "-1"}, environ={}).sampling.defaults()
    assert found.sampling.top_k == 0


def test_a_whole_float_is_a_top_k(tmp_path: Path) -> None:
    assert of_model(write(tmp_path, {"top_k": 20.0})).values == {"top_k": 20}


def test_template_variables_are_a_json_object() -> None:
    text = '{"enable_thinking": false}'
    config = load({"sampling.default_chat_template_kwargs": text}, environ={})
    assert config.sampling.defaults().template_kwargs == {"enable_thinking": False}
    for bad in ("[]", "enable_thinking=false", "null"):
        with pytest.raises(SetupError, match="not a JSON object"):
            load({"sampling.default_chat_template_kwargs": bad}, environ={})


def test_what_a_request_says_of_thinking_wins_over_default_variables() -> None:
    defaults = Defaults(template_kwargs={"enable_thinking": False, "lang": "en"})
    assert defaults.kwargs({}, Reasoning()) == {"enable_thinking": False, "lang": "en"}
    assert defaults.kwargs({}, Reasoning(enabled=True)) == {"lang": "en"}
    given = {"enable_thinking": True, "lang": "de"}
    assert defaults.kwargs(given, Reasoning()) == given


def test_config_show_tells_them_with_their_file(tmp_path: Path) -> None:
    folder = write(tmp_path, QWEN | {"min_p": 9})
    result = CliRunner().invoke(make_cli(), ["config", "show", str(folder), "--json"])
    assert result.exit_code == 0, result.output
    shown = json.loads(result.stdout)
    assert shown["sampling.default_temperature"]["value"] == 0.7
    assert shown["sampling.default_temperature"]["origin"] == (
        f"model {folder / 'generation_config.json'}"
    )
    assert shown["sampling.default_min_p"]["value"] is None
    assert "min_p 9 is ignored" in result.stderr


def test_config_show_knows_the_built_in_models() -> None:
    result = CliRunner().invoke(make_cli(), ["config", "show", "--json"])
    assert json.loads(result.stdout)["sampling.default_temperature"]["value"] == 0.0
