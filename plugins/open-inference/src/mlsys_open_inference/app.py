"""An app with the protocol alone, for servers of one's own and for tests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from mlsys_core.errors import ServingError
from mlsys_core.plugins.registry import Registry
from mlsys_serving.extensions import Chosen, Extensions
from mlsys_serving.http import ServerAddress
from mlsys_serving.models.app import create_model_app
from mlsys_serving.models.repository import ModelRepository

from mlsys_open_inference._plugin import EXTENSION
from mlsys_open_inference.extension import OipOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcConfig:
    """Address of the gRPC server."""

    host: str = "127.0.0.1"
    port: int = 0  # 0 takes a free one


def front(
    *,
    grpc: GrpcConfig | None = None,
    model_control: bool = False,
    more: Iterable[Chosen] = (),
) -> Extensions:
    """Return the protocol alone as a server's extensions, for :func:`mlsys_serving.models.create_model_app`.

    Args:
        grpc: Address of the gRPC server; None serves REST alone.
        model_control: Let clients load and unload models of the repository's source.
        more: Further extensions.
    """
    port = None if grpc is None else grpc.port
    own = OipOptions(grpc_port=port, model_control=model_control)
    if grpc is not None:
        object.__setattr__(own, "grpc_host", grpc.host)
    return Extensions(Registry(), [Chosen(EXTENSION, own), *more])


def create_oip_app(
    repository: ModelRepository,
    *,
    grpc: GrpcConfig | None = None,
    model_control: bool = False,
    **options: Any,
) -> FastAPI:
    """Return an app that serves ``repository`` over the protocol alone.

    Args:
        repository: The models; belongs to the app from now on.
        grpc: See :func:`front`, as for the next.
        model_control: See there.
        options: See :func:`mlsys_serving.models.create_model_app`.
    """
    extensions = front(grpc=grpc, model_control=model_control)
    every: dict[str, Any] = {"system": "models", "extensions": extensions} | options
    return create_model_app(repository, **every)


def grpc_address_of(app: FastAPI) -> ServerAddress:
    """Return the address of the gRPC server of ``app``.

    Raises:
        ServingError: it has none, or has not started.
    """
    address = getattr(app.state, "oip_grpc_address", None)
    if not isinstance(address, ServerAddress):
        raise ServingError("this app serves no gRPC, or has not started: give create_oip_app a GrpcConfig and serve it")
    return address
