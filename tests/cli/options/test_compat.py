"""Scripts written for other servers: each of their options does what the documentation says."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from typer.testing import Result

from firn.cli.options.compat import PARSERS, SAME, VLLM_MLX, AliasFlag, IgnoredFlag, RefusedFlag
from firn.config import OPTIONS, Config
from firn.text.reply.formats import reasoning_parser_names, tool_parser_names
from tests.cli import command
from tests.cli.options import vllm_mlx
from tests.cli.test_commands import Recorder

DOCS = Path(__file__).parents[3] / "docs" / "from-vllm-mlx.md"
BY_FLAG = {item.flag: item for item in OPTIONS}
FLAGS = {item.key: item.flag for item in OPTIONS}


def serve(*arguments: str) -> tuple[Result, Config | None]:
    start = Recorder()
    result = command.invoke("serve", "some/model", *arguments, start=start)
    return result, start.configs[0] if start.configs else None


def words(flag: str, value: str | None = "") -> list[str]:
    value = vllm_mlx.OPTIONS[flag] if value == "" else value
    return [flag] if value is None else [flag, value]


def section(title: str) -> str:
    """The part of the documentation below a heading."""
    parts = re.split(r"^#+ (.*)\n", DOCS.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))[title]


def rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def flags_in(text: str) -> list[str]:
    return re.findall(r"--[a-z][a-z0-9-]+", text)


# --- vllm-mlx ------------------------------------------------------------------------------


def test_every_option_has_its_fate() -> None:
    assert set(SAME) | set(VLLM_MLX) == set(vllm_mlx.OPTIONS)
    assert not set(SAME) & set(VLLM_MLX)
    assert set(SAME) <= set(BY_FLAG)
    assert not set(VLLM_MLX) & set(BY_FLAG)


@pytest.mark.parametrize("flag", SAME)
def test_an_option_of_the_same_name_sets_the_option(flag: str) -> None:
    result, config = serve(*words(flag))
    assert result.exit_code == 0, result.output
    assert result.output == ""
    assert config is not None
    item = BY_FLAG[flag]
    assert config.origin(item.key).where == flag
    value = vllm_mlx.OPTIONS[flag]
    expected = True if value is None else item.parse_flag([value] if item.many else value)
    assert config.get(item.key) == expected


@pytest.mark.parametrize("flag", [f for f, fate in VLLM_MLX.items() if isinstance(fate, AliasFlag)])
def test_another_name_sets_the_option(flag: str) -> None:
    fate = VLLM_MLX[flag]
    assert isinstance(fate, AliasFlag)
    result, config = serve(*words(flag))
    assert (result.exit_code, result.output) == (0, "")
    assert config is not None
    given = vllm_mlx.OPTIONS[flag]
    assert given is not None
    assert config.get(fate.key) == BY_FLAG[FLAGS[fate.key]].parse_flag(given)
    assert config.origin(fate.key).where == flag
    wrong, _ = serve(flag, "many")
    assert wrong.exit_code == 2
    assert wrong.output.startswith(f"firn: {flag}: 'many' ")
    assert wrong.output.count("\n") == 1
    if fate.unset is not None:
        _, config = serve(flag, fate.unset)
        assert config is not None
        assert config.origin(fate.key).kind == "default"


@pytest.mark.parametrize(
    "flag", [f for f, fate in VLLM_MLX.items() if isinstance(fate, IgnoredFlag)]
)
def test_what_nobody_needs_is_accepted_and_says_so_in_a_line(flag: str) -> None:
    result, config = serve(*words(flag))
    assert result.exit_code == 0
    assert config is not None
    assert result.output.count("\n") == 1
    assert result.output.startswith(f"firn: {flag} is not needed: ")


@pytest.mark.parametrize(
    "flag", [f for f, fate in VLLM_MLX.items() if isinstance(fate, RefusedFlag)]
)
def test_what_firn_does_not_do_is_one_line(flag: str) -> None:
    result, config = serve(*words(flag))
    assert result.exit_code == 2
    assert config is None
    assert result.output.count("\n") == 1
    assert result.output.startswith(f"firn: {flag}: ")
    fate = VLLM_MLX[flag]
    assert isinstance(fate, RefusedFlag)
    for value in fate.unless:
        result, config = serve(flag, value)
        assert (result.exit_code, result.output) == (0, "")


def test_of_two_names_the_options_own_counts_and_the_other_is_told() -> None:
    result, config = serve("--prefill-step-size", "1024", "--prefill-chunk", "512")
    assert config is not None
    assert config.engine.prefill_chunk == 512
    told = "firn: --prefill-step-size is ignored: --prefill-chunk is given too\n"
    assert result.output == told
    result, config = serve("--prefill-step-size", "1024", "--chunked-prefill-tokens", "256")
    assert config is not None
    assert config.engine.prefill_chunk == 256
    told = "firn: --prefill-step-size is ignored: --chunked-prefill-tokens is given too\n"
    assert result.output == told


def test_a_whole_script_runs() -> None:
    given = [
        "--port", "8000", "--continuous-batching", "--max-num-seqs", "16", "--prefill-step-size",
        "1024", "--chunked-prefill-tokens", "0", "--cache-memory-percent", "0.3",
        "--use-paged-cache", "--paged-cache-block-size", "128", "--enable-auto-tool-choice",
        "--tool-call-parser", "qwen3.5", "--reasoning-parser", "qwen3", "--default-temperature",
        "0.6", "--default-top-p", "0.95", "--timeout", "600", "--rate-limit", "30",
        "--enable-metrics", "--ssd-cache-dir", "/srv/kv", "--ssd-cache-max-gb", "50",
        "--gpu-memory-utilization", "0.92", "--offline",
    ]  # fmt: skip
    result, config = serve(*given)
    assert result.exit_code == 0, result.output
    assert config is not None
    assert config.engine.max_concurrency == 16
    assert config.engine.prefill_chunk == 1024
    assert config.engine.gpu_memory_utilization == 0.92
    assert config.cache.cache_block_tokens == 128
    assert config.cache.cache_memory_percent == 0.3
    assert config.model.tool_call_parser == "qwen3_xml"
    assert config.model.offline
    assert config.sampling.default_temperature == 0.6
    assert (config.server.timeout, config.server.rate_limit) == (600, 30)


def test_its_names_of_formats_are_known() -> None:
    for key, theirs, ours in (
        ("model.tool_call_parser", vllm_mlx.TOOL_PARSERS, tool_parser_names()),
        ("model.reasoning_parser", vllm_mlx.REASONING_PARSERS, reasoning_parser_names()),
    ):
        translated = {name: PARSERS[key].get(name, name) for name in theirs}
        unknown = [name for name, ours_is in translated.items() if ours_is not in ours]
        assert [name for name in unknown if name not in vllm_mlx.NO_SUCH_FORMAT] == []
        # A name is translated only where it is not one of ours already.
        assert not set(PARSERS[key]) & set(ours)


# --- the documentation ---------------------------------------------------------------------


def test_the_table_is_the_code() -> None:
    table = rows(section("Coming from vllm-mlx"))
    assert [row[0].strip("`") for row in table] == [*SAME, *VLLM_MLX]
    for name, here, text in (row if len(row) == 3 else [*row, ""] for row in table):
        match VLLM_MLX.get(name.strip("`")):
            case None:
                assert here == "same", name
            case AliasFlag(key):
                assert here == f"`{FLAGS[key]}`", name
            case IgnoredFlag(said):
                assert here == "not needed", name
                assert said in text
            case RefusedFlag(said):
                assert here == "refused", name
                assert said in text


@pytest.mark.parametrize(
    ("title", "module"),
    [
        ("From mlx-lm's server", "mlx_lm/server.py"),
        ("From mlx-vlm's server", "mlx_vlm/server/cli.py"),
    ],
)
def test_the_shorter_tables_name_every_option_once(title: str, module: str) -> None:
    package, _, path = module.partition("/")
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package} is not installed")
    source = (Path(spec.origin).parent / path).read_text(encoding="utf-8")
    theirs = set(re.findall(r'^\s+"(--[a-z0-9-]+)",$', source, flags=re.MULTILINE))
    assert len(theirs) > 20
    table = rows(section(title))
    named = [flag for row in table for flag in flags_in(row[0])]
    assert sorted(named) == sorted(theirs)
    for row in table:
        for flag in flags_in(row[1]):
            assert flag in BY_FLAG, flag
        if row[1].startswith("the same"):
            assert all(flag in BY_FLAG for flag in flags_in(row[0])), row[0]
