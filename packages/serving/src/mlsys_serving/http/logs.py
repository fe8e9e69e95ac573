"""The log of an HTTP front: structured lines through structlog, in a logger of its own (no global configuration)."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal, TextIO

import structlog

# Loggers of the server library; its access lines are replaced by this package's.
_UVICORN = "uvicorn.error"


def make_logger(
    log_format: Literal["json", "console"], *, level: str = "info", stream: TextIO | None = None
) -> structlog.typing.FilteringBoundLogger:
    """Return a logger that writes one line for an event to ``stream`` (default: the process's stderr).

    Args:
        log_format: JSON, or text for people.
        level: ``debug``, ``info``, ``warning`` or ``error``; events below it are dropped.
        stream: destination of the lines.

    Example:
        >>> make_logger("json", stream=sys.stdout).info("started", port=8000)  # doctest: +ELLIPSIS
        {"port": 8000, "event": "started", "level": "info", "timestamp": "..."}
    """
    # Plain tracebacks on purpose: structlog's richer ones show local variables, and with them bodies and keys.
    processors: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if log_format == "json":
        processors += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(serializer=_to_json)]
    else:
        processors += [structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)]
    logger: structlog.typing.FilteringBoundLogger = structlog.wrap_logger(
        structlog.WriteLogger(sys.stderr if stream is None else stream),
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        cache_logger_on_first_use=True,
    )
    return logger


def _to_json(event: Any, *, default: Callable[[Any], Any]) -> str:
    return _encoder(default).encode(event)


@cache
def _encoder(default: Callable[[Any], Any]) -> json.JSONEncoder:
    """Return one JSON encoder for all lines: ``json.dumps`` with a default makes one for each."""
    return json.JSONEncoder(default=default)


class _Forward(logging.Handler):
    """Forwards standard-library records to a structlog logger."""

    def __init__(self, logger: structlog.typing.FilteringBoundLogger, is_wanted: Callable[[], bool]) -> None:
        super().__init__(logging.WARNING)
        self._logger = logger
        self._is_wanted = is_wanted

    def emit(self, record: logging.LogRecord) -> None:
        if not self._is_wanted():
            return
        fields: dict[str, Any] = {"source": "uvicorn", "message": record.getMessage().strip()}
        if record.exc_info:
            fields["exc_info"] = record.exc_info
        self._logger.log(record.levelno, "server", **fields)


@contextmanager
def forwarded_uvicorn_log(
    logger: structlog.typing.FilteringBoundLogger, *, is_wanted: Callable[[], bool] = lambda: True
) -> Iterator[None]:
    """Send uvicorn's warnings to ``logger`` within the context, while ``is_wanted()`` is true.

    Whatever the process has set for uvicorn's own logger, such as a level or that it is disabled, does not hold here.
    """
    uvicorn, forward = logging.getLogger(_UVICORN), _Forward(logger, is_wanted)
    before = uvicorn.propagate, uvicorn.level, uvicorn.disabled
    uvicorn.propagate, uvicorn.disabled = False, False
    uvicorn.setLevel(logging.WARNING)
    uvicorn.addHandler(forward)
    try:
        yield
    finally:
        uvicorn.removeHandler(forward)
        uvicorn.propagate, level, uvicorn.disabled = before
        uvicorn.setLevel(level)
