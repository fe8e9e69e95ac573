"""An engine is a command; this one serves a model that says what it hears."""

from typing import Annotated

import typer
from mlsys_serving.cli import ServerOptions, serve_command

app = typer.Typer()


@app.command()
@serve_command("acme")
def serve(
    name: Annotated[str, typer.Argument(help="The model's name.")] = "echo",
    *,
    server: ServerOptions,
) -> None:
    """Serve an echo."""
    from mlsys_open_inference import create_oip_app
    from mlsys_serving.http import serve as serve_app
    from mlsys_serving.models import DataType, InferResponse, ModelRepository, ModelSpec, TensorSpec

    class Echo:
        spec = ModelSpec(
            name=name,
            version="1",
            platform="acme",
            inputs=(TensorSpec("said", DataType.FP32, (-1,)),),
            outputs=(TensorSpec("heard", DataType.FP32, (-1,)),),
        )

        async def infer(self, request):
            return InferResponse({"heard": request.inputs["said"]})

        async def close(self):
            pass

    http = server.http_config(title="acme")
    with server.bind(http) as bound:
        code = serve_app(
            create_oip_app(ModelRepository([Echo()]), config=http),
            bound=bound,
            on_ready=lambda address: typer.echo(f"serving at {address.url}"),
        )
    raise typer.Exit(code)
