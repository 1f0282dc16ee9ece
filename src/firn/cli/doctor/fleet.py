"""`firn doctor` for several models: each by itself, and all of them against the machine's memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from firn.cli.doctor.examine import machine_findings, print_findings
from firn.cli.doctor.findings import Finding
from firn.cli.doctor.store import store_findings
from firn.cli.terminal import plain_console, size
from firn.config import Config, default_cache_dir
from firn.core.errors import SetupError
from firn.core.units import GIB
from firn.fleet.catalogue import ModelCatalogue, ModelSpec
from firn.fleet.files import check, folder_of
from firn.fleet.memory import Footprint, Room, estimate, room


def doctor_fleet(config: Config, *, cache_dir: Path | None = None) -> int:
    """Prints the findings; returns 1 if one is a problem."""
    console = plain_console(soft_wrap=False)
    findings = [*machine_findings(cache_dir or default_cache_dir())]
    findings += store_findings(config.cache.tiers)
    findings += fleet_findings(config)
    print_findings(findings, console)
    return int(any(finding.mark == "problem" for finding in findings))


def fleet_findings(config: Config, memory: Room | None = None) -> Iterator[Finding]:
    """memory: what the machine has left; measured if None."""
    try:
        catalogue = ModelCatalogue(config)
    except SetupError as error:
        yield Finding("models", error.message, "problem")
        return
    memory = memory or room(int(config.fleet.model_memory_gb * GIB))
    needs: list[tuple[ModelSpec, Footprint]] = []
    for spec in catalogue:
        try:
            check(spec)
        except SetupError as error:
            yield Finding(spec.name, error.message, "problem")
            continue
        folder = folder_of(spec)
        footprint = estimate(folder)
        needs.append((spec, footprint))
        yield _model_finding(spec, folder, footprint, memory)
    yield from _together(needs, memory)


def _model_finding(
    spec: ModelSpec, folder: Path | None, footprint: Footprint, memory: Room
) -> Finding:
    pinned = ", pinned" if spec.pinned else ""
    if folder is None:
        return Finding(spec.name, f"{spec.path} is not on this machine yet{pinned}", "note")
    text = (
        f"about {size(footprint.nbytes)} while it is loaded, {size(footprint.weights_nbytes)} of it "
        f"weights{pinned}"
    )
    if footprint.nbytes > memory.budget_nbytes:
        text += f": more than the {size(memory.budget_nbytes)} that models may use"
        return Finding(spec.name, text, "problem")
    return Finding(spec.name, text)


def _together(needs: list[tuple[ModelSpec, Footprint]], memory: Room) -> Iterator[Finding]:
    total = sum(footprint.nbytes for _, footprint in needs)
    pinned = sum(footprint.nbytes for spec, footprint in needs if spec.pinned)
    budget = f"models may use {size(memory.budget_nbytes)}"
    if pinned > memory.budget_nbytes:
        text = f"the pinned ones need {size(pinned)}; {budget} (--model-memory-gb)"
        yield Finding("together", text, "problem")
    elif total > memory.budget_nbytes:
        text = (
            f"{size(total)}; {budget}: not all are loaded together, idle ones make room for others"
        )
        yield Finding("together", text, "note")
    else:
        yield Finding("together", f"{size(total)}; {budget}: all fit together")
    largest = max((footprint.nbytes for _, footprint in needs), default=0)
    if largest > memory.free_nbytes:
        text = f"{size(int(memory.free_nbytes))} is available now, and the largest needs {size(largest)}"
        yield Finding("", f"{text}: close other programs", "note")
