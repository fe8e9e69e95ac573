"""``mlsys batchmaker``: measure cells, write model directories, serve and compare them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from mlsys_core.cli.options import Device, GraphFile, RunPoolName, TrustCode, require_choice
from mlsys_serving.cli import Instances, ServerOptions, announce, serve_command
from mlsys_serving.cli.chaos import ChaosOut, Every, NumInstances, Seconds, Seed, Streams
from mlsys_serving.extensions import Extensions

if TYPE_CHECKING:
    from mlsys_core.profiling.profile_table import ProfileTable

app = typer.Typer(no_args_is_help=True)
serve_app = typer.Typer()  # "mlsys serve batchmaker"


@app.callback()
def batchmaker() -> None:
    """Serve recurrent networks by batching single cells instead of whole requests."""


@app.command()
def knee(
    hidden: Annotated[int, typer.Option(help="Hidden size of the LSTM cell.", min=1)] = 1024,
    batch_sizes: Annotated[
        str, typer.Option(help="Batch sizes to measure, rising, with commas.", metavar="SIZES")
    ] = "1,2,4,8,16,32,64,128,256,512,1024,2048",
    threads: Annotated[int | None, typer.Option(help="Threads; all cores by default.", min=1, max=1024)] = None,
    repeats: Annotated[int, typer.Option(help="Timed runs of each batch size; the median counts.", min=1)] = 5,
    fraction: Annotated[
        float, typer.Option(help="The knee is the smallest batch size with this part of the best throughput.")
    ] = 0.9,
    device: Device = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw latency against throughput (.svg, .png, .pdf).")] = None,
) -> None:
    """Measure an LSTM cell over batch sizes, and find the one beyond which larger batches gain little.

    Example: mlsys batchmaker knee --hidden 1024 --threads 2 --plot knee.svg
    """
    from mlsys_core.device import get_device
    from mlsys_core.errors import InvalidInputError
    from mlsys_core.plot import check_format, save
    from rich.console import Console
    from rich.progress import Progress

    if plot is not None:
        check_format(plot)
    if not 0 < fraction <= 1:
        raise InvalidInputError(f"--fraction {fraction}: must be above 0 and at most 1")
    sizes = parse_sizes(batch_sizes)

    from mlsys_batchmaker.cells.knee import UNIT, knee_figure, profile_lstm_cell
    from mlsys_core.posix.machine import num_cores

    num_threads = threads or num_cores()
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("measuring")
        table = profile_lstm_cell(
            hidden,
            sizes,
            num_threads=num_threads,
            repeats=repeats,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
            device=get_device(device),
        )
    b_max = table.knee(UNIT, fraction=fraction)
    if plot is not None:
        save(knee_figure(table, b_max, title=f"LSTM cell, h = {hidden}, threads: {num_threads}"), plot)
    if as_json:
        print_json(table, b_max, hidden=hidden, num_threads=num_threads)
    else:
        print_table(table, b_max, fraction=fraction)
        if plot is not None:
            typer.echo(f"wrote {plot}")


@app.command()
def save(
    model: Annotated[
        str, typer.Argument(help="g2p-en, resemblyzer, silero-vad (trained), lstm, seq2seq, tree-lstm, beam (random).")
    ],
    directory: Annotated[Path, typer.Argument(help="Folder to write; it is made.")],
    hidden: Annotated[int, typer.Option(help="Hidden size of a model of random weights.", min=1)] = 1024,
    max_batch: Annotated[int, typer.Option(help="Largest batch of cells; powers of two up to it.", min=1)] = 64,
    seed: Annotated[int, typer.Option(help="Of random weights.")] = 0,
) -> None:
    """Write a model as a directory that can be served: cells as .pt2, weights as safetensors, a manifest.

    Example: mlsys batchmaker save g2p-en models/g2p-en
    """
    from mlsys_batchmaker.models.store import STREAMS, make_model, save_model, save_stream

    if model in STREAMS:
        typer.echo(f"wrote {save_stream(model, directory)}")
        return
    typer.echo(f"wrote {save_model(make_model(model, hidden=hidden, max_batch=max_batch, seed=seed), directory)}")


@app.command()
def explain(
    model: Annotated[
        str, typer.Argument(help="A model directory, or g2p-en, resemblyzer, lstm, seq2seq, tree-lstm, beam.")
    ],
    hidden: Annotated[int, typer.Option(help="Hidden size of a model of random weights.", min=1)] = 1024,
    graph: GraphFile = None,
    trust_code: TrustCode = False,
) -> None:
    """Show a model's cells, and how its example request unfolds into a graph of them.

    Example: mlsys batchmaker explain tree-lstm --hidden 64 --graph tree.svg
    """
    from collections import Counter

    from mlsys_batchmaker.models.store import load_by_name, make_model
    from mlsys_core.graphs import write_graph
    from rich.console import Console
    from rich.table import Table

    is_folder = Path(model).is_dir()
    made = load_by_name(Path(model), trust_code=trust_code) if is_folder else make_model(model, hidden=hidden)
    unfolded = made.to_networkx()
    if graph is not None:
        write_graph(unfolded, graph)
    console = Console()
    table = Table("cell", "reads", "gives", "priority", "largest batch")
    for spec in made.layout.cells:
        reads, gives = (
            "\n".join(f"{port.name}: {port.dtype}{list(port.shape)}" for port in ports)
            for ports in (spec.inputs, spec.outputs)
        )
        table.add_row(spec.name, reads, gives, str(spec.priority), str(spec.max_batch_size))
    console.print(table)
    counts = Counter(cell for _, cell in unfolded.nodes(data="cell"))
    console.print(f"Its example unfolds to {', '.join(f'{count} {cell}' for cell, count in counts.items())}.")
    if graph is not None:
        typer.echo(f"wrote {graph}")


@app.command()
@serve_app.command()
@serve_command("batchmaker")
def serve(
    models: Annotated[list[Path], typer.Argument(help="Model directories, or folders that hold some.")],
    workers: Annotated[int, typer.Option(help="Workers of each model, a thread each.", min=1)] = 1,
    executor: Annotated[str, typer.Option(help="chunk: a round's steps in one call; cell: one by one.")] = "chunk",
    max_tasks: Annotated[int, typer.Option(help="MaxTasksToSubmit: steps of a round.", min=1)] = 5,
    lookahead: Annotated[str, typer.Option(help="Chains that may stop: speculative, or one step at a time.")] = (
        "speculative"
    ),
    max_waiting: Annotated[int, typer.Option(help="Requests that may wait for room; then 503.", min=0)] = 4096,
    max_cells: Annotated[
        int | None, typer.Option(help="Most cells of a request; then 400. None: the model's own, 4096.", min=1)
    ] = None,
    compiler: Annotated[
        str, typer.Option(help="Of cells: a registered name, eager, or auto: the best for each cell.")
    ] = "auto",
    instances: Instances = None,
    device: Device = "cpu",
    devices: Annotated[
        str | None, typer.Option(help="Several devices, with commas: a worker and a state pool on each.")
    ] = None,
    memory_pool: RunPoolName = None,
    trust_code: TrustCode = False,
    *,
    server: ServerOptions,
    extensions: Extensions,
) -> None:
    """Serve models, by their folders' names, over the Open Inference Protocol: REST, and gRPC with --grpc-port.

    Example: mlsys batchmaker serve models/g2p-en --grpc-port 8001
    """
    from functools import partial

    import torch
    from mlsys_batchmaker.engine import EngineConfig
    from mlsys_batchmaker.serve.app import app_of, instance_groups, make_app
    from mlsys_batchmaker.workers.materialise import find_compiler
    from mlsys_serving.http import ServerAddress
    from mlsys_serving.http import serve as serve_app
    from mlsys_serving.instances import require_processes, serve_instances
    from mlsys_serving.models.app import DEFAULT_CONFIG, ERROR_FORMAT

    require_choice("--executor", executor, "chunk", "cell")
    require_choice("--lookahead", lookahead, "speculative", "one")
    find_compiler(compiler)  # which refuses unknown names, before a model is loaded
    config = EngineConfig(
        num_workers=workers,
        executor=executor,  # type: ignore[arg-type] # checked there
        max_tasks_to_submit=max_tasks,
        lookahead=lookahead,  # type: ignore[arg-type]
        max_waiting=max_waiting,
        max_cells=max_cells,
        compiler=compiler,
        device=device,
        devices=() if devices is None else tuple(name.strip() for name in devices.split(",")),
        memory_pool=memory_pool,
    )
    extensions.check(has_instances=instances is not None, needs_front=True)
    http = server.http_config(base=DEFAULT_CONFIG, title="mlsys batchmaker")
    if instances is not None:
        for name in config.worker_devices:
            require_processes(name)
        torch.set_num_threads(1)  # a process with threads cannot fork
    folders = ", ".join(map(str, models))

    def tell(address: ServerAddress) -> None:
        announce(address, extensions)

    with extensions.held(server.host), server.bind(http, error_format=ERROR_FORMAT) as bound:
        typer.echo(f"loading {folders}: cells are made for every batch size, some seconds a model", err=True)
        if instances is None:
            app = make_app(models, config, extensions=extensions, http=http, trust_code=trust_code)
            code = serve_app(app, bound=bound, on_ready=tell)
        else:
            groups = instance_groups(models, config, trust_code=trust_code)
            make = partial(app_of, extensions=extensions, http=http)
            code = serve_instances(groups, instances, make, bound=bound, on_ready=tell)
    raise typer.Exit(code)


@app.command()
def chaos(
    model_dir: Annotated[Path, typer.Argument(help="A model directory, whose requests are words or numbers.")],
    seconds: Seconds = 20.0,
    every: Every = 2.0,
    streams: Streams = 8,
    instances: NumInstances = 2,
    seed: Seed = 0,
    out: ChaosOut = None,
) -> None:
    """Kill worker processes of a server under load, and compare its answers with those of an undisturbed run.

    Exit code 0 if no answer is lost or another one, else 1.

    Example: mlsys batchmaker chaos models/g2p-en --seconds 20 --every 2
    """
    from mlsys_serving.cli.chaos import chaos as run

    arguments = ["batchmaker", "serve", str(model_dir), "--instances", str(instances)]
    run(arguments, model_dir.resolve().name, seconds=seconds, every=every, streams=streams, seed=seed, out=out)


def parse_sizes(text: str) -> list[int]:
    """Parse batch sizes such as "1,2,4"; the profiler checks that they rise.

    Raises:
        InvalidInputError: a part is no whole number.
    """
    from mlsys_core.errors import InvalidInputError

    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InvalidInputError(f"--batch-sizes {text!r}: write whole numbers with commas, like 1,2,4") from None


_BUSY = 0.5  # (slowest - fastest) / median of the repeats; a quiet machine stays below


def print_json(table: ProfileTable, b_max: int, *, hidden: int, num_threads: int) -> None:
    """Print the measurement as JSON, with the machine beside it."""
    from mlsys_core.environment import describe_environment

    report = {
        "hidden_size": hidden,
        "num_threads": num_threads,
        "b_max": b_max,
        "table": json.loads(table.to_json()),
        "environment": describe_environment(),
    }
    typer.echo(json.dumps(report, indent=1))


def print_table(table: ProfileTable, b_max: int, *, fraction: float) -> None:
    """Print the measurement as a table, with the knee marked."""
    from rich.console import Console
    from rich.table import Table

    (profile,) = table.units
    console = Console()
    rows = Table("batch size", "latency (ms)", "spread", "throughput (cells/s)", "")
    for column in rows.columns[:4]:
        column.justify = "right"
    for size, seconds, spread in zip(profile.batch_sizes, profile.seconds, profile.spread, strict=True):
        rate = f"{size / seconds:,.0f}"
        rows.add_row(str(size), f"{seconds * 1e3:.3f}", f"{spread:.0%}", rate, "<- b_max" if size == b_max else "")
    console.print(rows)
    console.print(f"b_max = {b_max}: the smallest batch size with {fraction:.0%} of the best throughput")
    if b_max == profile.batch_sizes[-1]:
        console.print("It is the largest one measured: throughput may rise further, so give larger --batch-sizes")
    if max(profile.spread) > _BUSY:
        console.print(
            "The repeats differ widely: the machine is busy. Measure again when it is quiet, or with more --repeats"
        )
