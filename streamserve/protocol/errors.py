"""Every error that a client can get: one tree, each with a status, a code and a message safe to show.

    StreamserveError
    ├── BadRequest 400             the request is wrong; `param` names the field
    │   ├── PromptTooLong 400      the prompt leaves no room for an answer
    │   └── NoChatTemplate 400     the model has no chat template; send `prompt`
    ├── Unauthorized 401           no or wrong credentials
    ├── Forbidden 403              known caller, not allowed
    ├── NotFound 404               unknown model, stream or route (another tenant's too)
    ├── MethodNotAllowed 405
    ├── RequestTimeout 408         the body did not arrive in time
    ├── NotFinished 409            the answer is asked for as a whole, and is still being made
    ├── Answered 409               an interrupted run was continued before
    ├── Gone 410                   the stream's events have expired
    ├── TooLarge 413               body over the limit
    ├── UnsupportedMedia 415       not JSON, or compressed
    ├── ProducerLost 500           the process that made the answer is gone
    ├── KeyReused 422              an Idempotency-Key was sent before, with another body
    ├── Cancelled 499              stopped or abandoned before a whole answer was there
    ├── TimedOut 504               the request's own timeout_seconds ran out
    ├── StorageFull 507            the caller's files take all the room they may
    └── Refused 429/503/507        the caller's quota, or the server's capacity; carries retry_after
        ├── QuotaExceeded 429
        ├── Overloaded 503
        ├── DiskFull 507           the server's disk has no room for an upload
        ├── DatabaseUnavailable 503  the site's database is locked, or cannot be reached
        ├── SiteMisconfigured 503  the site's settings are wrong, or its folder cannot be used
        ├── RuleFailed 503         a function of the site, PERMISSION or TENANT, failed
        ├── UnmetNeeds 503         the request needs what this release lacks; a newer process has it
        ├── EngineUnavailable 503  the engine is loading, failed or gone
        └── CannotContinue 503     an answer that was cut off here has to be asked for again

Pure values: no I/O, no framework. Exception text of other libraries never reaches a message; it is logged instead.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from streamserve.protocol.engine import Park

_MAX_SHOWN_CHARS = 100  # of a caller's text


class StreamserveError(Exception):
    """An error with a place in the catalogue. `message` is shown to the client as it is."""

    http_status = 500
    code = "internal_error"
    is_retryable = False  # as the `error` event of an answer that has begun

    def __init__(self, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class BadRequest(StreamserveError):
    """The request itself is wrong; sending it again cannot help."""

    http_status = 400
    code = "invalid_request"


class PromptTooLong(BadRequest):
    """The prompt is more than this model or its memory can ever hold beside a token of an answer."""

    code = "context_length_exceeded"


class NoChatTemplate(BadRequest):
    """Messages were sent to a model that has no chat template."""

    code = "no_chat_template"


class Unauthorized(StreamserveError):
    """No credentials, or credentials that are not known here."""

    http_status = 401
    code = "unauthorized"


class Forbidden(StreamserveError):
    """The caller is known and may not do this."""

    http_status = 403
    code = "forbidden"


class NotFound(StreamserveError):
    """This caller may see no thing with this name."""

    http_status = 404
    code = "not_found"


class MethodNotAllowed(StreamserveError):
    """The route exists, this verb does not."""

    http_status = 405
    code = "method_not_allowed"


class RequestTimeout(StreamserveError):
    """The request did not arrive in time."""

    http_status = 408
    code = "request_timeout"


class NotFinished(StreamserveError):
    """The answer is asked for as a whole, and is still being made. Ask again."""

    http_status = 409
    code = "answer_running"


class Answered(StreamserveError):
    """The interrupted run has its user's answer already, and goes on by that."""

    http_status = 409
    code = "approval_answered"


class Gone(StreamserveError):
    """The stream existed, its events are no longer kept."""

    http_status = 410
    code = "stream_expired"


class TooLarge(StreamserveError):
    """The body is over the limit."""

    http_status = 413
    code = "body_too_large"


class UnsupportedMedia(StreamserveError):
    """The body is compressed, or not JSON by its content type."""

    http_status = 415
    code = "unsupported_media_type"


class ProducerLost(StreamserveError):
    """The process that made the answer is gone, and no other can continue it."""

    code = "producer_lost"
    is_retryable = True


class KeyReused(StreamserveError):
    """An Idempotency-Key belongs to the body that it came with first."""

    http_status = 422
    code = "idempotency_key_reused"


class Cancelled(StreamserveError):
    """The stream was stopped or abandoned. 499 is nginx's status: SDKs do not send the request again."""

    http_status = 499
    code = "cancelled"


class TimedOut(StreamserveError):
    """The request's own timeout_seconds ran out."""

    http_status = 504
    code = "timeout"


class StorageFull(StreamserveError):
    """The files of the caller's tenant take all the room that they may."""

    http_status = 507
    code = "storage_full"


class Refused(StreamserveError):
    """The request may be sent again later. `retry_after` is whole seconds, 1 to 120 (SDKs ignore longer waits)."""

    http_status = 503
    code = "overloaded"
    is_retryable = True

    def __init__(
        self, message: str, *, code: str | None = None, param: str | None = None, retry_after: int = 1
    ) -> None:
        super().__init__(message, code=code, param=param)
        self.retry_after = max(1, min(120, retry_after))


class QuotaExceeded(Refused):
    """The caller's own limit (streams, requests, tokens) is reached."""

    http_status = 429
    code = "quota_exceeded"


class Overloaded(Refused):
    """The server's capacity is reached."""


class DiskFull(Refused):
    """The server's disk has no room for what is uploaded."""

    http_status = 507
    code = "insufficient_storage"


class DatabaseUnavailable(Refused):
    """The site's database is locked, or cannot be reached. Nothing was begun, or its end is not known."""

    code = "database_unavailable"

    def __init__(self, message: str, *, retry_after: int = 2) -> None:
        super().__init__(message, retry_after=retry_after)


class SiteMisconfigured(Refused):
    """The site's settings are wrong, or its folder cannot be used: nothing is answered until that is mended."""

    code = "site_misconfigured"

    def __init__(self, message: str, *, retry_after: int = 120) -> None:
        super().__init__(message, retry_after=retry_after)


class RuleFailed(Refused):
    """A function of the site that decides about callers failed; nothing is served by a guess."""

    code = "rule_failed"


class UnmetNeeds(Refused):
    """The request names a need that this release does not know: a newer process made it."""

    code = "unmet_needs"


class EngineUnavailable(Refused):
    """The engine is loading, has failed, or is being replaced.

    `lost`: it ended in a step that held the request, before its asker knew that it had taken it.
    """

    code = "engine_unavailable"
    lost: Park | None = None


class CannotContinue(Refused):
    """The answer was cut off, and its engine cannot continue it where it was."""

    code = "cannot_continue"


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorBody:
    """The fields of every error response, whatever the dialect. `request_id` is "" for an error in mid-stream."""

    code: str
    message: str
    param: str | None = None
    http_status: int = 500
    request_id: str = ""


def error_for(code: str, message: str, *, retryable: bool = False) -> StreamserveError:
    """Return the error that a stream's `error` event, or its `cancelled` end, stands for."""
    known: dict[str, type[StreamserveError]] = {
        "abandoned": Cancelled,
        "never_fits": PromptTooLong,
        **{cls.code: cls for cls in (PromptTooLong, NoChatTemplate, Cancelled, TimedOut, QuotaExceeded)},
    }
    return known.get(code, EngineUnavailable if retryable else StreamserveError)(message, code=code)


def no_stream() -> NotFound:
    """Return the error for an id that names no stream of the caller's, whatever it looks like."""
    message = "There is no stream of that id. X-Stream-Id of the answer, or `started`, has it: 32 hex digits."
    return NotFound(message, code="stream_not_found", param="id")


def no_model(alias: str, known: Iterable[str]) -> NotFound:
    """Return the error for a model that is not served; `known` are those that the caller may use."""
    names = ", ".join(known)
    serves = f"It serves: {names}." if names else "There is none that you may use."
    message = f"There is no model {alias[:_MAX_SHOWN_CHARS]!r} here. {serves}"
    return NotFound(message, code="model_not_found", param="model")


def headers_of(error: StreamserveError) -> dict[str, str]:
    """Return the headers that a response of this error carries."""
    if isinstance(error, Refused):
        return {"Retry-After": str(error.retry_after)}
    return {"WWW-Authenticate": "Bearer"} if isinstance(error, Unauthorized) else {}


def to_body(error: StreamserveError, request_id: str = "") -> ErrorBody:
    """Return the fields to show for `error`."""
    return ErrorBody(
        code=error.code,
        message=error.message,
        param=error.param,
        http_status=error.http_status,
        request_id=request_id,
    )
