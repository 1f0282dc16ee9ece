"""The prefix cache of a model and the tiers below it, as configured."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from firn.assembly.compute import ComputeSettings
from firn.assembly.sharding import Sharding
from firn.cache.admin.inventory import ModelNote, note_model
from firn.cache.layout import Layout
from firn.cache.off import CacheOff
from firn.cache.prefix import CacheSettings, PrefixCache
from firn.cache.storage.seal import Seal, load_seal
from firn.cache.storage.spill_policy import spill_policy
from firn.cache.storage.store_address import parse_address
from firn.cache.storage.worker import TierWorker
from firn.cache.tiers import TierOptions, discover
from firn.config import CacheConfig, Config, default_cache_dir
from firn.core.errors import SetupError, UnknownCacheLayer
from firn.core.memory_plan import STORE_QUEUE_NBYTES
from firn.core.units import GIB, MIB
from firn.core.values import ModelInfo, Namespace
from firn.host.backups import exclude_from_backups
from firn.host.mac import machine_id
from firn.models.load.loader import LoadedModel

log = logging.getLogger("firn")

FLUSH_S = 15.0
"""How long a stopping server may take to write records that are only in memory."""
STORE_FLUSH_S = 5.0
"""How long it may take for a store."""
N_STORE_THREADS = 8
"""They mostly wait."""


def check_settings(config: CacheConfig) -> None:
    """What can be checked before a model is loaded, which may take minutes. Raises SetupError."""
    if config.disable_prefix_cache:
        return
    if config.kv_cache_quantization and config.reuse == "exact":
        raise SetupError(
            "--kv-cache-quantization changes restored values: it cannot be used with --reuse exact"
        )
    if config.ssd_cache_key_file:
        load_seal(config.ssd_cache_key_file)
    kinds = discover()
    for address in map(parse_address, config.tiers):
        spill_policy(address.spill, config.cache_block_tokens)
        kinds[address.kind](address.options)


def build_cache(
    config: Config,
    loaded: LoadedModel,
    capacity_nbytes: int,
    *,
    compute: ComputeSettings,
    sharding: Sharding,
) -> PrefixCache | CacheOff:
    options = config.cache
    if options.disable_prefix_cache:
        log.info("prefix cache: off (--disable-prefix-cache)")
        return CacheOff()
    try:
        layout = layout_of(config, loaded)
    except UnknownCacheLayer as e:
        log.warning("%s is served without a prefix cache: %s", loaded.info.name, e)
        return CacheOff(str(e))
    layout.prepare(loaded.probe)
    limit = cache_nbytes(config, capacity_nbytes)
    settings = CacheSettings(
        limit_nbytes=limit,
        block=options.cache_block_tokens,
        exact_chunk=compute.exact_chunk,
        weighs_hits=compute.backend.profile.weighs_hits and not compute.exact,
    )
    log.info("prefix cache: %d MiB of memory, blocks of %d tokens", limit // MIB, settings.block)
    return sharding.make_cache(
        layout,
        settings,
        fingerprint=loaded.info.fingerprint,
        dtype=computed_in(loaded, compute.backend.arithmetic, sharding.text),
    )


def layout_of(config: Config, loaded: LoadedModel) -> Layout:
    """How a row's state is cut into records. Raises UnknownCacheLayer."""
    options = config.cache
    bits = options.kv_cache_quantization_bits if options.kv_cache_quantization else 0
    return Layout.of(
        loaded.probe, kv_bits=bits, kv_group_size=options.kv_cache_quantization_group_size
    )


def computed_in(loaded: LoadedModel, *more: str) -> str:
    """A part of every root: the dtype, and what else the bits depend on."""
    return " ".join((loaded.info.dtype, *filter(None, more)))


def cache_nbytes(config: Config, capacity_nbytes: int) -> int:
    """Memory for stored prefixes."""
    options = config.cache
    if options.disable_prefix_cache:
        return 0
    share = int(capacity_nbytes * options.cache_memory_percent)
    return min(options.cache_memory_mb * MIB or share, capacity_nbytes)


def tiers_of(config: CacheConfig) -> dict[str, TierOptions]:
    """The tiers below memory, by the names of the modules in cache/tiers."""
    if config.no_ssd_cache:
        return {}
    return {
        "ssd": TierOptions(
            str(config.ssd_cache_dir or default_cache_dir()),
            int(config.ssd_cache_max_gb * GIB) or None,
            int(config.ssd_write_budget_gb_per_day * GIB) or None,
        )
    }


def add_tiers(
    config: Config,
    cache: PrefixCache,
    model: ModelInfo,
    write_queue_nbytes: int,
    *,
    device: str,
    namespaces: Sequence[Namespace],
    wake: Callable[[], None],
    sharding: Sharding,
) -> None:
    """Add the tiers below memory to a cache. namespaces: whose records to look for there."""
    seal = seal_of(config)
    kinds, tiers = discover(), tiers_of(config.cache)
    if not tiers:
        log.info("ssd cache: off (--no-ssd-cache)")
    for name, options in tiers.items():
        options = sharding.options_of(options)
        folder = Path(options.location)
        exclude_from_backups(folder)
        own = TierWorker(
            kinds[name](options),
            seal=seal,
            max_write_nbytes=write_queue_nbytes,
            flush_timeout_s=FLUSH_S,
            wake=wake,
        )
        worker = sharding.worker_over(own, cache)
        where = re.sub(r"[^\w-]", "-", f"{device}-{machine_id()}")
        cache.keep_estimates(folder / "models" / f"{model.fingerprint.hex()}.{where}.estimates")
        cache.add_tier(name, worker, namespaces=namespaces)
        note_model(folder, model.fingerprint, ModelNote(model.name, model.path))
        limit = worker.usage().limit_nbytes / GIB
        log.info(
            "%s cache: %s, at most %.3g GiB (--no-ssd-cache turns it off)", name, folder, limit
        )
    for address in map(parse_address, config.cache.tiers):
        policy = spill_policy(address.spill, cache.settings.block)
        worker = TierWorker(
            kinds[address.kind](address.options),
            seal=seal,
            n_threads=N_STORE_THREADS,
            max_write_nbytes=STORE_QUEUE_NBYTES,
            flush_timeout_s=STORE_FLUSH_S,
            wake=wake,
        )
        cache.add_tier(address.kind, worker, namespaces=namespaces, policy=policy)
        log.info("%s store: %s, spill %s", address.kind, address.shown, address.spill)


def seal_of(config: Config) -> Seal | None:
    key_file = config.cache.ssd_cache_key_file
    return load_seal(key_file) if key_file else None
