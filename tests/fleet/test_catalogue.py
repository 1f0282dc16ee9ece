"""Which models there are, and the settings of each process."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from firn.backends.cuda.smi import parse_gpus
from firn.config import OPTIONS, Config, load
from firn.core.errors import SetupError
from firn.fleet.catalogue import ModelCatalogue, from_json, to_json
from firn.fleet.files import check, folder_of, read_facts
from firn.fleet.memory import Footprint, estimate, measured
from firn.fleet.merging import merge_metrics
from tests.locked import as_a_user, locked

MIB = 1 << 20


def made(tmp_path: Path, file: str = "", *models: str, **flags: object) -> Config:
    path = tmp_path / "firn.toml"
    path.write_text(file)
    given = {key.replace("__", "."): value for key, value in flags.items()}
    if models:
        given |= {"model.path": models[0], "fleet.models": list(models[1:])}
    return load(given, environ={}, file=path)


def test_a_single_model_needs_no_front(tmp_path: Path) -> None:
    assert not load({}, environ={}).has_front
    assert not load({"model.path": "a/b"}, environ={}).has_front
    assert load({"model.path": "a", "fleet.models": ["b"]}, environ={}).has_front
    assert load({"fleet.keep_alive": "5m"}, environ={}).has_front
    assert made(tmp_path, "[models.x]\n").has_front


def test_names_aliases_and_the_default(tmp_path: Path) -> None:
    file = (
        '[models.big]\npath = "org/Big-8bit"\naliases = ["main"]\npinned = true\n[models.small]\n'
    )
    catalogue = ModelCatalogue(
        made(
            tmp_path,
            file,
            "org/First",
            fleet__aliases=["fast=small", "best=main", "claude-haiku-*=fast"],
        )
    )
    assert [spec.name for spec in catalogue] == ["First", "big", "small"]
    for name in ("First", "org/First", "", "gpt-4o", "claude-x", "First:latest"):
        spec = catalogue.find(name)
        assert spec is not None, name
        assert spec.name == "First", name
    for name in ("big", "main", "best", "org/Big-8bit", "main:latest"):
        spec = catalogue.find(name)
        assert spec is not None
        assert (spec.name, spec.pinned) == ("big", True)
    assert catalogue.find("fast").name == "small"  # type: ignore[union-attr]
    assert catalogue.find("claude-haiku-4-5").name == "small"  # type: ignore[union-attr]
    assert catalogue.find("nobody") is None
    assert catalogue.aliases_of(catalogue.find("big")) == ("main", "best")  # type: ignore[arg-type]


def test_a_models_table_overrides_the_file_and_a_flag_overrides_both(tmp_path: Path) -> None:
    file = (
        "[engine]\nmax_concurrency = 8\nmax_queue = 9\n"
        "[models.a]\nmax_concurrency = 3\nreuse = 'exact'\nkeep_alive = '5m'\n[models.b]\n"
    )
    a, b = ModelCatalogue(made(tmp_path, file))
    assert (a.config.engine.max_concurrency, b.config.engine.max_concurrency) == (3, 8)
    assert (a.config.cache.reuse, b.config.cache.reuse) == ("exact", "full")
    assert (a.config.engine.max_queue, a.keep_alive_s, b.keep_alive_s) == (9, 300, 1800)
    a, b = ModelCatalogue(made(tmp_path, file, engine__max_concurrency="5", fleet__keep_alive="-1"))
    assert a.config.engine.max_concurrency == b.config.engine.max_concurrency == 5
    assert a.keep_alive_s == b.keep_alive_s == math.inf


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("[models.a]\nport = 1\n", "of the whole server"),
        ("[models.a]\nshare_cache = true\n", "of the whole server"),
        ("[models.a]\nno_dashboard = true\n", "of the whole server"),
        ("[models.a]\nmax_conurrency = 1\n", "did you mean max_concurrency"),
        ("[models.a]\nmax_concurrency = 0\n", "too small"),
        ("[models.a]\npinned = 1\n", "not true or false"),
        ("[models.a]\nkeep_alive = 'soon'\n", "like '30m'"),
        ("[models.a]\naliases = 'x'\n", "not a list"),
        ("[models]\na = 1\n", "write \\[models.a\\]"),
        ("models = 1\n", "write \\[models.NAME\\]"),
    ],
)
def test_a_wrong_table_is_an_error_of_one_line(tmp_path: Path, file: str, line: str) -> None:
    with pytest.raises(SetupError, match=line):
        made(tmp_path, file)


LIST = """
import sys
from pathlib import Path
from firn.fleet.catalogue import folders

print(*dict(folders(Path(sys.argv[1]))))
"""


def test_a_folder_of_models_may_hold_one_that_may_not_be_looked_into(tmp_path: Path) -> None:
    """Like lost+found, if the folder is a disk's root."""
    for folder in (tmp_path / "model", tmp_path / "owner" / "other"):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    with locked(tmp_path / "lost+found"), locked(tmp_path / "owner" / "secret"):
        command = [*as_a_user(), sys.executable, "-c", LIST, str(tmp_path)]
        run = subprocess.run(command, capture_output=True, text=True)
    assert run.stdout == "model owner/other\n", run.stderr


def test_a_table_wins_over_a_folder_of_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "main"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    file = '[models.main]\npath = "owner/model"\n'
    catalogue = ModelCatalogue(made(tmp_path, file, fleet__models_dir=str(folder.parent)))
    assert [spec.path for spec in catalogue] == ["owner/model"]


def test_models_that_cannot_be_served_are_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="would both be called X"):
        ModelCatalogue(made(tmp_path, "", "a/X", "b/X"))
    with pytest.raises(SetupError, match="no model is called nobody"):
        ModelCatalogue(made(tmp_path, "", "a/X", "b/Y", fleet__aliases=["fast=nobody"]))
    with pytest.raises(SetupError, match="no folder"):
        ModelCatalogue(made(tmp_path, "", fleet__models_dir=str(tmp_path / "none")))
    with pytest.raises(SetupError, match="contains no model folders"):
        ModelCatalogue(made(tmp_path, "", fleet__models_dir=str(tmp_path)))
    events = {"cache__kv_events": "tcp://127.0.0.1:5557"}
    for more in ({"fleet__models_dir": str(tmp_path)}, {}):
        with pytest.raises(SetupError, match="needs its own address"):
            ModelCatalogue(made(tmp_path, "", "a/X", "b/Y", **events, **more))
    for spec in ModelCatalogue(made(tmp_path, "", "./nowhere", "nothing")):
        with pytest.raises(SetupError, match="no model folder"):
            check(spec)


def test_a_childs_settings_survive_the_pipe(tmp_path: Path) -> None:
    config = made(
        tmp_path,
        "[models.a]\nprefill_chunk = 64\ndefault_temperature = 0.5\n[models.b]\n",
        server__api_keys=["k1", "k2"],
        cache__ssd_cache_dir=str(tmp_path / "ssd"),
        server__rate_limit="5",
    )
    spec = next(iter(ModelCatalogue(config)))
    again = from_json(to_json(spec.config))
    for item in OPTIONS:
        if item.section != "fleet":
            assert again.get(item.key) == spec.config.get(item.key), item.key
    assert again.server.rate_limit == 0  # the front enforces it
    assert again.server.served_model_name == "a"


def test_a_models_files_give_its_facts_and_its_footprint(tmp_path: Path) -> None:
    (dense, _) = ModelCatalogue(made(tmp_path, "", "firn-demo", "some/model-that-is-not-here"))
    folder = folder_of(dense)
    facts = read_facts(folder)
    assert (facts.architecture, facts.context_length) == ("qwen3", 16384)
    assert facts.capabilities == ("completion", "chat", "tools")
    guess = estimate(folder)
    assert 1 * MIB < guess.weights_nbytes < 10 * MIB
    assert guess.nbytes > 300 * MIB
    assert estimate(None).weights_nbytes == 0
    assert read_facts(None).capabilities == ()


def test_tools_may_have_a_template_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert "tools" not in read_facts(tmp_path).capabilities
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(
        "{{ tools }} <tool_call>"
    )
    assert "tools" in read_facts(tmp_path).capabilities


@pytest.mark.parametrize(
    ("template", "tokens", "can"),
    [
        ("{{ tools }} <tool_call>", (), True),
        ("{{ tools }} in no format that is known", (), False),
        ("{{ tools }}", ("<|tool_call_start|>", "<|tool_call_end|>"), True),
        ("{{ messages }} <tool_call>", (), False),
    ],
)
def test_a_model_that_is_not_loaded_has_tools_if_its_calls_are_read(
    tmp_path: Path, template: str, tokens: tuple[str, ...], can: bool
) -> None:
    added = {str(i): {"content": token} for i, token in enumerate(tokens)}
    settings = {"chat_template": template, "added_tokens_decoder": added}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert ("tools" in read_facts(tmp_path).capabilities) is can


def test_measured_needs_do_not_shrink() -> None:
    report = {"weights": 100, "live_peak": 500 * MIB, "bytes_per_row": 0, "bytes_per_token": 0}
    peak = measured(report, Footprint(70))
    assert (peak.weights_nbytes, peak.live_nbytes) == (100, 500 * MIB)
    assert measured({**report, "live_peak": 0}, peak) == peak
    costly = measured({**report, "live_peak": 0, "bytes_per_token": MIB}, Footprint(70))
    assert costly.live_nbytes == 4096 * MIB


def test_nvidia_smi_gives_the_first_gpus_memory() -> None:
    memory = parse_gpus("143771, 143180\n143771, 2\n")
    assert memory is not None
    assert (memory.total, memory.available) == (143771 * MIB, 143180 * MIB)
    assert parse_gpus("[N/A], [N/A]") is None


def test_metrics_of_several_models_are_merged_under_labels() -> None:
    one = (
        '# HELP x_total A.\n# TYPE x_total counter\nx_total{k="v"} 1.0\n'
        "# HELP y B.\n# TYPE y gauge\ny 2.0\n"
    )
    merged = merge_metrics({'a"b': one, "c": one})
    assert merged.splitlines() == [
        "# HELP x_total A.",
        "# TYPE x_total counter",
        'x_total{model="a\\"b",k="v"} 1.0',
        'x_total{model="c",k="v"} 1.0',
        "# HELP y B.",
        "# TYPE y gauge",
        'y{model="a\\"b"} 2.0',
        'y{model="c"} 2.0',
    ]
