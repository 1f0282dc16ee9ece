"""One frozen tree of settings, built once: defaults < TOML file < environment < flags.

Owner: the command that runs. Everything below it is passed values and reads no environment.
"""

from firn.config.cache import CacheConfig, converted_dir, default_cache_dir, kernels_dir
from firn.config.engine import BlasChoice, EngineConfig, WeightsDtype
from firn.config.fleet import FleetConfig, ModelTable
from firn.config.images import ImagesConfig
from firn.config.model import BUILTIN_MODEL, ModelConfig
from firn.config.monitoring import LogConfig, LogLevel, PageConfig
from firn.config.options import BadValue, Option
from firn.config.sampling import ModelDefaults, SamplingConfig, of_model
from firn.config.server import ServerConfig
from firn.config.sources import CONFIG_ENV, UsageError, load, unknown_variables
from firn.config.sparse import SparseConfig
from firn.config.tree import DEFAULT, OPTIONS, SECTIONS, Config, Origin, with_model

__all__ = [
    "BUILTIN_MODEL",
    "CONFIG_ENV",
    "DEFAULT",
    "OPTIONS",
    "SECTIONS",
    "BadValue",
    "BlasChoice",
    "CacheConfig",
    "Config",
    "EngineConfig",
    "FleetConfig",
    "ImagesConfig",
    "LogConfig",
    "LogLevel",
    "ModelConfig",
    "ModelDefaults",
    "ModelTable",
    "Option",
    "Origin",
    "PageConfig",
    "SamplingConfig",
    "ServerConfig",
    "SparseConfig",
    "UsageError",
    "WeightsDtype",
    "converted_dir",
    "default_cache_dir",
    "kernels_dir",
    "load",
    "of_model",
    "unknown_variables",
    "with_model",
]
