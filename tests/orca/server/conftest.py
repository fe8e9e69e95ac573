"""A live server on a tiny model with random weights: what is tested of it is not what it says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlsys_core.plugins import installed_plugins
from mlsys_orca.api.server import make_app, make_service
from mlsys_orca.engine.engine import Engine, EngineConfig
from mlsys_orca.loading.load import load_model
from mlsys_orca.text.chat_template import ChatTemplate
from mlsys_serving.extensions import Extensions
from mlsys_serving.http import BackgroundServer, HttpConfig

Serve = Callable[..., AbstractContextManager[tuple[str, Engine]]]


@pytest.fixture
def serve(make_gguf: Callable[..., Path]) -> Serve:
    """``with serve(EngineConfig options, http=HttpConfig options, template=Jinja) as (url, engine)``; extended."""
    tiny = load_model(make_gguf(), dtype="fp32")

    @contextmanager
    def serve(
        http: dict[str, Any] | None = None,
        template: str | None = None,
        extensions: Extensions | None = None,
        **options: Any,
    ) -> Iterator[tuple[str, Engine]]:
        config = EngineConfig(**{"max_batch_size": 4, "max_model_len": 96, "policy": "chunked", **options})
        loaded = tiny if template is None else replace(tiny, chat_template=ChatTemplate(template))
        service = make_service(loaded, "tiny", config)
        extensions = extensions or Extensions.of("orca", installed_plugins().registry)
        app = make_app(service, HttpConfig(validation_status=400, **(http or {})), extensions=extensions)
        with extensions.held("127.0.0.1"), BackgroundServer(app) as server:
            yield server.url, service.engine

    return serve
