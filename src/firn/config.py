"""One frozen tree of settings, built once: defaults < TOML file < environment < flags.

A field of the tree IS an option: its one entry gives type, default, help text and bounds, and the
flag, the environment variable, the TOML key, the validation and `firn config show` follow from it.
Owner: the command that starts. Everything below it is handed values and reads no environment.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
import tomllib
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, NoReturn, get_type_hints

from firn.core.errors import SetupError
from firn.defaults import ModelDefaults, SamplingConfig
from firn.options import BadValue, Option, option, options_of
from firn.several import FleetConfig, ModelTable, read_tables
from firn.sparse_options import SparseConfig
from firn.watching import LogConfig, PageConfig

BUILTIN_MODEL = "firn-demo"
CONFIG_ENV = "FIRN_CONFIG"
# Variables of ours that are no setting of the server: the Makefile's, the chat's and the tests'.
OTHER_ENV = frozenset({CONFIG_ENV, "FIRN_MLX", "FIRN_URL", "FIRN_API_KEY", "FIRN_BROWSER"})


class UsageError(SetupError):
    """A flag is at fault, not the machine or a file: exit code 2."""

    code = "usage_error"


def header_safe(key: str) -> str:
    """A key travels in a header: visible ASCII only."""
    if not all("!" <= char <= "~" for char in key):
        raise BadValue("a key may hold visible ASCII characters only, and no spaces")
    return key


def origin(text: str) -> str:
    """As a browser sends it: scheme and host, no path."""
    if text != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", text):
        raise BadValue(f"{text!r} is no origin; it looks like https://example.com")
    return text


def host_name(text: str) -> str:
    """As a client calls the server: no scheme, no port."""
    if text != "*" and not re.fullmatch(r"(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?", text):
        raise BadValue(f"{text!r} is no host name; it looks like ai.example.com")
    return text


# --- the tree ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ServerConfig:
    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 means every network.")
    port: int = option(8000, "Port to listen on; 0 takes any free one.", low=0, high=65535)
    served_model_name: str | None = option(
        None, "Name of the model in the API (otherwise the folder's or the hub id)."
    )
    api_keys: tuple[str, ...] = option(
        (),
        "Key that clients must send; repeat it for several. Prefer the environment or a file: "
        "other users of the machine can see flags.",
        flag="--api-key",
        env="FIRN_API_KEYS",
        metavar="KEY",
        secret=True,
        check=header_safe,
    )
    """Every accepted key, those of `api_key_file` included. Empty: no authentication."""
    timeout: float = option(
        0.0, "Seconds that a request may take; 0 for no limit.", low=0, high=1_000_000
    )
    rate_limit: int = option(
        0,
        "Requests a minute that a client (a key, or an address without keys) may send; 0 for no "
        "limit.",
        low=0,
        high=1_000_000,
    )
    api_key_file: Path | None = option(
        None, "File with more keys, one a line; # starts a comment.", metavar="FILE"
    )
    admin_keys: tuple[str, ...] = option(
        (),
        "Key of the operator, who sees the numbers of all keys; repeat it for several. Without one, and "
        "without other keys, the operator is who calls from this machine.",
        flag="--admin-key",
        env="FIRN_ADMIN_KEYS",
        metavar="KEY",
        secret=True,
        check=header_safe,
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        "Host name by which clients may call this server, besides localhost, addresses and the name "
        "it listens on (*.example.com, or * for any); repeat it for several.",
        flag="--allowed-host",
        env="FIRN_ALLOWED_HOSTS",
        metavar="NAME",
        check=host_name,
    )
    key_max_concurrency: int = option(
        0, "Calls that one key may have running; 0 for no such limit.", low=0, high=1_000_000
    )
    key_queue_share: float = option(
        0.0, "Share of --max-queue that one key may take; 0 for no such limit.", low=0, high=1
    )
    key_tokens_per_minute: int = option(
        0,
        "Tokens that may be computed for one key in a minute, prompts and replies, cached ones not "
        "counted; 0 for no such limit.",
        low=0,
        high=2**53,
    )
    allow_origins: tuple[str, ...] = option(
        (),
        "Web page that may call this server from a browser (https://example.com, or * for any); "
        "repeat it for several.",
        flag="--allow-origin",
        env="FIRN_ALLOW_ORIGINS",
        metavar="ORIGIN",
        check=origin,
    )


@dataclass(frozen=True, slots=True)
class ModelConfig:
    path: str = option(
        BUILTIN_MODEL,
        "A model folder, the id of a model on the Hugging Face hub, or smollm2.",
        flag=None,
        env="FIRN_MODEL",
        metavar="MODEL",
        check=os.path.expanduser,
    )
    adapter: Path | None = option(
        None, "Folder with a LoRA adapter to load on top of the model.", metavar="FOLDER"
    )
    trust_remote_code: bool = option(
        False, "Let the model's folder run Python code of its own. Only for models you trust."
    )
    offline: bool = option(False, "Download nothing: only models that are on this machine.")
    download_timeout: int | None = option(
        None, "Seconds of silence after which a download is given up.", low=1, high=86400
    )
    download_retries: int = option(
        3, "How often a download that broke off is taken up again.", low=0, high=100
    )
    text_only: bool = option(False, "Serve the text part of a vision model, without images.")
    tensor_parallel: bool = option(
        False, "Share the model out among the processes that mlx.launch started."
    )
    tool_call_parser: str = option(
        "auto",
        "How the model writes tool calls; auto reads it off its chat template.",
        metavar="NAME",
    )
    reasoning_parser: str = option(
        "auto",
        "How the model marks its thinking; auto reads it off its chat template.",
        metavar="NAME",
    )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    max_tokens: int = option(
        32768, "Longest reply in tokens when a request does not say.", low=1, high=2**31 - 1
    )
    max_request_tokens: int = option(
        0,
        "Longest reply in tokens that a request may ask for; 0 for no limit but the context.",
        low=0,
        high=2**31 - 1,
    )
    max_context: int = option(
        0,
        "Prompt and reply together, in tokens; auto is what the model can attend to.",
        low=0,
        high=2**31 - 1,
        words={"auto": 0},
    )
    """0: the model's."""
    max_concurrency: int = option(
        32, "Requests that generate at the same time; more wait in the queue.", low=1, high=4096
    )
    max_queue: int = option(
        256,
        "Requests that may wait for a free row; more are told to try again (429).",
        low=0,
        high=1_000_000,
    )
    prefill_chunk: int = option(
        0,
        "Prompt tokens read between two decoding steps; auto goes by the device, by how long the "
        "context is and by who else waits.",
        low=0,
        high=65536,
        words={"auto": 0},
    )
    """0: by device."""
    speculation: Literal["auto", "off", "lookup", "model", "mtp"] = option(
        "auto",
        "Guess several tokens a step and let the model check them; the text stays the same. lookup: "
        "what followed the same words in the prompt, the reply or an earlier reply; model: "
        "what --draft-model says; mtp: what the model's own prediction head says; auto: whatever there "
        "is, where it pays.",
    )
    draft_model: str | None = option(
        None,
        "A small model with the same tokenizer, which guesses for this one or scores its prompts "
        "(--sparse-prefill): a folder, or the id of a model on the Hugging Face hub.",
        metavar="MODEL",
    )
    max_step_ms: float = option(
        0.0,
        "How long reading a prompt may hold up those who generate, in milliseconds; chunks are made "
        "to fit. auto is what the usual chunk takes behind a short context.",
        low=0,
        high=600_000,
        words={"auto": 0.0},
    )
    scheduler_headroom_gb: float | None = option(
        None,
        "Device memory left free, in GiB; requests wait when less is left. auto leaves the system an "
        "eighth of memory, and a GPU 2.",
        low=0,
        high=4096,
        words={"auto": None},
    )
    wired_limit: float = option(
        0.0,
        "macOS: keep so many GiB of the weights from being paged out, never more than the weights. "
        "auto is off: kernel panics have been traced to it.",
        low=0,
        high=4096,
        metavar="auto|off|GB",
        words={"auto": 0.0, "off": 0.0},
    )
    blas: Literal["auto", "system", "bundled", "none"] = option(
        "auto",
        "Linux, CPU: what multiplies. system: the system's OpenBLAS; bundled: the one that firn[cpu] "
        "brings; none: MLX's own; auto: the fastest.",
    )
    cpu_dtype: Literal["auto", "model", "float32"] = option(
        "auto",
        "CPU: compute weights of 16 bits and quantised ones in float32, or as the model has them; "
        "auto: in float32 where that is faster and there is memory for it.",
    )
    gpu_memory_utilization: float | None = option(
        None,
        "Share of the device's memory to use, in place of --scheduler-headroom-gb.",
        low=0.01,
        high=1,
    )


@dataclass(frozen=True, slots=True)
class CacheConfig:
    disable_prefix_cache: bool = option(False, "Compute every prompt anew and keep nothing.")
    cache_memory_mb: int = option(
        0,
        "Memory for computed prefixes, in MiB; auto goes by what is free once the model is loaded.",
        low=0,
        high=1 << 30,
        words={"auto": 0},
    )
    """0: by what is free."""
    cache_memory_percent: float = option(
        0.2,
        "Share of the free memory that auto means for --cache-memory-mb: 0.2 is a fifth.",
        low=0.001,
        high=1,
    )
    cache_block_tokens: int = option(256, "Tokens in a block of the cache.", low=16, high=8192)
    reuse: Literal["full", "exact"] = option(
        "full",
        "full: reuse to the token. exact: resume on prefill chunks only, so that cached output is "
        "bit for bit the uncached output.",
    )
    kv_cache_quantization: bool = option(
        False, "Keep stored prefixes of plain attention quantised: smaller, slightly inexact."
    )
    kv_cache_quantization_bits: Literal[8, 4] = option(8, "Bits of a quantised value.")
    kv_cache_quantization_group_size: Literal[32, 64, 128] = option(
        64, "Values that share a scale."
    )
    cache_pin_max_mb: int = option(
        1024, "Memory that pinned prefixes may take, in MiB.", low=0, high=1 << 30
    )
    warm_prompts: Path | None = option(
        None,
        "JSON file of prompts to compute at start: a list of texts, message lists, or objects "
        "with messages and tools.",
        metavar="FILE",
    )
    no_ssd_cache: bool = option(False, "Keep computed prefixes in memory only.")
    ssd_cache_dir: Path | None = option(
        None, "Folder for computed prefixes (otherwise the user's cache folder).", metavar="DIR"
    )
    ssd_cache_max_gb: float = option(
        0.0,
        "Limit of that folder in GiB, for all processes that share it; auto is 10, less when the "
        "disk is small.",
        low=0,
        high=1 << 20,
        words={"auto": 0.0},
    )
    """0: by what is free."""
    ssd_write_budget_gb_per_day: float = option(
        64.0,
        "At most so many GiB are written in 24 hours, for the disk to last; 0 for no such limit.",
        low=0,
        high=1 << 20,
    )
    ssd_cache_key_file: Path | None = option(
        None, "Encrypt the records of every tier with the key in this file.", metavar="FILE"
    )
    tiers: tuple[str, ...] = option(
        (),
        "Store that servers share, below the folder: s3://bucket/prefix or redis://host/0; repeat it "
        "for both.",
        flag="--tier",
        metavar="ADDRESS",
        secret=True,
    )
    kv_events: str | None = option(
        None,
        "Publish which blocks are stored, for routers (tcp://127.0.0.1:5557); subscribers see tokens.",
        metavar="ADDRESS",
    )
    share_cache: bool = option(
        False, "One cache for all API keys (otherwise each key has a private one)."
    )


@dataclass(frozen=True, slots=True)
class ImagesConfig:
    allow_image_urls: bool = option(
        False,
        "Fetch images that requests name by address (https, public addresses only). Otherwise "
        "they must be sent as data URLs.",
    )
    allow_plain_http_images: bool = option(
        False, "With --allow-image-urls: fetch from http addresses too."
    )
    image_fetch_timeout_s: float = option(
        10.0, "Seconds that fetching an image may take.", low=0.1, high=600
    )
    max_image_mb: int = option(20, "Largest image file, in MiB.", low=1, high=1024)
    max_image_megapixels: float = option(
        50.0, "Largest image, in millions of pixels.", low=0.01, high=1000
    )
    image_feature_cache_mb: int = option(
        256, "Memory for what the vision tower has made of images, in MiB.", low=0, high=1 << 20
    )


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value came from: `where` is the file, the variable or the flag."""

    kind: Literal["default", "model", "file", "env", "flag"]
    where: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.where}".rstrip()


DEFAULT = Origin("default")


@dataclass(frozen=True, slots=True)
class Config:
    """All settings. The names of its sections are the tables of the TOML file."""

    server: ServerConfig = ServerConfig()
    model: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    sampling: SamplingConfig = SamplingConfig()
    cache: CacheConfig = CacheConfig()
    sparse: SparseConfig = SparseConfig()
    images: ImagesConfig = ImagesConfig()
    fleet: FleetConfig = FleetConfig()
    page: PageConfig = PageConfig()
    log: LogConfig = LogConfig()
    tables: tuple[ModelTable, ...] = ()
    """The file's [models.NAME]."""
    origins: Mapping[str, Origin] = field(
        default_factory=lambda: types.MappingProxyType({}), repr=False, compare=False
    )
    """By key ("server.port"); a key that is not here has its default."""

    def get(self, key: str) -> Any:
        section, name = key.split(".")
        return getattr(getattr(self, section), name)

    def origin(self, key: str) -> Origin:
        return self.origins.get(key, DEFAULT)

    @property
    def several(self) -> bool:
        """Whether models are to share an address; otherwise one process serves one model."""
        return bool(self.tables) or any(key.startswith("fleet.") for key in self.origins)


SECTIONS: Mapping[str, type] = {
    item.name: get_type_hints(Config)[item.name]
    for item in fields(Config)
    if item.name not in ("tables", "origins")
}
OPTIONS: tuple[Option, ...] = tuple(
    item for section, cls in SECTIONS.items() for item in options_of(section, cls)
)

# --- building the tree ---------------------------------------------------------------------

Given = dict[str, tuple[Any, Origin]]


def load(
    flags: Mapping[str, Any],
    *,
    environ: Mapping[str, str],
    file: Path | None = None,
    flag_names: Mapping[str, str] | None = None,
) -> Config:
    """The tree from its sources. Raises SetupError, or UsageError where a flag is at fault.

    `flags` holds what the command line gave, by key: a text, a list of texts, or a bool. `file` is
    the TOML file; without it the one that FIRN_CONFIG names. `flag_names`: by key, the flag that was
    given where it is not the option's own.
    """
    if file is None and environ.get(CONFIG_ENV, "").strip():
        file = Path(os.path.expanduser(environ[CONFIG_ENV].strip()))
    given: Given = {}
    tables: tuple[ModelTable, ...] = ()
    if file is not None:
        given, tables = _from_file(file)
    given |= _from_environ(environ)
    given |= _from_flags(flags, flag_names or {})
    _add_key_file(given)
    values: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for item in OPTIONS:
        if item.key in given:
            values[item.section][item.name] = given[item.key][0]
    origins = types.MappingProxyType({key: origin for key, (_, origin) in given.items()})
    return Config(
        **{section: cls(**values[section]) for section, cls in SECTIONS.items()},
        tables=tables,
        origins=origins,
    )


def with_model(config: Config, found: ModelDefaults) -> Config:
    """The tree with what the model says of itself wherever nobody has said anything."""
    if config.sampling.generation_config == "none":
        return config
    unsaid = {
        f"default_{name}": value
        for name, value in found.values.items()
        if getattr(config.sampling, f"default_{name}") is None
    }
    origin = Origin("model", str(found.path))
    origins = {**config.origins, **{f"sampling.{name}": origin for name in unsaid}}
    return replace(
        config,
        sampling=replace(config.sampling, **unsaid),
        origins=types.MappingProxyType(origins),
    )


def _from_file(path: Path) -> tuple[Given, tuple[ModelTable, ...]]:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SetupError(f"{path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SetupError(f"{path}: is not valid TOML: {error}") from error
    known = {item.key: item for item in OPTIONS}
    given: Given = {}
    models = read_tables(path, tables.pop("models", {}), OPTIONS)
    for section, table in tables.items():
        if section not in SECTIONS:
            _unknown(path, section, [*SECTIONS, "models"])
        if not isinstance(table, dict):
            raise SetupError(f"{path}: {section} is not a table: write [{section}]")
        for name, value in table.items():
            key = f"{section}.{name}"
            if key not in known:
                _unknown(path, key, known)
            try:
                value = known[key].accept(value, base=path.parent)
            except BadValue as problem:
                raise SetupError(f"{path}: {key}: {problem}") from None
            given[key] = (value, Origin("file", str(path)))
    return given, models


def _unknown(path: Path, key: str, known: Iterable[str]) -> NoReturn:
    close = difflib.get_close_matches(key, list(known), n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise SetupError(f"{path}: unknown key {key}{hint}")


def _from_environ(environ: Mapping[str, str]) -> Given:
    given: Given = {}
    for item in OPTIONS:
        text = environ.get(item.env)
        # Empty means unset, as compose files write it; but a secret that came out empty must not
        # open the server.
        if text is None or (not text.strip() and not item.spec.secret):
            continue
        try:
            given[item.key] = (item.parse(text), Origin("env", item.env))
        except BadValue as problem:
            raise SetupError(f"{item.env}: {problem}") from None
    return given


def _from_flags(flags: Mapping[str, Any], names: Mapping[str, str]) -> Given:
    known = {item.key: item for item in OPTIONS}
    given: Given = {}
    for key, raw in flags.items():
        item = known[key]
        name = names.get(key) or item.flag or item.metavar
        try:
            given[key] = (item.parse_flag(raw), Origin("flag", name))
        except BadValue as problem:
            raise UsageError(f"{name}: {problem}") from None
    return given


def _add_key_file(given: Given) -> None:
    """The keys of server.api_key_file join those that were listed."""
    if "server.api_key_file" not in given:
        return
    path, origin = given["server.api_key_file"]
    keys = _read_keys(path)
    listed, listed_origin = given.get("server.api_keys", ((), None))
    if listed_origin is not None:
        origin = Origin(listed_origin.kind, f"{listed_origin.where} and {path}")
    given["server.api_keys"] = (tuple(dict.fromkeys(listed + keys)), origin)


def _read_keys(path: Path) -> tuple[str, ...]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise SetupError(f"{path}: the API keys cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SetupError(f"{path}: the API keys are not UTF-8 text") from error
    keys = tuple(key for line in lines if (key := line.strip()) and not key.startswith("#"))
    if not keys:
        # An empty file must not open the server.
        raise SetupError(f"{path}: holds no API key")
    for key in keys:
        try:
            header_safe(key)
        except BadValue as problem:
            raise SetupError(f"{path}: {problem}") from None
    return keys


# --- beside the tree -----------------------------------------------------------------------


def unknown_variables(environ: Mapping[str, str]) -> tuple[str, ...]:
    """One line for each FIRN_ variable that sets nothing, for a typo should not pass unseen."""
    known = {item.env for item in OPTIONS} | OTHER_ENV
    lines = []
    for name in sorted(environ):
        if name.startswith("FIRN_") and name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            lines.append(f"{name} is set, but firn knows no such variable{hint}")
    return tuple(lines)


def default_cache_dir(
    environ: Mapping[str, str] = os.environ, *, platform: str = sys.platform
) -> Path:
    """Where this platform keeps a user's caches."""
    if platform == "darwin":
        return Path.home() / "Library" / "Caches" / "firn"
    base = environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "firn"


def converted_dir() -> Path:
    """Where models are kept that were made from other formats: in the cache, beside the records."""
    return default_cache_dir() / "converted"
