"""What the client of a failed request is told."""

from __future__ import annotations

import logging

from firn.core.errors import FirnError, StepFailed
from firn.core.values import Job

log = logging.getLogger("firn.engine")


def client_error(job: Job, error: Exception) -> FirnError:
    """The error to send to the client. One that firn has no name for is logged with its traceback."""
    if isinstance(error, FirnError):
        return error
    log.warning("request %s failed: %r", job.id, error, exc_info=error)
    return StepFailed(f"The model failed on this request: {error}")
