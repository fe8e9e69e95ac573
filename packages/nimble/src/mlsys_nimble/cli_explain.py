"""``mlsys nimble explain`` and ``nets``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from mlsys_nimble.explain import Explanation
    from mlsys_nimble.nets.blocks import Net


def nets() -> None:
    """List the nets that explain and bench know by name.

    Example: mlsys nimble nets
    """
    from rich.console import Console
    from rich.table import Table

    from mlsys_nimble.nets import NETS

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
    svg: Annotated[Path | None, typer.Option(help="Draw the streams into this SVG file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole schedule as JSON.")] = False,
    trace: Annotated[
        Path | None, typer.Option(help="Replay once; write when each task ran (opens in Perfetto).")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Workers of the replay that --trace writes.")] = 2,
) -> None:
    """Show what is decided about a model ahead of time: operators, streams, synchronisations, passes, memory.

    The degree of logical concurrency is the largest number of operators of which none depends on another. Streams are
    Algorithm 1's: independent operators never share one. Of the |E'| edges of the minimum equivalent graph the |M|
    matched ones stay within a stream; each other costs a synchronisation.

    Example: mlsys nimble explain inception-v3 --svg inception.svg
    """
    from contextlib import nullcontext

    from rich.console import Console

    from mlsys_nimble.explain import explain as explained
    from mlsys_nimble.nets.resolve import load_model
    from mlsys_nimble.picture import stream_svg

    errors = Console(stderr=True)
    with errors.status("loading the model") if errors.is_terminal else nullcontext() as status:

        def progress(step: str) -> None:
            if status is not None:
                status.update(step)

        net = load_model(model, batch=batch)
        found = explained(net.module, net.inputs, progress=progress)
        if trace is not None:
            progress("preparing a replay")
            _write_trace(found, net, trace, threads)
    if svg is not None:
        _write(svg, stream_svg(found.optimised.assignment))
    if as_json:
        import json

        typer.echo(json.dumps({"model": model, **found.record()}, indent=1))
        return
    _print(found)
    for path in (svg, trace):
        if path is not None:
            typer.echo(f"wrote {path}")


def _write(path: Path, text: str) -> None:
    from mlsys_core.errors import InvalidInputError

    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidInputError(f"cannot write {path}: {error.strerror or error}") from error


def _write_trace(found: Explanation, net: Net, path: Path, threads: int) -> None:
    """One replay of the native executor as a trace, a track for each worker."""
    import torch
    from mlsys_core.profiling import Recorder, write_trace

    from mlsys_nimble.native.executor import NativeExecutor

    executor = NativeExecutor(found.program, num_threads=threads)
    inputs = [value for value in net.inputs if isinstance(value, torch.Tensor)]
    for _ in range(3):  # so that caches are warm and workers awake
        executor.run(inputs)
    recorder = Recorder()
    for task in executor.trace(inputs):
        name = task.operator if task.num_parts == 1 else f"{task.operator} {task.part + 1}/{task.num_parts}"
        span = {"start_ns": task.begin_ns, "end_ns": task.end_ns}
        recorder.complete(name, track=f"worker {task.worker}", **span)
    write_trace(recorder.recording(), path)


def _print(found: Explanation) -> None:
    from mlsys_core.memory.plan import format_nbytes
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
