"""The errors of this front beside ``InvalidInputError``. HTTP statuses are Triton's; gRPC codes follow from them."""

from __future__ import annotations

from mlsys_core.errors import ServingError


class UnknownModelError(ServingError):
    """There is no such model or version here."""

    http_status = 404
    error_code = "model_not_found"


class ModelNotReadyError(ServingError):
    """The model is loading or unloading."""

    http_status = 503
    error_code = "model_not_ready"


class ModelLoadError(ServingError):
    """A model could not be loaded or unloaded; the message says why."""

    http_status = 400
    error_code = "model_load_failed"


class UnsupportedError(ServingError):
    """An extension of the protocol, or a way to call a model, that is not offered."""

    http_status = 501
    error_code = "unsupported"


class DeadlineExceededError(ServingError):
    """The request's deadline passed before its answer was there."""

    http_status = 504
    error_code = "deadline_exceeded"
