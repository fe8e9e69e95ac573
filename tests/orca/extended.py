"""Orca's app with every extension that is installed, as ``mlsys orca serve`` has it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI
from mlsys_core.plugins import installed_plugins
from mlsys_orca.api.server import make_app
from mlsys_orca.api.service import ModelService
from mlsys_serving.extensions import Extensions
from mlsys_serving.http import BackgroundServer, HttpConfig


@contextmanager
def extended(service: ModelService, http: HttpConfig, **options: Any) -> Iterator[FastAPI]:
    """Yield the app over ``service``; what the extensions need is held while the context is open."""
    extensions = Extensions.of("orca", installed_plugins().registry)
    with extensions.held("127.0.0.1"):
        yield make_app(service, http, extensions=extensions, **options)


@contextmanager
def serving(service: ModelService, http: HttpConfig) -> Iterator[str]:
    """Serve the app over ``service``; yield the address."""
    with extended(service, http) as app, BackgroundServer(app) as server:
        yield server.url
