"""Errors of requests that endpoints share."""

from __future__ import annotations

from collections.abc import Sequence

from mlsys_serving.http import HttpError


def too_long(message: str) -> HttpError:
    """Return the error 400: the context is too short for what was asked."""
    return HttpError(message, http_status=400, error_code="context_length_exceeded")


def unknown_model(model: str, names: Sequence[str]) -> HttpError:
    """Return the error 404: nothing here has that name."""
    has = ", ".join(map(repr, names)) or "none for this"
    return HttpError(
        f"the model {model[:256]!r} does not exist here; this server has {has}",
        http_status=404,
        error_code="model_not_found",
        param="model",
    )
