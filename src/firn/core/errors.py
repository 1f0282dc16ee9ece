"""The error tree. Raised deep, rendered at the edge.

A class carries what the edge needs to render it in any dialect: an HTTP status, a stable machine
code, and the name of the request parameter at fault. Nothing is ever classified by message text.
"""

from __future__ import annotations


class FirnError(Exception):
    """Any fault that firn names. The message is one line that a user can act on."""

    status = 500
    code = "internal_error"
    kind = "server_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


# --- the caller's side ---------------------------------------------------------------------


class BadRequest(FirnError):
    status = 400
    code = "invalid_request"
    kind = "invalid_request_error"


class InvalidValue(BadRequest):
    """A parameter of the wrong type or out of range."""

    code = "invalid_value"

    def __init__(self, param: str, message: str) -> None:
        super().__init__(f"{param}: {message}", param=param)


class BadPart(BadRequest):
    """A part of a message that cannot be had, read or used; `param` names it."""

    code = "invalid_content"

    def __init__(self, param: str, message: str) -> None:
        super().__init__(f"{param}: {message}", param=param)


class BadPicture(BadPart):
    code = "invalid_image"


class BadDocument(BadPart):
    code = "invalid_document"


class ContextTooLong(BadRequest):
    """`estimated`: so many tokens by the prompt's length; it was not worth counting them."""

    code = "context_length_exceeded"

    def __init__(self, n_prompt: int, limit: int, *, estimated: bool = False) -> None:
        about = "about " if estimated else ""
        super().__init__(
            f"This prompt has {about}{n_prompt} tokens; the model's context holds {limit}.",
            param="messages",
        )
        self.n_prompt = n_prompt
        self.limit = limit


class NeverFits(BadRequest):
    """The request would need more memory than this machine can ever free for it."""

    code = "insufficient_memory"

    def __init__(self, need_nbytes: int, have_nbytes: int) -> None:
        super().__init__(
            f"This request needs about {need_nbytes / 2**30:.2f} GiB of device memory; "
            f"at most {have_nbytes / 2**30:.2f} GiB can be made free.",
            param="messages",
        )


class TemplateFailed(BadRequest):
    """The model's chat template refuses these messages."""

    code = "chat_template_error"

    def __init__(self, message: str) -> None:
        super().__init__(f"The model's chat template failed: {message}", param="messages")


class Unauthorized(FirnError):
    status = 401
    code = "invalid_api_key"
    kind = "authentication_error"


class Forbidden(FirnError):
    status = 403
    code = "forbidden"
    kind = "permission_error"


class HostNotAllowed(Forbidden):
    """Sent to a name that is not ours, as a web page does that passes for this server."""

    code = "host_not_allowed"

    def __init__(self, host: str) -> None:
        super().__init__(
            f"This server does not answer to the name {host!r}; --allowed-host would allow it."
        )


class NotFound(FirnError):
    status = 404
    code = "not_found"
    kind = "invalid_request_error"


class ModelNotFound(NotFound):
    code = "model_not_found"

    def __init__(self, name: str, served: str) -> None:
        super().__init__(
            f"The model {name!r} is not served here; this server has {served!r}.", param="model"
        )


class BodyTooLarge(FirnError):
    status = 413
    code = "request_too_large"
    kind = "invalid_request_error"

    def __init__(self, limit_nbytes: int) -> None:
        super().__init__(f"The request body is over the limit of {limit_nbytes} bytes.")


class Cancelled(FirnError):
    """Its caller wants it no more."""

    status = 409
    code = "cancelled"
    kind = "invalid_request_error"

    def __init__(self) -> None:
        super().__init__("The request was cancelled.")


# --- the server's side ---------------------------------------------------------------------


class TryLater(FirnError):
    """Not now; `retry_after_s` from now perhaps."""

    status = 429
    kind = "rate_limit_error"

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QueueFull(TryLater):
    code = "queue_full"

    def __init__(self, n_waiting: int, *, retry_after_s: int = 1) -> None:
        # How many others wait is nobody's business.
        super().__init__(
            "Too many requests are waiting; try again shortly.", retry_after_s=retry_after_s
        )
        self.n_waiting = n_waiting


class KeyLimit(TryLater):
    """This key has what one key may have at a time."""

    code = "rate_limit_exceeded"


class Crowded(TryLater):
    """Connections or memory for requests run short."""

    status = 503
    code = "overloaded"
    kind = "server_error"


class TooManyRequests(TryLater):
    """A client has had its share of this minute."""

    code = "rate_limit_exceeded"

    def __init__(self, per_minute: int, *, retry_after_s: int) -> None:
        super().__init__(
            f"More than {per_minute} requests in a minute; try again in {retry_after_s} s.",
            retry_after_s=retry_after_s,
        )


class TimedOut(FirnError):
    status = 504
    code = "timeout"

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"The request took longer than {limit_s:g} s, which is the limit here.")


class ShuttingDown(FirnError):
    status = 503
    code = "shutting_down"

    def __init__(self) -> None:
        super().__init__("The server is shutting down.")


class EngineDead(FirnError):
    status = 503
    code = "engine_dead"

    def __init__(self) -> None:
        super().__init__("The engine has stopped; the server is about to restart.")


class DeviceFailing(FirnError):
    """The device fails again and again: only a new process can help."""

    status = 503
    code = "device_failing"

    def __init__(self, n_faults: int) -> None:
        super().__init__(f"The device has failed {n_faults} times; the server is about to restart.")


class StepFailed(FirnError):
    """An exception inside the model ended this request; others go on."""

    code = "generation_failed"


# --- several models ------------------------------------------------------------------------


class ModelNotReady(TryLater):
    """It is not loaded, and waiting for it took too long or too many do."""

    status = 503
    code = "model_not_ready"
    kind = "server_error"


class ModelFailed(TryLater):
    """It could not be loaded; `retry_after_s` from now it is tried again."""

    status = 503
    code = "model_failed"
    kind = "server_error"

    def __init__(self, name: str, why: str, *, retry_after_s: int = 1) -> None:
        super().__init__(f"The model {name!r} cannot be loaded: {why}", retry_after_s=retry_after_s)
        self.why = why


class ModelDied(TryLater):
    """Its process ended while it was needed; a new one is started."""

    status = 503
    code = "model_died"
    kind = "server_error"

    def __init__(self, name: str) -> None:
        super().__init__(f"The process of the model {name!r} has ended; it is started again.")


class ModelTooLarge(FirnError):
    """More than all memory that models may have."""

    status = 503
    code = "insufficient_memory"

    def __init__(self, name: str, need_nbytes: int, budget_nbytes: int) -> None:
        super().__init__(
            f"The model {name!r} needs about {need_nbytes / 2**30:.2f} GiB; all models together "
            f"may take {budget_nbytes / 2**30:.2f} GiB (--model-memory-gb).",
            param="model",
        )


# --- start-up ------------------------------------------------------------------------------


class SetupError(FirnError):
    """Cannot start: a bad model folder, flag, file or key. One line, exit code 1."""

    code = "setup_error"


class UnknownCacheLayer(FirnError):
    """No codec knows this layer class: reuse is switched off for the model."""

    code = "unknown_cache_layer"
