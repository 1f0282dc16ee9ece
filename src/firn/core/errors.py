"""The error tree. Raised deep, rendered at the edge.

A class carries what the edge needs to render it in any dialect: an HTTP status, a stable machine
code, and the name of the request parameter at fault. Nothing is ever classified by message text.
"""

from __future__ import annotations

from firn.core.units import GIB


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
    """A part of a message that cannot be fetched, read or used; `param` names it."""

    code = "invalid_content"

    def __init__(self, param: str, message: str) -> None:
        super().__init__(f"{param}: {message}", param=param)


class BadPicture(BadPart):
    code = "invalid_image"


class BadDocument(BadPart):
    code = "invalid_document"


class ContextTooLong(BadRequest):
    """estimated: from the prompt's length in bytes, without tokenizing it.

    Clients compact a conversation when they read "maximum context length is", in OpenAI's words.
    """

    code = "context_length_exceeded"

    def __init__(self, n_prompt: int, limit: int, *, estimated: bool = False) -> None:
        about = "about " if estimated else ""
        super().__init__(
            f"This model's maximum context length is {limit} tokens, but the prompt has "
            f"{about}{n_prompt} tokens. Please shorten it.",
            param="messages",
        )
        self.n_prompt = n_prompt
        self.limit = limit


class NeverFits(BadRequest):
    """The request needs more memory than this machine can ever free for it."""

    code = "insufficient_memory"

    def __init__(self, need_nbytes: int, have_nbytes: int) -> None:
        super().__init__(
            f"This request needs about {need_nbytes / GIB:.2f} GiB of device memory, but only "
            f"{have_nbytes / GIB:.2f} GiB can be freed. Shorten the prompt or ask for fewer "
            "replies.",
            param="messages",
        )


class GrammarFailed(BadRequest):
    """A reply could not be held to its grammar any longer: it takes too much time or memory."""

    code = "grammar_failed"

    def __init__(self, param: str, why: str) -> None:
        super().__init__(
            f"{param}: the reply could not be held to this grammar ({why}); use a simpler one.",
            param=param,
        )


class TemplateFailed(BadRequest):
    """The model's chat template refuses these messages."""

    code = "chat_template_error"

    def __init__(self, message: str) -> None:
        super().__init__(f"The model's chat template failed: {message}", param="messages")


class TemplateTooSlow(TemplateFailed):
    """Rendering these messages takes too long: it is not tried in another form."""


class Unauthorized(FirnError):
    status = 401
    code = "invalid_api_key"
    kind = "authentication_error"


class Forbidden(FirnError):
    status = 403
    code = "forbidden"
    kind = "permission_error"


class HostNotAllowed(Forbidden):
    """The Host header names another server: a web page may be rebinding its name to this one."""

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
    """The caller cancelled it."""

    status = 409
    code = "cancelled"
    kind = "invalid_request_error"

    def __init__(self) -> None:
        super().__init__("The request was cancelled.")


# --- the server's side ---------------------------------------------------------------------


class TryLater(FirnError):
    """Refused for now; the caller may try again after `retry_after_s`."""

    status = 429
    kind = "rate_limit_error"

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QueueFull(TryLater):
    code = "queue_full"

    def __init__(self, *, retry_after_s: int = 1) -> None:
        # The message omits how many are waiting: that would tell a caller about others.
        super().__init__(
            "Too many requests are waiting; try again shortly.", retry_after_s=retry_after_s
        )


class KeyLimit(TryLater):
    """This key has reached its own limit."""

    code = "rate_limit_exceeded"


class Overloaded(TryLater):
    """The server is short of connections, or of memory for request bodies."""

    status = 503
    code = "overloaded"
    kind = "server_error"


class TooManyRequests(TryLater):
    """A client has used up its requests for this minute."""

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
    """The device keeps failing: only a new process can help."""

    status = 503
    code = "device_failing"

    def __init__(self, n_faults: int) -> None:
        super().__init__(f"The device has failed {n_faults} times; the server is about to restart.")


class StepFailed(FirnError):
    """An exception inside the model ended this request; others continue."""

    code = "generation_failed"


# --- several models ------------------------------------------------------------------------


class ModelNotReady(TryLater):
    """The model is not loaded, and the wait was too long or too many requests are waiting."""

    status = 503
    code = "model_not_ready"
    kind = "server_error"


class ModelFailed(TryLater):
    """The model could not be loaded; the next attempt is due in `retry_after_s`."""

    status = 503
    code = "model_failed"
    kind = "server_error"

    def __init__(self, name: str, why: str, *, retry_after_s: int = 1) -> None:
        super().__init__(f"The model {name!r} cannot be loaded: {why}", retry_after_s=retry_after_s)
        self.why = why


class ModelDied(TryLater):
    """The model's process ended while it was needed; a new one is started."""

    status = 503
    code = "model_died"
    kind = "server_error"

    def __init__(self, name: str) -> None:
        super().__init__(
            f"The process of the model {name!r} has ended and is being restarted; try again shortly."
        )


class ModelTooLarge(FirnError):
    """The model alone needs more memory than all models together may use."""

    status = 503
    code = "insufficient_memory"

    def __init__(self, name: str, need_nbytes: int, budget_nbytes: int) -> None:
        super().__init__(
            f"The model {name!r} needs about {need_nbytes / GIB:.2f} GiB; all models together "
            f"may use {budget_nbytes / GIB:.2f} GiB (--model-memory-gb).",
            param="model",
        )


# --- start-up ------------------------------------------------------------------------------


class SetupError(FirnError):
    """Cannot start: a bad model folder, flag, file or key. One line, exit code 1."""

    code = "setup_error"


class UnknownCacheLayer(FirnError):
    """No codec knows this layer class, so nothing is reused for the model."""

    code = "unknown_cache_layer"


class TokensNotHeld(FirnError):
    """A row cannot be cut there: its layers have overwritten these tokens, or may take them back."""

    code = "tokens_not_held"

    def __init__(self, start: int, end: int, *, first: int, n_tokens: int) -> None:
        super().__init__(
            f"tokens [{start}, {end}) cannot be cut out of a row that holds [{first}, {n_tokens})"
        )


class RowInDoubt(FirnError):
    """A decode step of the row's group has failed, so nothing is cut out of it."""

    code = "row_in_doubt"


# --- the device ----------------------------------------------------------------------------


def may_be_device_fault(error: Exception) -> bool:
    """Whether the error may be a fault of the device.

    MLX raises those as RuntimeErrors, sometimes late, in whatever uses the device next. Each is
    raised only once, so code that catches one must pass it on.
    """
    return isinstance(error, RuntimeError | MemoryError)


OUT_OF_MEMORY = ("out of memory", "outofmemory", "insufficient memory", "unable to allocate")
"""As worded by CUDA, Metal and MLX's allocator."""


def is_out_of_memory(error: Exception) -> bool:
    message = str(error).lower()
    return isinstance(error, MemoryError) or any(phrase in message for phrase in OUT_OF_MEMORY)
