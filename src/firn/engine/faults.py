"""What went wrong with a request: whose fault it may be, and what its client is told."""

from __future__ import annotations

import logging

from firn.core.errors import FirnError, StepFailed
from firn.core.values import Job

log = logging.getLogger("firn.engine")


def may_be_the_devices(error: Exception) -> bool:
    """MLX raises a device fault as a RuntimeError, perhaps late, in whatever uses the device next."""
    return isinstance(error, RuntimeError | MemoryError)


def client_error(job: Job, error: Exception) -> FirnError:
    """The error as the client is told it; one that firn has no name for is logged in full."""
    if isinstance(error, FirnError):
        return error
    log.warning("request %s failed: %r", job.id, error, exc_info=error)
    return StepFailed(f"The model failed on this request: {error}")
