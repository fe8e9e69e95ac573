"""``mlsys workload``: make request traces, drive a server with them, compare and plot the results."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from mlsys_core.errors import InvalidInputError, ServingError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from mlsys_bench.workload.results import LoadResult

app = typer.Typer(no_args_is_help=True)

GoodputOption = Annotated[
    str | None,
    typer.Option(
        "--goodput-ms",
        help="Latency bounds: 500, or some of latency=500,ttft=200,itl=50,normalized=40.",
        metavar="BOUNDS",
    ),
]
Results = Annotated[list[Path], typer.Argument(help="Files that 'run --output' wrote.", metavar="RESULT...")]


class Api(StrEnum):
    """The two OpenAI-style endpoints."""

    COMPLETIONS = "completions"
    CHAT = "chat"


class PlotKind(StrEnum):
    """Kinds of figures that 'plot' can draw."""

    AUTO = "auto"
    LOAD = "load"
    THROUGHPUT = "throughput"
    CDF = "cdf"


@app.callback()
def workload() -> None:
    """Make request traces and drive a server with them.

    Example: mlsys workload generate --arrivals poisson --rate 4 -n 200 -o trace.jsonl
    """


@app.command()
def generate(
    output: Annotated[Path, typer.Option("--output", "-o", help="The trace to write (JSON lines).")],
    arrivals: Annotated[
        str,
        typer.Option(help="poisson, constant, steps:SECONDS@RATE,..., closed:CLIENTS[:THINK_S] or replay:TRACE."),
    ] = "poisson",
    rate: Annotated[float | None, typer.Option(help="Mean requests per second, for the first four.")] = None,
    prompts: Annotated[
        str,
        typer.Option(
            help="Input tokens: uniform:LOW:HIGH, constant:LENGTH, lognormal:MEAN:P99[:MAX], file:PATH, "
            "orca-prompts, orca-outputs or wmt."
        ),
    ] = "orca-prompts",
    outputs: Annotated[str, typer.Option(help="Output tokens, written likewise.")] = "orca-outputs",
    num_items: Annotated[int, typer.Option("--num", "-n", help="How many requests.")] = 200,
    seed: Annotated[int, typer.Option(help="Same seed, same file.")] = 0,
) -> None:
    """Write a seeded trace of requests.

    Example: mlsys workload generate --rate 4 --prompts uniform:32:512 --outputs uniform:1:128 -n 200 -o trace.jsonl
    """
    from mlsys_bench.workload.parse import parse_arrivals, parse_lengths
    from mlsys_bench.workload.trace import make_trace, write_trace

    trace = make_trace(
        parse_arrivals(arrivals, rate=rate),
        prompts=parse_lengths(prompts),
        outputs=parse_lengths(outputs),
        num_items=num_items,
        seed=seed,
    )
    write_trace(trace, output)
    num_input = sum(item.num_input_tokens for item in trace)
    num_output = sum(item.num_output_tokens for item in trace)
    span = f"over {trace.items[-1].arrival_s:.4g} s" if trace.closed_loop is None else "in a closed loop"
    typer.echo(f"{len(trace)} requests {span}, {num_input} input and {num_output} output tokens: {output}")


@app.command()
def run(
    trace_path: Annotated[Path, typer.Argument(help="A trace that 'generate' wrote.", metavar="TRACE")],
    url: Annotated[str, typer.Option(help="The server's base URL, up to and with its version.")],
    model: Annotated[str, typer.Option(help="The model's name at the server.")],
    api: Annotated[Api, typer.Option(help="The endpoint to call.")] = Api.COMPLETIONS,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write every record here (JSON).")] = None,
    plot_path: Annotated[
        Path | None, typer.Option("--plot", help="Draw the latencies here (.svg, .png, .pdf).")
    ] = None,
    goodput_ms: GoodputOption = None,
    speed: Annotated[float, typer.Option(help="Let requests arrive this many times as fast.")] = 1.0,
    warmup: Annotated[int, typer.Option(help="Requests to send beforehand, not counted.")] = 0,
    max_connections: Annotated[int, typer.Option(help="Requests outstanding at once, at most.")] = 512,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds each request may take.")] = 600.0,
    stream: Annotated[bool, typer.Option(help="Ask for tokens as they are made.")] = True,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Ask for exactly the trace's output tokens (an extension).")
    ] = False,
    api_key: Annotated[str | None, typer.Option(help="Sent as bearer token.")] = None,
    name: Annotated[str | None, typer.Option(help="Of this run in tables and plots; the model's otherwise.")] = None,
    progress: Annotated[bool, typer.Option(help="Show a progress bar on stderr.")] = True,
) -> None:
    """Send a trace to a server and report latency, throughput and goodput. Ctrl-C keeps the partial results.

    Example: mlsys workload run trace.jsonl --url http://127.0.0.1:8000/v1 --model smollm2-135m-instruct
    """
    from contextlib import nullcontext

    from mlsys_core import plot
    from mlsys_core.environment import describe_environment
    from rich.console import Console

    from mlsys_bench.workload.http_target import HttpTarget
    from mlsys_bench.workload.loadgen import LoadOptions, run_load_blocking
    from mlsys_bench.workload.parse import parse_bounds
    from mlsys_bench.workload.tables import comparison_table, progress_bar, result_table, warnings_of
    from mlsys_bench.workload.trace import read_trace

    bounds = None if goodput_ms is None else parse_bounds(goodput_ms)
    if bounds is not None and not stream and (bounds.ttft_s or bounds.itl_s):
        raise InvalidInputError("bounds on ttft or itl need the tokens one by one: leave --no-stream out")
    for path in (output, plot_path):
        _require_folder(path)
    if plot_path is not None:
        plot.check_format(plot_path)
    trace = read_trace(trace_path).at_speed(speed)
    options = LoadOptions(
        closed_loop=trace.closed_loop,
        num_warmup=warmup,
        max_connections=max_connections,
        timeout_s=timeout_s,
        name=name or model,
        environment=describe_environment(),
    )
    target = HttpTarget.openai(url, model=model, api=api.value, stream=stream, api_key=api_key, ignore_eos=ignore_eos)
    errors = Console(stderr=True)
    shows_progress = progress and errors.is_terminal
    with progress_bar(errors, options.name) if shows_progress else nullcontext() as on_progress:
        result = run_load_blocking(trace, target, options=options, on_progress=on_progress)

    console = Console()
    console.print(comparison_table([result], bounds=bounds), "", result_table(result), sep="\n")
    for warning in warnings_of(result):
        errors.print(f"warning: {warning}", style="yellow", markup=False, highlight=False)
    if output is not None:
        result.save(output)
    if plot_path is not None and result.successes:
        plot.save(_cdf([result]), plot_path)
    if result.interrupted:
        raise typer.Exit(130)
    if not result.successes:
        raise ServingError(f"none of {len(result.records)} requests succeeded: is the server at {url} up?")


@app.command()
def show(results: Results, goodput_ms: GoodputOption = None) -> None:
    """Compare results in one table.

    Example: mlsys workload show slow.json fast.json --goodput-ms ttft=200,itl=50
    """
    from rich.console import Console

    from mlsys_bench.workload.parse import parse_bounds
    from mlsys_bench.workload.results import load_result
    from mlsys_bench.workload.tables import comparison_table

    bounds = None if goodput_ms is None else parse_bounds(goodput_ms)
    Console().print(comparison_table([load_result(path) for path in results], bounds=bounds))


@app.command()
def plot(
    results: Results,
    output: Annotated[Path, typer.Option("--output", "-o", help="The figure: .svg, .png or .pdf.")],
    kind: Annotated[
        PlotKind, typer.Option(help="auto: throughput if a name has several results, else cdf.")
    ] = PlotKind.AUTO,
) -> None:
    """Plot results: those of one name are one curve, their loads its points.

    Example: mlsys workload plot rate1.json rate2.json rate4.json --kind throughput -o curve.svg
    """
    from mlsys_core import plot

    from mlsys_bench.workload.curves import throughput_latency
    from mlsys_bench.workload.results import load_result

    _require_folder(output)
    plot.check_format(output)
    loaded = [load_result(path) for path in results]
    systems: dict[str, list[LoadResult]] = {}
    for result in loaded:
        systems.setdefault(result.name, []).append(result)
    if kind is PlotKind.AUTO:
        kind = PlotKind.THROUGHPUT if any(len(runs) > 1 for runs in systems.values()) else PlotKind.CDF
    if kind is PlotKind.CDF:
        figure = _cdf(loaded)
    else:
        draw = plot.latency_vs_load if kind is PlotKind.LOAD else throughput_latency
        figure = draw({name: [result.point() for result in runs] for name, runs in systems.items()})
    plot.save(figure, output)
    typer.echo(f"{kind.value} of {len(loaded)} results: {output}")


def _cdf(results: Sequence[LoadResult]) -> Figure:
    """Plot one run's latencies of each kind, or the end-to-end latency of each of several runs."""
    from mlsys_core import plot

    if len(results) == 1:
        successes = results[0].successes
        kinds = {
            "end to end": [record.latency_s for record in successes],
            "first token": [record.ttft_s for record in successes if record.ttft_s is not None],
        }
        return plot.cdf({name: values for name, values in kinds.items() if values}, title=results[0].name)
    curves: dict[str, list[float]] = {}
    for number, result in enumerate(results, start=1):
        load = f"{number}: closed loop" if result.offered_rps is None else f"{result.offered_rps:.3g} req/s"
        curves[f"{result.name} ({load})"] = [record.latency_s for record in result.successes]
    return plot.cdf(curves)


def _require_folder(path: Path | None) -> None:
    if path is not None and not path.parent.is_dir():
        raise InvalidInputError(f"{path} cannot be written: the folder {path.parent} does not exist")
