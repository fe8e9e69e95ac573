"""The error format of an HTTP front, and the errors that this package raises itself.

An exception becomes an :class:`ErrorInfo` (:mod:`.describe`), and an :class:`ErrorFormat` turns that into bytes: the
default is the format of OpenAI's API, so its clients understand every front built here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mlsys_core.errors import ServingError
from pydantic import BaseModel, Field


class HttpError(ServingError):
    """An error with its HTTP status; raise it, or any ``MlsysError`` with the same attributes, in a handler.

    Args:
        message: what was wrong and what to do, for the client; cut at 1000 characters.
        http_status: 400 to 599.
        error_code: a short name that programs can compare; None: the status's usual one.
        param: the field of the request that was wrong.
        headers: added to the response.

    Example:
        >>> HttpError("model 'x' is not loaded", http_status=404, error_code="model_not_found").http_status
        404
    """

    def __init__(
        self,
        message: str,
        *,
        http_status: int,
        error_code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.http_status = http_status
        self.error_code = error_code
        self.param = param
        self.http_headers = dict(headers or {})


class ClientDisconnectedError(HttpError):
    """The client went away before its response was complete; nobody reads further output."""

    def __init__(self) -> None:
        super().__init__("the client closed the connection", http_status=499, error_code="client_disconnected")


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorInfo:
    """One error as a client may see it: no stack, no file names, bounded in length."""

    status: int  # HTTP status, 400 to 599
    type: str  # class of error in OpenAI's words, e.g. "invalid_request_error"
    code: str  # the error itself, e.g. "body_too_large"
    message: str  # at most MAX_MESSAGE_CHARS characters
    param: str | None = None  # the offending field, e.g. "messages.0.content"
    request_id: str | None = None
    path: str = ""  # of the request; lets one format serve fronts with different shapes
    headers: tuple[tuple[str, str], ...] = ()  # of the response, beside the content type


class ErrorDetail(BaseModel):
    """Details of one error."""

    type: str = Field(description="Class of error, e.g. `invalid_request_error`, `server_error`")
    code: str = Field(description="The error itself, e.g. `body_too_large`")
    message: str = Field(description="What was wrong and what to do about it")
    param: str | None = Field(description="The field of the request that was wrong, if it is known")
    request_id: str | None = Field(description="The request's id, also in the header `x-request-id`")


class ErrorResponse(BaseModel):
    """The body of every response with a status of 400 or more."""

    error: ErrorDetail


def openai_body(info: ErrorInfo) -> dict[str, object]:
    """Return the default body: ``{"error": {"type", "code", "message", "param", "request_id"}}``."""
    return {
        "error": {
            "type": info.type,
            "code": info.code,
            "message": info.message,
            "param": info.param,
            "request_id": info.request_id,
        }
    }


def stream_event(body: Mapping[str, object], content_type: str) -> bytes | None:
    """Return the last event of a broken stream; None: its type has no such event.

    An SSE ``data:`` line or an ND-JSON line.
    """
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type == "text/event-stream":
        return b"data: " + to_json(body) + b"\n\n"
    if media_type in ("application/x-ndjson", "application/jsonl", "application/json-lines"):
        return to_json(body) + b"\n"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorFormat:
    """The format of a front's errors.

    Example:
        >>> triton = ErrorFormat(body=lambda info: {"error": info.message})
        >>> triton.body(ErrorInfo(status=400, type="t", code="c", message="no such model"))
        {'error': 'no such model'}
    """

    body: Callable[[ErrorInfo], Mapping[str, object]] = openai_body
    model: type[BaseModel] = ErrorResponse  # documents ``body`` in OpenAPI
    event: Callable[[Mapping[str, object], str], bytes | None] = stream_event  # (body, content type) -> last bytes


def to_json(body: Mapping[str, object]) -> bytes:
    """Return ``body`` as ASCII JSON; never fail on the text of a message, lone surrogates included."""
    return json.dumps(body, separators=(",", ":")).encode("ascii")
