"""``mlsys nimble explain`` and ``nets``."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from mlsys_core.cli.options import GRAPH_HELP, Device, TrustCode, check_graph_file

if TYPE_CHECKING:
    from mlsys_nimble.backends.cpu.executor import NativeExecutor
    from mlsys_nimble.explain import Explanation
    from mlsys_nimble.nets.blocks import Net
    from torch import Tensor

GraphFile = Annotated[
    Path | None,
    typer.Option(
        "--graph", "--svg", metavar="FILE", callback=check_graph_file, help=f"{GRAPH_HELP} --svg is its old name."
    ),
]


_REPLAYS = 20  # of a trace


def nets() -> None:
    """List the nets that explain and bench know by name.

    Example: mlsys nimble nets
    """
    from mlsys_nimble.nets import NETS
    from rich.console import Console
    from rich.table import Table

    table = Table("net", "what it is", "parameters")
    table.columns[2].justify = "right"
    for entry in NETS:
        table.add_row(entry.name, entry.help, f"{entry.num_parameters:,}")
    console = Console()
    console.print(table)
    console.print("Besides: timm:NAME, torchvision:NAME, transformers:FOLDER, FILE.pt2, package.module:function.")


def explain(
    model: Annotated[
        str,
        typer.Argument(
            help="A net's name (mlsys nimble nets), timm:NAME, torchvision:NAME, transformers:FOLDER, a .pt2 file, "
            "or package.module:function, which gives (module, example inputs)."
        ),
    ],
    batch: Annotated[int, typer.Option(min=1, help="Examples in a call.")] = 1,
    graph: GraphFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole schedule as JSON.")] = False,
    trace: Annotated[
        Path | None, typer.Option(help=f"Replay {_REPLAYS} times; write when each task ran (opens in Perfetto).")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Workers of --trace.")] = 2,
    device: Device = "cpu",
    trust_code: TrustCode = False,
) -> None:
    """Show what is decided about a model ahead of time: operators, streams, synchronisations, passes, memory.

    The degree of logical concurrency is the largest number of operators of which none depends on another. Streams are
    Algorithm 1's: independent operators never share one. Of the |E'| edges of the minimum equivalent graph the |M|
    matched ones stay within a stream; each other costs a synchronisation.

    The graph of --graph has the operators' streams; with --trace their workers and measured times, and on a CUDA
    device the streams that replay them. `mlsys trace summary FILE` adds a trace up by operator.

    Example: mlsys nimble explain inception-v3 --graph inception.svg
    """
    from contextlib import nullcontext

    from mlsys_core.device import get_device
    from mlsys_core.errors import InvalidInputError
    from mlsys_core.graphs import write_graph
    from mlsys_nimble.explain import explain as explained
    from mlsys_nimble.nets.resolve import load_model
    from rich.console import Console

    torch_device = get_device(device).torch_name
    if torch_device != "cpu" and trace is not None:
        raise InvalidInputError(f"--trace replays on the CPU's own executor: leave out --device {device}")
    errors = Console(stderr=True)
    with errors.status("loading the model") if errors.is_terminal else nullcontext() as status:

        def progress(step: str) -> None:
            if status is not None:
                status.update(step)

        net = load_model(model, batch=batch, trust_code=trust_code).on(torch_device)
        found = explained(net.module, net.inputs, progress=progress)
        executor: NativeExecutor | None = None
        if trace is not None:
            progress("preparing a replay")
            executor = _executor(found, net, threads)
            _write_trace(executor, net, trace)
    if graph is not None:
        if torch_device.startswith("cuda"):
            from mlsys_nimble.backends.cuda.plan import plan_streams

            drawn = plan_streams(found.program.graph()).to_networkx(found.program.to_networkx())
        else:
            drawn = (found if executor is None else executor.schedule).to_networkx()
        write_graph(drawn, graph)
    if as_json:
        import json

        typer.echo(json.dumps({"model": model, **found.record()}, indent=1))
        return
    _print(found)
    for path in (graph, trace):
        if path is not None:
            typer.echo(f"wrote {path}")


def _tensors(net: Net) -> list[Tensor]:
    from torch.utils._pytree import tree_leaves

    return [leaf for leaf in tree_leaves(net.inputs) if hasattr(leaf, "data_ptr")]


def _executor(found: Explanation, net: Net, threads: int) -> NativeExecutor:
    """Make the native executor, and warm up its caches and workers."""
    from mlsys_nimble.backends.cpu.executor import NativeExecutor

    executor = NativeExecutor(found.program, num_threads=threads)
    for _ in range(3):
        executor.run(_tensors(net))
    return executor


def _write_trace(executor: NativeExecutor, net: Net, path: Path) -> None:
    """Write replays as a trace, with a track for each worker."""
    from mlsys_core.errors import InvalidInputError
    from mlsys_core.profiling import Recorder, write_trace

    recorder = Recorder()
    for task in itertools.chain.from_iterable(executor.trace(_tensors(net)) for _ in range(_REPLAYS)):
        part = {} if task.num_parts == 1 else {"part": f"{task.part + 1}/{task.num_parts}"}
        recorder.complete(task.operator, task.begin_ns, task.end_ns, track=f"worker {task.worker}", **part)
    try:
        write_trace(recorder.recording(), path)
    except OSError as error:
        raise InvalidInputError(f"cannot write {path}: {error.strerror or error}") from error


def _print(found: Explanation) -> None:
    from mlsys_core.memory.plan import format_nbytes
    from mlsys_nimble.state.guard import refusal
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table("", "captured", "after passes")
    before, after = found.captured.counts(), found.optimised.counts()
    words = {
        "operators": "operators",
        "edges": "edges",
        "meg_edges": "edges of the minimum equivalent graph, |E'|",
        "matched_edges": "matched edges, |M|",
        "degree_of_logical_concurrency": "degree of logical concurrency",
        "streams": "streams, |V| - |M|",
        "synchronizations": "synchronisations, |E'| - |M|",
    }
    for key, text in words.items():
        table.add_row(text, str(before[key]), str(after[key]))
    console.print(table)
    passes = Table("pass", "operators", "fewer by")
    for one in found.passes:
        change = one.num_operators_before - one.num_operators_after
        passes.add_row(one.name, str(one.num_operators_after), str(change) if change else "")
    console.print(passes)
    memory = found.memory
    console.print(
        f"memory: {format_nbytes(memory.peak_nbytes)} for all intermediate results, {memory.ratio:.2f}x the lower "
        f"bound of {format_nbytes(memory.lower_bound_nbytes)}; without reuse {format_nbytes(memory.naive_nbytes)}"
    )
    reason = refusal()
    console.print(
        f"changed weights: every byte is compared at each call ({reason})"
        if reason
        else "changed weights: large tensors are compared when the system reports a written page, small ones always"
    )
