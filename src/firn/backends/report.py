"""A device as `firn doctor` describes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from firn.backends.contract import ComputeBackend
from firn.backends.profile import DeviceProfile


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """name: as the driver says it. memory_nbytes: None if the driver does not say. working_set_nbytes:
    what the driver recommends for one process; None if it does not say."""

    profile: DeviceProfile
    name: str
    memory_nbytes: int | None
    working_set_nbytes: int | None


def report_of(backend: ComputeBackend) -> DeviceReport:
    info: Mapping[str, Any] = mx.device_info()
    return DeviceReport(
        backend.profile,
        str(info.get("device_name", "unknown")),
        info.get("memory_size") or info.get("total_memory"),
        info.get("max_recommended_working_set_size"),
    )
