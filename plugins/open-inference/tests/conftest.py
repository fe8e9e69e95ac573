"""Fixtures: the reference models, an app of all of them, and clients of it without a socket."""

from __future__ import annotations

import importlib.util
import io
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from mlsys_open_inference import create_oip_app
from mlsys_serving.http import HttpConfig
from mlsys_serving.http.record import make_logger
from mlsys_serving.models import ModelRepository


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("oip_reference", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules.setdefault("oip_reference", importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def reference() -> ModuleType:
    """The module with the reference models."""
    return _load(Path(__file__).with_name("reference.py"))


@pytest.fixture
def log() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def make_app(reference: ModuleType, log: io.StringIO) -> Callable[..., FastAPI]:
    """``make_app(models=..., source=..., config_field=..., app={create_oip_app options})``; all models by default."""

    def make(
        models: list[Any] | None = None, *, source: Any = None, app: dict[str, Any] | None = None, **config: Any
    ) -> FastAPI:
        repository = ModelRepository(reference.all_models() if models is None else models, source=source)
        options: dict[str, Any] = {"logger": make_logger("json", stream=log), "model_control": True} | (app or {})
        if config:
            options["config"] = HttpConfig(**config)
        return create_oip_app(repository, **options)

    return make


@pytest.fixture
async def client(make_app: Callable[..., FastAPI]) -> AsyncIterator[httpx.AsyncClient]:
    """A client of all reference models."""
    async with httpx.AsyncClient(transport=httpx.ASGITransport(make_app()), base_url="http://test") as client:
        yield client
