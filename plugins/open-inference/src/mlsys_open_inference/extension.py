"""The protocol as a server extension: a front of every server that has models by name.

Data flow of a request: ``rest`` or ``grpc`` -> a codec that reads the wire -> ``binding``, which checks it against the
model's spec -> ``engine`` (deadline, statistics) -> the model -> the codec -> the wire.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from mlsys_core.errors import InvalidInputError
from mlsys_serving.extensions import Extension, ExtensionOptions, Service

if TYPE_CHECKING:
    from fastapi import FastAPI


@dataclass(frozen=True, kw_only=True)
class OipOptions(ExtensionOptions):
    """Options of servers of the Open Inference Protocol."""

    grpc_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port of gRPC; 0 takes a free one. Left out: no gRPC.")
    ] = None
    model_control: Annotated[
        bool, typer.Option("--model-control", help="Let clients load and unload models; otherwise they may not.")
    ] = False
    model_configs: Annotated[
        Path | None,
        typer.Option(help="Folder of NAME.pbtxt or NAME.json files: batch size and time-outs by model."),
    ] = None
    cascade: Annotated[
        list[Path] | None, typer.Option(help="A JSON file that declares a cascade of the models served; repeat.")
    ] = None
    grpc_host: str = field(default="127.0.0.1", init=False)  # both are set by ``hold``

    def check(self, *, has_instances: bool) -> None:
        """Refuse files that are no cascades or configurations, and what does not go with worker processes."""
        if has_instances and self.model_control:
            raise InvalidInputError("--instances loads all models before it forks: leave out --model-control")
        if self.model_configs is not None and not self.model_configs.is_dir():
            raise InvalidInputError(f"--model-configs: {self.model_configs} is no folder")
        self.cascades()

    def cascades(self) -> list[Any]:
        """Return the declared cascades.

        Raises:
            InvalidInputError: A file declares none.
        """
        from mlsys_open_inference.cascades import read_cascade

        return [read_cascade(path) for path in self.cascade or ()]

    @contextmanager
    def hold(self, host: str) -> Iterator[None]:
        """Reserve the gRPC port, so that a busy one is refused before a model is loaded."""
        from mlsys_serving.http.sockets import bind

        if self.grpc_port is None:
            yield
            return
        held, address = bind(host, self.grpc_port, option="--grpc-port")
        object.__setattr__(self, "grpc_host", host)
        object.__setattr__(self, "grpc_port", address.port)
        with held:  # bound, but not listening: gRPC's own socket may take the port, and does when it starts
            yield

    def notes(self, url: str) -> list[str]:
        """Return where gRPC is."""
        return [] if self.grpc_port is None else [f"gRPC on {self.grpc_host}:{self.grpc_port}"]


def extend(service: Service) -> Extension | None:
    """Return the protocol's routes, and its gRPC server; None: the server has no models by name."""
    from mlsys_serving.http import runtime_of

    from mlsys_open_inference.engine import Engine
    from mlsys_open_inference.files import ConfigFiles
    from mlsys_open_inference.rest.control import control_router
    from mlsys_open_inference.rest.routes import inference_routes

    repository, options = service.models, service.options or OipOptions()
    if repository is None:
        return None
    configs = ConfigFiles(options.model_configs, getattr(repository.source, "directory", None))
    cascades = options.cascades()
    configs.warn_unused([*repository.names(), *(each.name for each in cascades)])
    repository.configure(configs.settings if configs.is_used else None, cascades)
    engine = Engine(repository, service.clock, service.threads)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if options.grpc_port is None:
            yield
            return
        from mlsys_open_inference.grpc.server import GrpcServer  # only who serves gRPC pays for its import

        server = GrpcServer(engine, runtime_of(app), model_control=options.model_control)
        async with server.serving(options.grpc_host, options.grpc_port) as address:
            app.state.oip_grpc_address = address
            yield

    router = control_router(repository, service.readiness, model_control=options.model_control)
    routes = inference_routes(engine, service.config)
    return Extension(routers=[router], routes=routes, lifespan=lifespan, open_paths=["/v2/health/*"])
