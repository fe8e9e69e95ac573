"""``mlsys dvabatch``: serve models, profile them, disturb them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from mlsys_core.cli import completion
from mlsys_core.cli.options import CompilerName, Device, GraphFile, TrustCode, require_read
from mlsys_dvabatch.cli.explain import Mask, Shape, explain, parse_shape
from mlsys_serving.cli import Instances, ServerOptions, serve_command
from mlsys_serving.cli.chaos import ChaosOut, Every, NumInstances, Seconds, Seed, Streams
from mlsys_serving.extensions import Extensions

app = typer.Typer(no_args_is_help=True)
serve_app = typer.Typer()  # the command "mlsys serve dvabatch"
app.command()(explain)


@app.callback()
def dvabatch() -> None:
    """Batch DNN requests so that they can join and leave a batch between the stages of the model."""


@app.command()
@serve_app.command()
@serve_command("dvabatch")
def serve(
    models: Annotated[
        list[str],
        typer.Argument(help="Names, .pt2 or .onnx files, or folders.", autocompletion=completion.models),
    ],
    policy: Annotated[
        str, typer.Option(help="auto, a policy (mlsys plugins list), or a baseline: zero, delay, static.")
    ] = "auto",
    mode: Annotated[str, typer.Option(help="cost-aware, or literal: the paper's rules to the letter.")] = "cost-aware",
    qos_ms: Annotated[
        float, typer.Option(help="Latency target: bounds how long a batch takes others in.", min=1)
    ] = 200,
    max_batch: Annotated[int, typer.Option(help="Largest batch.", min=1, max=4096)] = 64,
    max_waiting: Annotated[int, typer.Option(help="Most requests waiting before others are refused.", min=1)] = 1024,
    window_ms: Annotated[float, typer.Option(help="Window of --policy delay.", min=0)] = 5,
    stages: Annotated[int | None, typer.Option(help="Stages of each model.", min=1, max=64)] = None,
    shape: Shape = None,
    slice_at: Annotated[str, typer.Option(help="time: even stages; diversity: where preferred sizes change.")] = "time",
    compiler: CompilerName = None,
    exit_confidence: Annotated[
        float, typer.Option(help="With --policy early-exit: how sure an output must be, as a part of 1.", min=0, max=1)
    ] = 0.9,
    exit_rule: Annotated[
        str,
        typer.Option(help="With it: confidence (largest share), margin (lead over the second), entropy (1: none)."),
    ] = "confidence",
    mask: Mask = None,
    weights: Annotated[
        str, typer.Option(help="float, or int8: int8 products in an encoder, faster and less exact.")
    ] = "float",
    threads: Annotated[int | None, typer.Option(help="Cores to use.", min=1, max=1024)] = None,
    instances: Instances = None,
    device: Device = "cpu",
    trust_code: TrustCode = False,
    *,
    server: ServerOptions,
    extensions: Extensions,
) -> None:
    """Serve models over the Open Inference Protocol (REST, and gRPC with --grpc-port).

    Encoders come with mlsys-encoders, and answer texts too.

    Example: mlsys dvabatch serve all-minilm-l6-v2 unet --policy auto --qos-ms 200 --grpc-port 8001
    """
    from mlsys_core.device import get_device
    from mlsys_dvabatch.cli.serving import serve_models
    from mlsys_dvabatch.serve.preparing import Batching
    from mlsys_dvabatch.stages.zoo import Loading
    from mlsys_serving.models.app import DEFAULT_CONFIG, ERROR_FORMAT

    for_exits = {"exit_confidence": exit_confidence != 0.9, "exit_rule": exit_rule != "confidence"}
    require_read("--policy", policy, "early-exit", **for_exits)
    require_read("--policy", policy, "delay", window_ms=window_ms != 5)
    batching = Batching(
        policy=policy,
        mode=mode,
        qos_s=qos_ms / 1e3,
        max_batch_size=max_batch,
        max_waiting=max_waiting,
        window_s=window_ms / 1e3,
        num_stages=stages,
    )
    loading = Loading(
        shape=parse_shape(shape),
        compiler=compiler,
        slice_at=slice_at,
        trust_code=trust_code,
        exit_confidence=exit_confidence,
        exit_rule=exit_rule,
        mask=mask,
        weights=weights,
        device=get_device(device),
    )
    extensions.check(has_instances=instances is not None, needs_front=True)
    http = server.http_config(base=DEFAULT_CONFIG, title="mlsys dvabatch")
    with extensions.held(server.host), server.bind(http, error_format=ERROR_FORMAT) as bound:
        code = serve_models(
            models,
            batching,
            loading,
            bound=bound,
            http=http,
            num_threads=threads,
            num_instances=instances,
            extensions=extensions,
        )
    raise typer.Exit(code)


@app.command()
def chaos(
    model: Annotated[str, typer.Argument(help="As serve takes it.", autocompletion=completion.models)] = (
        "all-minilm-l6-v2"
    ),
    seconds: Seconds = 20.0,
    every: Every = 2.0,
    streams: Streams = 8,
    instances: NumInstances = 2,
    seed: Seed = 0,
    out: ChaosOut = None,
) -> None:
    """Kill worker processes of a server under load, and compare its answers with those of an undisturbed run.

    Exit code 0 if no answer is lost or another one, else 1.

    Example: mlsys dvabatch chaos all-minilm-l6-v2 --seconds 20 --every 2
    """
    from mlsys_serving.cli.chaos import chaos as run

    arguments = ["dvabatch", "serve", model, "--instances", str(instances)]
    run(arguments, Path(model).stem, seconds=seconds, every=every, streams=streams, seed=seed, out=out)


@app.command()
def profile(
    model: Annotated[str, typer.Argument(help="A name, a .pt2 or .onnx file, or a folder.")],
    stages: Annotated[int | None, typer.Option(help="Stages; found by trying where left out.", min=1, max=64)] = None,
    max_batch: Annotated[int, typer.Option(help="Largest batch.", min=1, max=64)] = 64,
    shape: Shape = None,
    slice_at: Annotated[str, typer.Option(help="time: even stages; diversity: where preferred sizes change.")] = "time",
    exits: Annotated[
        bool, typer.Option("--exits", help="Cut at the exits, as serve --policy early-exit does.")
    ] = False,
    graph: GraphFile = None,
    device: Device = "cpu",
    trust_code: TrustCode = False,
) -> None:
    """Measure a model: what its stages and exits cost at each batch size, its diversities, the policy that follows.

    Example: mlsys dvabatch profile unet --graph stages.svg
    """
    from mlsys_core.config import settings
    from mlsys_core.device import get_device
    from mlsys_dvabatch.cli.profile_report import report
    from rich.console import Console

    report(
        model,
        settings().cache_dir,
        Console(),
        stages=stages,
        max_batch_size=max_batch,
        shape=parse_shape(shape),
        slice_at=slice_at,
        has_exits=exits,
        trust_code=trust_code,
        graph=graph,
        device=get_device(device),
    )
