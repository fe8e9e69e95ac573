"""Access to what only an operator may allow: loading and unloading models of a running server."""

from __future__ import annotations

from mlsys_serving.http import HttpError


def check_model_control(model_control: bool) -> None:
    """Refuse what changes the server unless the operator allowed it.

    Raises:
        HttpError: 403.
    """
    if not model_control:
        raise HttpError(
            "clients may not load or unload models here; the server's operator allows it with --model-control",
            http_status=403,
            error_code="model_control_off",
        )
