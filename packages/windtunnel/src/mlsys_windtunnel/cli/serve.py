"""``mlsys windtunnel serve``: translated pipelines over the Open Inference Protocol and rows of JSON."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from mlsys_core.cli.options import TrustCode
from mlsys_serving.cli import ServerOptions, announce, serve_command
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
    extensions: Extensions,
) -> None:
    """Serve pipelines: POST /predict with rows of JSON, and the Open Inference Protocol (gRPC with --grpc-port).

    Example: mlsys windtunnel serve churn price.onnx --grpc-port 8001
    """
    import torch
    from mlsys_serving.http import serve as serve_app
    from mlsys_serving.models import DEFAULT_CONFIG, ERROR_FORMAT, ArgumentSource, ModelRepository, create_model_app
    from mlsys_windtunnel.cli.predict import load_model
    from mlsys_windtunnel.serve.model import ServedPipeline
    from mlsys_windtunnel.serve.rows import rows_router

    if threads is not None:
        torch.set_num_threads(threads)

    def build(argument: str) -> ServedPipeline:
        path = Path(argument)
        name = path.resolve().name.removesuffix(path.suffix if path.suffix in (".pt2", ".onnx") else "")
        answering = load_model(path, trust_code=trust_code)
        return ServedPipeline(answering, name, max_batch_size=max_batch, max_waiting=max_waiting)

    extensions.check()
    http = server.http_config(base=DEFAULT_CONFIG, title="mlsys windtunnel")
    with extensions.held(server.host), server.bind(http, error_format=ERROR_FORMAT) as bound:
        source = ArgumentSource(build)
        repository = ModelRepository([source.add(str(path)) for path in models], source=source)
        api = create_model_app(
            repository,
            system="windtunnel",
            extensions=extensions,
            config=http,
            routers=[rows_router(repository)],
        )
        code = serve_app(api, bound=bound, on_ready=lambda address: announce(address, extensions))
    raise typer.Exit(code)
