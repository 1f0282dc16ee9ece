"""The tree of settings: precedence, origins, and one clear line for everything that is wrong."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firn.config import (
    BUILTIN_MODEL,
    OPTIONS,
    SECTIONS,
    CacheConfig,
    Config,
    Origin,
    UsageError,
    default_cache_dir,
    load,
    unknown_variables,
)
from firn.config.cache import default_write_budget_gb
from firn.config.options import BadValue, Option, option, options_of
from firn.core.errors import SetupError

# --- precedence ----------------------------------------------------------------------------


def values_of(item: Option) -> st.SearchStrategy[Any]:
    """Valid values of an option. Paths are absolute, because those in a file are relative to it."""
    one: st.SearchStrategy[Any]
    word = st.text("abcdefgh0123456789-", min_size=1, max_size=8)
    if item.choices:
        one = st.sampled_from(item.choices)
    elif item.scalar is bool:
        one = st.booleans()
    elif item.scalar is int:
        low, high = item.spec.low, item.spec.high
        one = st.integers(None if low is None else int(low), None if high is None else int(high))
    elif item.scalar is float:
        one = st.floats(item.spec.low, item.spec.high, allow_nan=False, allow_infinity=False)
    elif item.scalar is Path:
        one = word.map(lambda name: Path("/srv") / name)
    elif item.metavar == "JSON":
        one = word.map(lambda name: json.dumps({name: 1}))
    elif item.metavar == "TIME":
        one = st.integers(-1, 10**6).map(lambda n: f"{n}m")
    elif item.metavar == "NAME=MODEL":
        one = word.map(lambda name: f"{name}=m")
    elif item.metavar == "ORIGIN":
        one = word.map(lambda name: f"https://{name}")
    elif "|" in item.metavar:  # a text that must be one of some names
        one = st.sampled_from(item.metavar.split("|"))
    else:
        one = word.filter(lambda text: text not in item.spec.words)
    return st.lists(one, min_size=1, max_size=3).map(tuple) if item.many else one


def as_text(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(as_text, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def as_flag(value: Any) -> Any:
    if isinstance(value, bool):
        return value
    return [as_text(part) for part in value] if isinstance(value, tuple) else as_text(value)


def as_toml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(as_toml, value))}]"
    if isinstance(value, str | Path):
        return json.dumps(str(value))
    return as_text(value)


def toml(values: dict[str, Any]) -> str:
    lines = []
    for section in SECTIONS:
        rows = [(k.split(".")[1], v) for k, v in values.items() if k.startswith(f"{section}.")]
        lines += [f"[{section}]", *(f"{name} = {as_toml(value)}" for name, value in rows)]
    return "\n".join(lines)


# The key file is read, so it cannot be an arbitrary path; it has its own tests.
FREE = [item for item in OPTIONS if item.key != "server.api_key_file"]
SOURCE = st.fixed_dictionaries({}, optional={item.key: values_of(item) for item in FREE})


@given(in_file=SOURCE, in_environ=SOURCE, in_flags=SOURCE)
def test_flags_beat_environment_beats_file_beats_defaults(
    tmp_path_factory: pytest.TempPathFactory,
    in_file: dict[str, Any],
    in_environ: dict[str, Any],
    in_flags: dict[str, Any],
) -> None:
    file = tmp_path_factory.getbasetemp() / "firn.toml"
    file.write_text(toml(in_file))
    by_key = {item.key: item for item in OPTIONS}
    config = load(
        {key: as_flag(value) for key, value in in_flags.items()},
        environ={by_key[key].env: as_text(value) for key, value in in_environ.items()},
        file=file,
    )
    for item in FREE:
        expected, origin = item.default, Origin("default")
        for source, place in (
            (in_file, Origin("file", str(file))),
            (in_environ, Origin("env", item.env)),
            (in_flags, Origin("flag", item.flag or item.metavar)),
        ):
            if item.key in source:
                expected, origin = source[item.key], place
        assert config.get(item.key) == expected
        assert type(config.get(item.key)) is type(expected)
        assert config.origin(item.key) == origin


def test_nothing_given_is_the_default_tree() -> None:
    config = load({}, environ={})
    assert config == Config()
    assert config.server.host == "127.0.0.1"
    assert config.server.port == 8000
    assert config.model.path == BUILTIN_MODEL
    assert str(config.origin("server.port")) == "default"


def test_the_tree_is_frozen() -> None:
    config = load({"server.port": "1"}, environ={})
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.server.port = 2  # type: ignore[misc]
    with pytest.raises(TypeError):
        config.origins["server.port"] = Origin("default")  # type: ignore[index]


def test_each_option_has_names_of_its_own_and_a_help_text() -> None:
    for names in (
        [item.env for item in OPTIONS],
        [item.flag for item in OPTIONS if item.flag],
        [item.key for item in OPTIONS],
    ):
        assert len(set(names)) == len(names)
    assert all(item.spec.help.endswith(".") for item in OPTIONS)
    assert all(item.env.startswith("FIRN_") for item in OPTIONS)


def test_the_file_may_come_from_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "firn.toml"
    file.write_text("[server]\nport = 1234")
    assert load({}, environ={"FIRN_CONFIG": str(file)}).server.port == 1234
    assert load({}, environ={"FIRN_CONFIG": " "}).server.port == 8000


def test_paths_of_a_file_are_relative_to_it(tmp_path: Path) -> None:
    file = tmp_path / "firn.toml"
    file.write_text('[model]\nadapter = "lora"')
    assert load({}, environ={}, file=file).model.adapter == tmp_path / "lora"
    assert load({"model.adapter": "lora"}, environ={}).model.adapter == Path("lora")


def test_home_is_expanded_where_no_shell_does_it(tmp_path: Path) -> None:
    file = tmp_path / "firn.toml"
    file.write_text('[model]\npath = "~/m"\nadapter = "~/a"')
    config = load({}, environ={}, file=file)
    assert config.model.path == str(Path.home() / "m")
    assert config.model.adapter == Path.home() / "a"


def test_words_stand_for_values(tmp_path: Path) -> None:
    file = tmp_path / "firn.toml"
    file.write_text('[engine]\nprefill_chunk = "auto"')
    assert load({}, environ={"FIRN_PREFILL_CHUNK": "512"}).engine.prefill_chunk == 512
    assert load({}, environ={"FIRN_PREFILL_CHUNK": "AUTO"}).engine.prefill_chunk == 0
    assert load({}, environ={}, file=file).engine.prefill_chunk == 0
    file.write_text('[engine]\nprefill_chunk = "Auto"\n[log]\nlevel = "WARN"')
    assert load({}, environ={}, file=file).engine.prefill_chunk == 0
    assert load({}, environ={}, file=file).log.level == "warning"
    assert load({"log.level": "WARN"}, environ={}).log.level == "warning"


# --- one line for what is wrong ------------------------------------------------------------

BAD_FILES = [
    ("[server", "is not valid TOML"),
    ("port = 1", "unknown key port; did you mean server.port?"),
    ("server.prot = 1", "unknown key server.prot; did you mean server.port?"),
    ("[engine]\nreuse = 'exact'", "unknown key engine.reuse; did you mean cache.reuse?"),
    ("[server]\nzzzz = 1", "unknown key server.zzzz"),
    ("server = 1", "server is not a table: write [server]"),
    ("[sever]\nport = 1", "unknown key sever; did you mean server?"),
    ("[server]\nprot = 1", "unknown key server.prot; did you mean server.port?"),
    ("[server]\nport = '8000'", "server.port: '8000' is not a whole number"),
    ("[server]\nport = 80.5", "server.port: 80.5 is not a whole number"),
    ("[server]\nport = true", "server.port: true is not a whole number"),
    ("[server]\nport = 65536", "server.port: 65536 is too large; the maximum is 65535"),
    ("[server]\nport = -1", "server.port: -1 is too small; the minimum is 0"),
    ("[server]\nport = [1]", "server.port: [1] is not a whole number"),
    ("[server]\nhost = 1", "server.host: 1 is not text"),
    ("[server]\nhost = ' '", "server.host: is empty"),
    ("[server]\napi_keys = 'secret-1'", "server.api_keys: the value is not a list"),
    ("[server]\napi_keys = [17]", "server.api_keys: the value is not text"),
    ("[server]\napi_keys = ['']", "server.api_keys: is empty"),
    ("[server]\napi_keys = ['secret 1']", "visible ASCII characters only"),
    ("[model]\nadapter = 1", "model.adapter: 1 is not a path"),
    ("[model]\ntrust_remote_code = 'yes'", "'yes' is not true or false"),
    ("[model]\ntrust_remote_code = 1", "1 is not true or false"),
    ("[engine]\nmax_tokens = 0", "engine.max_tokens: 0 is too small; the minimum is 1"),
    ("[engine]\nprefill_chunk = 'often'", "'often' is not a whole number"),
    ("[log]\nlevel = 'loud'", "'loud' is not one of debug, info, warning, error"),
]


@pytest.mark.parametrize(("text", "problem"), BAD_FILES)
def test_a_bad_file_is_named_with_the_key(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "firn.toml"
    file.write_text(text)
    with pytest.raises(SetupError) as caught:
        load({}, environ={}, file=file)
    assert not isinstance(caught.value, UsageError)
    assert caught.value.message.startswith(f"{file}: ")
    assert problem in caught.value.message
    assert "\n" not in caught.value.message
    assert "secret" not in caught.value.message


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for file, problem in (
        (tmp_path / "none.toml", "cannot be read: No such file"),
        (tmp_path, "cannot be read: Is a directory"),
    ):
        with pytest.raises(SetupError, match=problem):
            load({}, environ={}, file=file)
    latin = tmp_path / "latin.toml"
    latin.write_bytes(b"[server]\nhost = '\xe9'")
    with pytest.raises(SetupError, match="not valid TOML"):
        load({}, environ={}, file=latin)


BAD_VARIABLES = [
    ("FIRN_PORT", "abc", "'abc' is not a whole number"),
    ("FIRN_PORT", "99999", "99999 is too large; the maximum is 65535"),
    ("FIRN_PORT", "9" * 5000, "..."),
    ("FIRN_TRUST_REMOTE_CODE", "maybe", "'maybe' is not true or false"),
    ("FIRN_LOG_LEVEL", "loud", "'loud' is not one of debug, info, warning, error"),
    ("FIRN_API_KEYS", "", "is empty"),
    ("FIRN_API_KEYS", " , ", "is empty"),
    ("FIRN_API_KEYS", "ok,clé", "visible ASCII"),
    ("FIRN_MAX_QUEUE", "-1", "-1 is too small; the minimum is 0"),
]


@pytest.mark.parametrize(("name", "text", "problem"), BAD_VARIABLES)
def test_a_bad_variable_is_named(name: str, text: str, problem: str) -> None:
    with pytest.raises(SetupError) as caught:
        load({}, environ={name: text})
    assert not isinstance(caught.value, UsageError)
    assert caught.value.message.startswith(f"{name}: ")
    assert problem in caught.value.message
    assert len(caught.value.message) < 200


BAD_FLAGS = [
    ("server.port", "abc", "--port: 'abc' is not a whole number"),
    ("server.port", "-1", "--port: -1 is too small"),
    ("server.api_keys", [""], "--api-key: is empty"),
    ("server.api_keys", ["a b"], "--api-key: a key may contain visible ASCII characters only"),
    ("model.path", "", "MODEL: is empty"),
    ("log.level", "loud", "--log-level: 'loud' is not one of"),
]


@pytest.mark.parametrize(("key", "raw", "problem"), BAD_FLAGS)
def test_a_bad_flag_is_a_usage_error(key: str, raw: Any, problem: str) -> None:
    with pytest.raises(UsageError) as caught:
        load({key: raw}, environ={})
    assert caught.value.message.startswith(problem)


def test_an_empty_variable_is_unset_unless_it_is_a_secret() -> None:
    assert load({}, environ={"FIRN_PORT": "", "FIRN_MODEL": " "}) == Config()
    with pytest.raises(SetupError, match="FIRN_API_KEYS"):
        load({}, environ={"FIRN_API_KEYS": ""})


def test_a_variable_of_ours_that_sets_nothing_is_pointed_out() -> None:
    environ = {"FIRN_PROT": "1", "FIRN_PORT": "1", "FIRN_MLX": "cpu", "FIRN_XQZV": "", "HOME": "/"}
    first, second = unknown_variables(environ)
    assert first.startswith("FIRN_PROT is set")
    assert first.endswith("did you mean FIRN_PORT?")
    assert second.startswith("FIRN_XQZV is set")


# --- keys ----------------------------------------------------------------------------------


def test_keys_of_the_file_join_the_listed_ones(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nalpha\n\n  beta  \nalpha\n")
    config = load({"server.api_key_file": str(file)}, environ={"FIRN_API_KEYS": "gamma, alpha"})
    assert config.server.api_keys == ("gamma", "alpha", "beta")
    assert config.server.api_key_file == file
    assert str(config.origin("server.api_keys")) == f"env FIRN_API_KEYS and {file}"
    alone = load({"server.api_key_file": str(file)}, environ={})
    assert alone.server.api_keys == ("alpha", "beta")
    assert str(alone.origin("server.api_keys")) == "flag --api-key-file"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "contains no API key"),
        (b"# none\n\n", "contains no API key"),
        (b"two words\n", "visible ASCII"),
        (b"\xff\xfe", "not UTF-8"),
        (None, "cannot be read"),
    ],
)
def test_a_key_file_without_good_keys_never_opens_the_server(
    tmp_path: Path, content: bytes | None, problem: str
) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SetupError, match=problem) as caught:
        load({"server.api_key_file": str(file)}, environ={})
    assert "words" not in caught.value.message


def test_keys_are_not_in_the_repr() -> None:
    config = load({"server.api_keys": ["hunter2"]}, environ={})
    assert config.server.api_keys == ("hunter2",)
    assert "hunter2" not in repr(config)


# --- what an entry can say -----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Sample:
    """Kinds of options that the tree may have."""

    share: float = option(0.2, "A share.", low=0, high=1)
    bits: Literal[8, 4] = option(8, "A choice of numbers.")
    folders: tuple[Path, ...] = option((), "Several paths.")
    limit_gb: float | None = option(None, "No default.", low=0.5)


SAMPLE = {item.name: item for item in options_of("sample", Sample)}


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("share", "0.5", 0.5),
        ("share", "1", 1.0),
        ("bits", "4", 4),
        ("folders", "/a,/b", (Path("/a"), Path("/b"))),
        ("limit_gb", "1e3", 1000.0),
    ],
)
def test_an_entry_reads_text(name: str, text: str, value: Any) -> None:
    parsed = SAMPLE[name].parse(text)
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("share", "1.1"),
        ("share", "nan"),
        ("share", "inf"),
        ("bits", "6"),
        ("bits", "x"),
        ("limit_gb", "0.4"),
    ],
)
def test_an_entry_refuses_text(name: str, text: str) -> None:
    with pytest.raises(BadValue):
        SAMPLE[name].parse(text)


def test_an_entry_reads_toml(tmp_path: Path) -> None:
    assert SAMPLE["share"].accept(1, base=tmp_path) == 1.0
    assert SAMPLE["bits"].accept(8, base=tmp_path) == 8
    assert SAMPLE["folders"].accept(["a", "/b"], base=tmp_path) == (tmp_path / "a", Path("/b"))
    for name, value in (("share", True), ("bits", 8.0), ("bits", 5), ("share", float("inf"))):
        with pytest.raises(BadValue):
            SAMPLE[name].accept(value, base=tmp_path)


def test_names_follow_from_the_field() -> None:
    item = SAMPLE["limit_gb"]
    assert (item.key, item.flag, item.env) == ("sample.limit_gb", "--limit-gb", "FIRN_LIMIT_GB")
    assert SAMPLE["bits"].metavar == "8|4"


def test_a_days_writes_fit_on_a_macs_disk_beside_the_cache() -> None:
    """Its snapshots keep them all for a day."""
    assert default_write_budget_gb("linux") == 64
    assert default_write_budget_gb("darwin") == 20
    assert CacheConfig().ssd_write_budget_gb_per_day == default_write_budget_gb()


@pytest.mark.parametrize(
    ("platform", "xdg", "folder"),
    [
        ("linux", "/x", Path("/x/firn")),
        ("linux", "relative", Path.home() / ".cache/firn"),
        ("linux", "", Path.home() / ".cache/firn"),
        ("darwin", "/x", Path.home() / "Library/Caches/firn"),
    ],
)
def test_the_cache_folder_is_the_platforms(platform: str, xdg: str, folder: Path) -> None:
    assert default_cache_dir({"XDG_CACHE_HOME": xdg}, platform=platform) == folder
