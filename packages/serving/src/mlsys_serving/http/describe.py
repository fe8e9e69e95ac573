"""Convert a request's exception into the :class:`ErrorInfo` for its client, and that into the app's format."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from http import HTTPStatus
from typing import Any

from fastapi.exceptions import RequestValidationError
from mlsys_core.errors import InvalidInputError, MlsysError, ServingError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mlsys_serving.http.errors import ClientDisconnectedError, ErrorFormat, ErrorInfo, HttpError, to_json
from mlsys_serving.http.record import request_id_of

MAX_MESSAGE_CHARS = 1000
_MAX_FIELDS = 5  # problems named in one message
_MAX_FIELD_CHARS = 120  # of one problem's field path, and of its reason: both may hold text the client sent
_MAX_OWN_CHARS = 300  # of a reason that a validator of ours gives

# HTTP status: (type, code). OpenAI's vocabulary where it has one.
_KINDS: dict[int, tuple[str, str]] = {
    400: ("invalid_request_error", "bad_request"),
    401: ("authentication_error", "invalid_api_key"),
    403: ("permission_error", "permission_denied"),
    413: ("invalid_request_error", "body_too_large"),
    422: ("invalid_request_error", "invalid_value"),
    429: ("rate_limit_error", "rate_limited"),
    500: ("server_error", "internal_error"),
    503: ("server_error", "unavailable"),
    504: ("server_error", "deadline_exceeded"),
}


def describe(error: BaseException, *, validation_status: int = 422) -> ErrorInfo:
    """Return the part of ``error`` that the client may see.

    ``MlsysError`` classes choose by attributes: ``http_status`` (an int from 400 to 599), and if they like
    ``error_code``, ``param``, ``http_headers`` (a mapping) and ``retry_after_s``. Without ``http_status``,
    ``InvalidInputError`` is 400, ``ServingError`` 500 with its message (503 if it has ``retry_after_s``), and all else
    500 without one.

    Example:
        >>> describe(InvalidInputError("top_k is 1 or more, got 0")).status
        400
        >>> describe(KeyError("secret")).message
        'the server failed on this request; its operator finds the reason in the log under the request id'
    """
    error = unwrap(error)
    if isinstance(error, RequestValidationError):
        from mlsys_serving.http.unions import without_branches

        return _from_validation(without_branches(error.errors(), error.body), validation_status)
    if isinstance(error, HTTPException):
        return _from_http_exception(error)
    if isinstance(error, MlsysError):
        return _from_mlsys_error(error)
    return _info(500, None)


def refused_body(error: ValidationError, body: Any, *, validation_status: int = 400) -> ErrorInfo:
    """Return what a client may see of the reasons for which ``body`` does not fit its model."""
    errors = [{**entry, "loc": ("body", *entry["loc"])} for entry in error.errors(include_url=False)]
    return describe(RequestValidationError(errors, body=body), validation_status=validation_status)


def unwrap(error: BaseException) -> BaseException:
    """Return the relevant error inside those that frameworks wrap around it."""
    while True:
        cause = error.__cause__
        if isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        elif isinstance(error, HTTPException) and error.status_code == 400 and isinstance(cause, HttpError):
            error = cause  # FastAPI: answers 400 for whatever reading the body raised
        elif isinstance(error, HTTPException) and error.status_code == 400 and isinstance(cause, UnicodeDecodeError):
            return HttpError("the body is not valid UTF-8", http_status=400, error_code="invalid_encoding")
        elif isinstance(error, ClientDisconnect) or isinstance(cause, ClientDisconnect):
            return ClientDisconnectedError()  # while its body was read
        elif isinstance(error, RuntimeError) and isinstance(cause, HTTPException | RequestValidationError):
            error = cause  # Starlette: raised by a handler whose response had started
        else:
            return error


def _info(status: int, message: str | None, **fields: Any) -> ErrorInfo:
    default = HTTPStatus(status).name.lower() if status in HTTPStatus._value2member_map_ else f"http_{status}"
    kind, code = _KINDS.get(status, ("invalid_request_error" if status < 500 else "server_error", default))
    if message is None:
        message = "the server failed on this request; its operator finds the reason in the log under the request id"
    fields = {name: value for name, value in fields.items() if value is not None}
    return replace(ErrorInfo(status=status, type=kind, code=code, message=_cut(message, MAX_MESSAGE_CHARS)), **fields)


def _from_mlsys_error(error: MlsysError) -> ErrorInfo:
    status = getattr(error, "http_status", None)
    retry_after_s = getattr(error, "retry_after_s", None)
    if not isinstance(status, int) or not 400 <= status <= 599:
        if isinstance(error, InvalidInputError):
            status = 400
        elif isinstance(error, ServingError):
            status = 500 if retry_after_s is None else 503  # its message is written for the client
        else:
            return _info(500, None)
    headers = dict(getattr(error, "http_headers", None) or {})
    if retry_after_s is not None:
        headers.setdefault("Retry-After", str(max(1, math.ceil(retry_after_s))))
    code = getattr(error, "error_code", None)
    if code is None and isinstance(error, InvalidInputError) and status == 400:
        code = "invalid_value"
    return _info(
        status, str(error), code=code, param=getattr(error, "param", None), headers=tuple(headers.items()) or None
    )


def _from_http_exception(error: HTTPException) -> ErrorInfo:
    detail: Any = error.detail
    fields: Mapping[str, Any] = detail if isinstance(detail, Mapping) else {"message": detail}
    message = fields.get("message")
    if not isinstance(message, str) or not message:
        message = None if error.status_code >= 500 else f"refused with status {error.status_code}"
    elif error.status_code in (404, 405) and message == HTTPStatus(error.status_code).phrase:
        message = _NO_ROUTE[error.status_code]
    chosen = {name: fields[name] for name in ("type", "code", "param") if isinstance(fields.get(name), str)}
    return _info(error.status_code, message, headers=tuple((error.headers or {}).items()) or None, **chosen)


_NO_ROUTE = {
    404: "there is nothing at this path; /openapi.json lists what there is",
    405: "this path does not take this method; the header 'allow' names those it takes",
}


def _from_validation(errors: Sequence[Any], status: int) -> ErrorInfo:
    first: Mapping[str, Any] = errors[0] if errors else {}
    loc = tuple(first.get("loc", ()))
    if first.get("type") == "json_invalid":
        where = f" at character {loc[1]}" if len(loc) > 1 else ""
        reason = (first.get("ctx") or {}).get("error", "")
        return _info(
            400, f"the body is not valid JSON: {_cut(str(reason), _MAX_FIELD_CHARS)}{where}", code="malformed_json"
        )
    named = [_problem(e) for e in errors[:_MAX_FIELDS]]
    more = f"; and {len(errors) - _MAX_FIELDS} more" if len(errors) > _MAX_FIELDS else ""
    param = getattr(_own(first), "param", None)  # of a validator that knows the field, beside the object it is in
    dotted = _dotted((*loc[1:], param) if isinstance(param, str) else loc[1:])
    return _info(status, "; ".join(named) + more, code="invalid_value", param=dotted or None)


def _problem(error: Mapping[str, Any]) -> str:
    loc = tuple(error.get("loc", ()))
    is_of_the_body = loc == ("body",) and _own(error) is not None
    return _reason(error) if is_of_the_body else f"{_field_path(loc)}: {_reason(error)}"


def _own(error: Mapping[str, Any]) -> Any:
    """Return the exception that a validator raised; None: the schema itself found the problem."""
    return (error.get("ctx") or {}).get("error") if error.get("type") == "value_error" else None


def _reason(error: Mapping[str, Any]) -> str:
    if (own := _own(error)) is not None:
        return _cut(str(own), _MAX_OWN_CHARS)
    if error.get("type") == "extra_forbidden":
        return "there is no such field"
    reason = _cut(str(error.get("msg", "")), _MAX_FIELD_CHARS)
    if isinstance(error.get("input"), bytes):
        reason += " (JSON is only read as such with 'content-type: application/json')"
    return reason


def _field_path(loc: tuple[Any, ...]) -> str:
    """Return a field's path as text: ``('body', 'a', 0)`` as ``a.0``; ``('query', 'a')`` as ``query a``."""
    source, field = str(loc[0]) if loc else "request", _dotted(loc[1:])
    return (field or source) if source == "body" else f"{source} {field}".strip()


def _dotted(parts: tuple[Any, ...]) -> str:
    return _cut(".".join(map(str, parts)), _MAX_FIELD_CHARS)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


_WS_TRY_AGAIN_LATER, _WS_POLICY_VIOLATION = 1013, 1008


class ErrorAnswers:
    """Writer of one app's error answers.

    Args:
        error_format: format of a body.
        by_path: formats of other protocols' routes, by prefix of their paths; the longest counts.
        validation_status: 400 or 422, for requests that do not fit their schema.
    """

    def __init__(
        self, error_format: ErrorFormat, *, validation_status: int, by_path: Mapping[str, ErrorFormat] | None = None
    ) -> None:
        self.error_format = error_format
        self._by_path = sorted((by_path or {}).items(), key=lambda each: -len(each[0]))
        self._validation_status = validation_status

    def info(self, error: BaseException, scope: Scope) -> ErrorInfo:
        """Return the part of ``error`` that the client of ``scope`` may see."""
        info = describe(error, validation_status=self._validation_status)
        return replace(info, request_id=request_id_of(scope), path=scope.get("path", ""))

    def response(self, info: ErrorInfo) -> Response:
        """Return the response that carries ``info``."""
        headers = dict(info.headers)
        if info.status < 400:  # an HTTPException used as a redirect or as 304: it has no body
            return Response(status_code=info.status, headers=headers)
        body = to_json(self._format(info).body(info))
        return Response(body, status_code=info.status, headers=headers, media_type="application/json")

    def stream_event(self, info: ErrorInfo, content_type: str) -> bytes | None:
        """Return the last event of a broken stream of ``content_type``; None if such a stream can only be cut."""
        own = self._format(info)
        return own.event(own.body(info), content_type)

    def _format(self, info: ErrorInfo) -> ErrorFormat:
        return next((own for prefix, own in self._by_path if info.path.startswith(prefix)), self.error_format)

    async def refuse(self, error: BaseException, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or close a WebSocket before it is accepted."""
        info = self.info(error, scope)
        if scope["type"] == "websocket":
            await receive()  # websocket.connect
            code = _WS_TRY_AGAIN_LATER if info.status == 503 else _WS_POLICY_VIOLATION
            await send({"type": "websocket.close", "code": code, "reason": info.code})
            return
        await self.response(info)(scope, receive, send)
