"""Servers of tiny models with the gateway's options; ``tests/orca`` has their fixtures."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
from mlsys_core.plugins import installed_plugins
from mlsys_orca_gateway.options import GatewayOptions
from mlsys_serving.extensions import Extensions

from tests.orca.conftest import make_gguf, tiny_gguf  # noqa: F401
from tests.orca.server.conftest import serve as serve_with
from tests.orca.survival.conftest import start, undisturbed  # noqa: F401

__all__ = ["serve_with"]


def extensions_with(options: GatewayOptions) -> Extensions:
    """All extensions of Orca's server, the gateway with these options."""
    return Extensions.of("orca", installed_plugins().registry, orca_gateway=options)


@pytest.fixture
def serve(serve_with: Callable[..., Any]) -> Callable[..., AbstractContextManager[Any]]:
    """``with serve(journal=GatewayOptions, ...) as (url, engine)``: see ``tests/orca/server/conftest.py``."""

    def serve(journal: GatewayOptions | None = None, **options: Any) -> AbstractContextManager[Any]:
        return serve_with(extensions=extensions_with(journal or GatewayOptions()), **options)

    return serve
