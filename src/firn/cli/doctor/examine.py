"""`firn doctor`: examines the machine and a model, prints what it found and what is wrong.

Examining yields findings, which are values; printing them is a step of its own.
"""

from __future__ import annotations

import math
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from firn import __version__
from firn.cli.doctor.findings import STYLES, Finding, Mark
from firn.cli.terminal import plain_console, size
from firn.config import BUILTIN_MODEL, default_cache_dir, kernels_dir
from firn.core.errors import SetupError
from firn.core.memory_plan import (
    MachineMemory,
    MemoryOptions,
    MemoryPlan,
    ModelMemory,
    Transient,
    plan_memory,
)
from firn.core.units import GIB
from firn.host import mac
from firn.host.machine import SystemMemory, disk_free, memory

if TYPE_CHECKING:
    from firn.backends.contract import ComputeBackend
    from firn.backends.report import DeviceReport
    from firn.models.load.inspect import ModelReport
    from firn.models.timing import TimeSplit

LOW_DISK_NBYTES = 2 * GIB
"""With less, neither a cache on disk nor a download makes sense."""
SNAPSHOT_DISK_NBYTES = 50 * GIB
"""With less, what snapshots keep may fill the disk."""
ROSETTA = (
    "This Python was built for Intel Macs and runs under Rosetta: MLX needs one for Apple silicon "
    "(from python.org, or `arch -arm64 brew install python`)."
)
INSTALL_HINT = "on Linux install firn[cpu] or firn[cuda13]"


def machine_of(device: DeviceReport, system: SystemMemory) -> MachineMemory:
    has_own = device.profile.has_own_memory
    return MachineMemory(
        device.profile.name,
        device.working_set_nbytes or device.memory_nbytes or system.total,
        system.total,
        None if has_own else system.available,
        has_own_memory=has_own,
    )


def model_of(report: ModelReport) -> ModelMemory:
    cost = report.cache
    return ModelMemory(
        report.weights_nbytes,
        cost.per_token_nbytes if cost else 0,
        cost.fixed_nbytes if cost else 0,
        report.transient or Transient(0),
        report.context_length,
    )


def as_computed(report: ModelReport, device: DeviceReport, system: SystemMemory) -> ModelReport:
    """The report in float32, if the device would compute in it: larger weights, twice the cache."""
    wide, share = report.float32_nbytes, device.profile.widened_share
    most = math.inf if system.available is None else share * system.available
    if not share or not report.weights_nbytes < wide <= most:
        return report
    cost = report.cache and replace(
        report.cache,
        per_token_nbytes=2 * report.cache.per_token_nbytes,
        fixed_nbytes=2 * report.cache.fixed_nbytes,
    )
    return replace(report, weights_nbytes=wide, cache=cost)


def verdict(
    machine: MachineMemory, model: ModelMemory, options: MemoryOptions
) -> tuple[MemoryPlan, bool]:
    """The plan, and whether the model would fit if nothing else ran."""
    alone = replace(machine, available_nbytes=None, reserved_nbytes=0, unclaimed_nbytes=0)
    return plan_memory(machine, model, options), plan_memory(alone, model, options).fits


def budget_rows(
    machine: MachineMemory, plan: MemoryPlan, *, memory_name: str
) -> Iterator[tuple[int, str]]:
    """Bytes and what they are for; deductions are negative, and the last row is the rest."""
    yield machine.device_nbytes, memory_name
    if machine.reserved_nbytes:
        yield -machine.reserved_nbytes, "reserved by other firn servers"
    if plan.headroom_nbytes:
        yield -plan.headroom_nbytes, "left free"
    before = machine.device_nbytes - machine.reserved_nbytes - plan.headroom_nbytes
    if plan.limit_nbytes < before:
        yield plan.limit_nbytes - before, "used by other programs"
    yield -plan.weights_nbytes, "weights"
    yield -plan.chunk_nbytes, "a prefill chunk while it runs"
    yield -plan.buffer_cache_nbytes, "buffers that MLX keeps for reuse"
    yield -plan.write_queue_nbytes, "records waiting to be written"
    if plan.store_queues_nbytes:
        yield -plan.store_queues_nbytes, "records waiting to be sent to stores"
    yield (
        plan.limit_nbytes - plan.total_nbytes + plan.capacity_nbytes,
        "requests and stored prefixes",
    )


def doctor(
    model: str | None,
    *,
    measure: bool = False,
    cache_dir: Path | None = None,
    stores: Sequence[str] = (),
    console: Console | None = None,
) -> int:
    """Prints the findings; returns 1 if one is a problem. cache_dir: None for the user's own.

    stores: addresses of shared stores, which are tested.
    """
    from firn.cli.doctor.store import store_findings

    console = console or plain_console(soft_wrap=False)
    findings = [*machine_findings(cache_dir or default_cache_dir())]
    findings += store_findings(stores)
    findings += model_findings(model, n_stores=len(stores))
    if measure and not any(finding.mark == "problem" for finding in findings):
        with console.status("loading and timing the model"):
            findings += time_model(model or BUILTIN_MODEL)
    print_findings(findings, console)
    return int(any(finding.mark == "problem" for finding in findings))


def print_findings(findings: list[Finding], console: Console) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(width=1)
    table.add_column(overflow="fold")
    for finding in findings:
        sign, style = STYLES[finding.mark]
        table.add_row(finding.topic, Text(sign, style=style), Text(finding.text, style=style))
    console.print(table)
    n_problems = sum(finding.mark == "problem" for finding in findings)
    if n_problems:
        things = "thing is" if n_problems == 1 else "things are"
        console.print(f"\n{n_problems} {things} wrong: see ✗ above.", style="bold red")
    else:
        notes = any(finding.mark == "note" for finding in findings)
        console.print(f"\nNothing is wrong{'; see • above' if notes else ''}.", style="green")


# --- the machine ---------------------------------------------------------------------------


def machine_findings(cache_dir: Path) -> Iterator[Finding]:
    yield Finding("firn", f"{__version__}, Python {platform.python_version()}")
    yield _version("mlx", f"not installed; {INSTALL_HINT}", missing="problem")
    yield _version("mlx-lm", "not installed; install firn again", missing="problem")
    yield _version("mlx-vlm", "not installed; pictures need firn[vision]", missing="ok")
    yield Finding("platform", f"{_system()}, {platform.machine()}")
    if mac.is_translated():
        yield Finding("", ROSETTA, "problem")
    backend = _backend()
    if backend is None:
        yield Finding("device", f"MLX cannot be loaded; {INSTALL_HINT}", "problem")
    else:
        yield from _device_findings(backend)
    yield _memory_finding(memory())
    yield _disk_finding(cache_dir)
    yield from snapshot_findings(cache_dir, mac.local_snapshots(cache_dir))


def _system() -> str:
    return f"macOS {mac.version()}" if sys.platform == "darwin" else platform.platform()


def _version(package: str, otherwise: str, *, missing: Mark) -> Finding:
    try:
        return Finding(package, metadata.version(package))
    except metadata.PackageNotFoundError:
        return Finding(package, otherwise, missing)


def _backend() -> ComputeBackend | None:
    """The device's; None if MLX is not installed."""
    from firn import backends

    try:
        return backends.find()
    except ImportError:
        return None


def _device_findings(backend: ComputeBackend) -> Iterator[Finding]:
    from firn.backends.report import report_of

    device = report_of(backend)
    text = f"{device.profile.label}: {device.name}"
    if device.memory_nbytes:
        text += f", {size(device.memory_nbytes)}"
    if device.working_set_nbytes:
        text += f", {size(device.working_set_nbytes)} recommended for one process"
    yield Finding("device", text)
    for topic, more, is_odd in backend.describe(default_cache_dir()):
        yield Finding(topic, more, "note" if is_odd else "ok")
    yield _product_finding()


def _product_finding() -> Finding:
    from firn.backends.product_check import LARGEST_ERROR, product_error

    try:
        error = product_error()
    except RuntimeError as e:  # MLX's
        return Finding("products", f"the device cannot multiply: {e}", "problem")
    if error <= LARGEST_ERROR:
        return Finding("products", f"bfloat16 products are right to {error:.1%} of the largest")
    text = f"bfloat16 products are wrong by {error:.0%}: no reply of this device can be trusted"
    return Finding("products", text, "problem")


def _memory_finding(system: SystemMemory) -> Finding:
    free = "unknown" if system.available is None else size(system.available)
    return Finding("memory", f"{size(system.total)}, {free} available")


def _disk_finding(folder: Path) -> Finding:
    try:
        free = disk_free(folder)
        why = _unusable(folder)
    except OSError as error:
        why = error.strerror or str(error)
    if why:
        text = f"{folder}: {why}. Prompts are kept in memory only; --ssd-cache-dir names another folder"
        return Finding("disk", text, "problem")
    mark: Mark = "note" if free < LOW_DISK_NBYTES else "ok"
    little = ": not much for a cache" if mark == "note" else ""
    return Finding("disk", f"{size(free)} free at {folder}{little}", mark)


def snapshot_findings(folder: Path, snapshots: Sequence[str]) -> Iterator[Finding]:
    if snapshots:
        text = (
            f"{len(snapshots)} local snapshots of Time Machine keep what was deleted from this volume "
            f"since, for a day: what a server writes, up to --ssd-write-budget-gb-per-day, takes space "
            "beside the cache itself. `tmutil thinlocalsnapshots / 20000000000 4` frees it"
        )
        yield Finding("", text, "note" if disk_free(folder) < SNAPSHOT_DISK_NBYTES else "ok")


def _unusable(folder: Path) -> str:
    """Why a server could not keep records here; '' if it could."""
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        return f"{folder} is not a folder"
    return "" if os.access(folder, os.W_OK | os.X_OK) else "it cannot be written to"


# --- the model -----------------------------------------------------------------------------


def model_findings(name: str | None, *, n_stores: int = 0) -> Iterator[Finding]:
    if name is None:
        return
    if name == BUILTIN_MODEL:
        yield Finding("model", f"{name} is built in: nothing to download")
        return
    backend = _backend()
    if backend is None:
        yield Finding("model", f"{name} was not examined: that needs MLX", "note")
        return
    from firn.backends.report import report_of
    from firn.models.load.inspect import inspect_folder, local_folder

    try:
        folder = local_folder(name)
    except SetupError as error:
        yield Finding("model", error.message, "problem")
        return
    if folder is None:
        text = (
            f"{name} was not examined: it is not (completely) on this machine; `firn serve` would "
            "download it"
        )
        yield Finding("model", text, "note")
        return
    device = report_of(backend)
    computes_in = "float32" if device.profile.widened_share else "bfloat16"
    fused = device.profile.fused_head_dims
    report = inspect_folder(folder, fused_head_dims=fused, dtype=computes_in)
    yield from describe_model(report, device, memory(), n_stores=n_stores)
    yield from template_findings(folder)


def template_findings(folder: Path) -> Iterator[Finding]:
    """What the chat template drops or moves as a chat grows; nothing where there is none."""
    from firn.models.load.loader import load_tokenizer
    from firn.text.prompt.template import Template
    from firn.text.prompt.template_losses import losses

    try:
        tokenizer = load_tokenizer(folder)
    except SetupError as error:
        yield Finding("template", f"it was not examined: {error.message}", "note")
        return
    if tokenizer.chat_template is None:
        return
    lost = losses(tokenizer, Template.read(tokenizer))
    if not lost:
        yield Finding("template", "a prompt begins with the one before, and no text is dropped")
    for i, loss in enumerate(lost):
        yield Finding("" if i else "template", loss, "note")


def describe_model(
    report: ModelReport, device: DeviceReport, system: SystemMemory, *, n_stores: int = 0
) -> Iterator[Finding]:
    yield Finding("model", str(report.folder))
    stored_nbytes = report.weights_nbytes
    if report.architecture:
        known = f", supported by {report.library}" if report.library else ""
        yield Finding("architecture", report.architecture + known)
    if report.weights_nbytes:
        files = "1 file" if report.n_files == 1 else f"{report.n_files} files"
        kind = f", {report.dtype}" if report.dtype else ""
        text = f"{size(report.weights_nbytes)} in {files}{kind}"
        report = as_computed(report, device, system)
        if report.weights_nbytes != stored_nbytes:
            text += f"; {size(report.weights_nbytes)} in float32 while it runs (--cpu-dtype)"
        yield Finding("weights", text)
    if report.context_length:
        yield Finding("context", f"{report.context_length} tokens")
    if report.cache:
        yield Finding("cache", _cache_text(report))
    for note in report.notes:
        yield Finding("", note, "note")
    for problem in report.problems:
        yield Finding("", problem, "problem")
    if report.weights_nbytes:
        yield from _budget(report, device, system, n_stores)


def time_model(name: str) -> Iterator[Finding]:
    """Loads the model as a server would, and measures where the time of a chunk and of a step goes."""
    from firn.assembly import model_names
    from firn.backends.contract import BackendOptions
    from firn.models.load import loader
    from firn.models.load.hub import HubRules
    from firn.models.timing import measure

    backend = _backend()
    assert backend is not None
    backend.install(BackendOptions(cache_folder=default_cache_dir(), kernels_folder=kernels_dir()))
    try:
        folder = model_names.resolve(name, HubRules(offline=True))
        loaded = loader.load(folder, served_name=name, form=backend.weights)
        timing = measure(loaded.model, loaded.make_layers, chunk=backend.profile.prefill_chunk)
    except SetupError as error:
        yield Finding("time", error.message, "problem")
        return
    yield Finding("prefill", _time_text(timing.prefill))
    yield Finding("decode", _time_text(timing.decode))


def _time_text(split: TimeSplit) -> str:
    parts = {
        "matrix products": split.products_s,
        "attention": split.attention_s,
        "Python": split.python_s,
        "the rest": split.rest_s,
    }
    shares = ", ".join(f"{name} {s / split.whole_s:.0%}" for name, s in parts.items())
    what = f"a chunk of {split.n_tokens} tokens" if split.n_tokens > 1 else "a step of one row"
    rate = split.n_tokens / split.total_s
    return f"{rate:.0f} tokens/s; {what} takes {split.total_s * 1e3:.1f} ms: {shares}"


def _cache_text(report: ModelReport) -> str:
    cost = report.cache
    assert cost is not None
    parts = [f"{size(cost.per_token_nbytes)} a token"]
    if cost.fixed_nbytes:
        parts.append(f"{size(cost.fixed_nbytes)} fixed")
    if cost.n_window:
        parts.append(f"{cost.n_window} of {cost.n_layers} layers keep a window")
    if cost.n_state:
        parts.append(f"{cost.n_state} of {cost.n_layers} layers keep a state")
    if report.context_length:
        parts.append(f"{size(cost.nbytes(report.context_length))} for a full context")
    return ", ".join(parts)


def _budget(
    report: ModelReport, device: DeviceReport, system: SystemMemory, n_stores: int
) -> Iterator[Finding]:
    """The memory plan of a server with default settings, and the context that it allows."""
    from firn.assembly.memory import with_reservations

    machine = with_reservations(machine_of(device, system))
    model = model_of(report)
    options = MemoryOptions(chunk=device.profile.largest_chunk, n_store_queues=n_stores)
    plan, fits_alone = verdict(machine, model, options)
    topic = "budget"
    for nbytes, text in budget_rows(machine, plan, memory_name=device.profile.memory_name):
        sign = "-" if nbytes < 0 else " "
        yield Finding(topic, f"{sign}{size(abs(nbytes)):>10}  {text}")
        topic = ""
    full = report.context_length or 0
    if not fits_alone:
        most = machine.device_nbytes - plan.headroom_nbytes
        text = (
            f"no: it needs {size(report.weights_nbytes)} and memory for a conversation, but may "
            f"use only {size(most)} of this machine"
        )
        yield Finding("fits", text, "problem")
    elif not plan.fits:
        left = size(plan.limit_nbytes)
        text = f"not alongside what is running now, which leaves {left}: close other programs"
        yield Finding("fits", text, "note")
    elif report.cache is None or report.cache.per_token_nbytes == 0:
        yield Finding("fits", "yes")
    elif full and plan.context_tokens >= full:
        yield Finding("fits", "yes, with a full context")
    else:
        text = f"yes, with memory for about {plan.context_tokens} tokens of context"
        yield Finding("fits", text)
