"""The app of ``mlsys dvabatch serve``: the Open Inference Protocol, and the routes for texts beside it."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from mlsys_dvabatch.serve.tei_routes import add_tei_routes
from mlsys_dvabatch.serve.text_routes import TEXT_ERRORS, add_text_routes
from mlsys_dvabatch.serve.text_service import TextService
from mlsys_serving.http import Router, runtime_of
from mlsys_serving.oip import ModelRepository, create_oip_app


def create_app(repository: ModelRepository, **options: Any) -> FastAPI:
    """Return an app that serves ``repository`` to clients of tensors and of texts.

    Args:
        repository: Models; belongs to the app from now on.
        options: See :func:`mlsys_serving.oip.create_oip_app`.
    """
    app = create_oip_app(repository, error_format=TEXT_ERRORS, **options)
    threads = runtime_of(app).threads
    service, router = TextService(repository, threads), Router()
    add_text_routes(router, service, threads)
    add_tei_routes(router, service, threads)
    app.include_router(router)
    return app
