"""``mlsys windtunnel serve``: translated pipelines over the Open Inference Protocol and rows of JSON."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from mlsys_core.cli.trust import TrustCode
from mlsys_serving.cli import OipOptions, ServerOptions, announce, serve_command
from mlsys_serving.extensions import Extensions

if TYPE_CHECKING:
    from mlsys_windtunnel.serve.model import ServedPipeline

serve_app = typer.Typer()  # of "mlsys serve windtunnel"


@serve_app.command()
@serve_command("windtunnel")
def serve(
    models: Annotated[list[Path], typer.Argument(metavar="MODEL...", help="Folders, .pt2 or .onnx of translate.")],
    max_batch: Annotated[int, typer.Option(help="Most rows of a request, and requests of a batch.", min=1)] = 256,
    max_waiting: Annotated[int, typer.Option(help="Most requests waiting before others are refused.", min=1)] = 1024,
    threads: Annotated[int | None, typer.Option(help="Cores to use.", min=1, max=1024)] = None,
    trust_code: TrustCode = False,
    *,
    server: ServerOptions,
    oip: OipOptions,
    extensions: Extensions,
) -> None:
    """Serve pipelines: POST /predict with rows of JSON, and the Open Inference Protocol (gRPC with --grpc-port).

    Example: mlsys windtunnel serve churn price.onnx --grpc-port 8001
    """
    import torch
    from mlsys_serving.http import serve as serve_app
    from mlsys_serving.oip import ModelRepository, create_oip_app
    from mlsys_serving.oip.app import DEFAULT_CONFIG, ERROR_FORMAT
    from mlsys_windtunnel.cli.predict import load_model
    from mlsys_windtunnel.serve.model import ServedPipeline
    from mlsys_windtunnel.serve.rows import rows_router
    from mlsys_windtunnel.serve.source import PipelineSource

    if threads is not None:
        torch.set_num_threads(threads)

    def build(path: Path, name: str) -> ServedPipeline:
        answering = load_model(path, trust_code=trust_code)
        return ServedPipeline(answering, name, max_batch_size=max_batch, max_waiting=max_waiting)

    http = server.http_config(base=DEFAULT_CONFIG, title="mlsys windtunnel")
    with oip.grpc(server.host) as grpc, server.bind(http, error_format=ERROR_FORMAT) as bound:
        source, configs, composed = PipelineSource(build), oip.configs(), oip.composed()
        served = [source.add(path) for path in models]
        configs.warn_unused([*source.names(), *(each.name for each in composed)])
        repository = ModelRepository(served, source=source, settings_of=configs.settings, composed=composed)
        api = create_oip_app(
            repository, config=http, grpc=grpc, system="windtunnel", extensions=extensions, **oip.app_options()
        )
        api.include_router(rows_router(repository))

        code = serve_app(api, bound=bound, on_ready=lambda address: announce(address, grpc, extensions))
    raise typer.Exit(code)
