"""Errors below ``/v1/messages``, in Anthropic's shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from mlsys_serving.http.errors import ErrorFormat, ErrorInfo, stream_event
from pydantic import BaseModel

MESSAGES_PATH = "/v1/messages"
# Anthropic's classes of errors by HTTP status; every other status is one of the two of `_error_type`.
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class MessagesErrorDetail(BaseModel):
    """Class and text of an error."""

    type: str
    message: str


class MessagesError(BaseModel):
    """The body of an error of ``/v1/messages``."""

    type: Literal["error"] = "error"
    error: MessagesErrorDetail
    request_id: str | None


def error_body(info: ErrorInfo) -> Mapping[str, object]:
    """Return the body of an error.

    Example:
        >>> error_body(ErrorInfo(status=404, type="t", code="c", message="no such model", path="/v1/messages"))
        {'type': 'error', 'error': {'type': 'not_found_error', 'message': 'no such model'}, 'request_id': None}
    """
    detail = MessagesErrorDetail(type=_error_type(info.status), message=info.message)
    return MessagesError(error=detail, request_id=info.request_id).model_dump()


def error_event(body: Mapping[str, object], content_type: str) -> bytes | None:
    """Return the last event of a broken stream, which has a name here."""
    event = stream_event(body, content_type)
    return b"event: error\n" + event if event is not None and event.startswith(b"data: ") else event


def _error_type(status: int) -> str:
    return _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")


MESSAGES_FORMAT = ErrorFormat(body=error_body, model=MessagesError, event=error_event)
MESSAGES_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": MessagesError, "description": "The request cannot be served as it is"},
    "5XX": {"model": MessagesError, "description": "The server could not serve the request"},
}
