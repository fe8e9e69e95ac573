"""``mlsys nimble explain``, with its profile, and ``nets``."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from mlsys_core.cli.options import GRAPH_HELP, Device, TrustCode, check_graph_file

if TYPE_CHECKING:
    from mlsys_nimble.backends.cpu.decisions import TaskTime
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


@dataclass(frozen=True, slots=True)
class OperatorTime:
    """Time of one operator in a replay."""

    name: str
    seconds: float  # sum of all its tasks, median over replays
    num_tasks: int


@dataclass(frozen=True, slots=True)
class Profile:
    """Time of a replay, by operator."""

    operators: tuple[OperatorTime, ...]  # longest first
    elapsed_s: float  # from the first task's begin to the last one's end, median over replays

    @property
    def busy_s(self) -> float:
        """Return the busy seconds of all workers together."""
        return sum(operator.seconds for operator in self.operators)

    def by_kind(self, kind_of: Mapping[str, str]) -> dict[str, float]:
        """Return the seconds of each kind of operator, longest first; those that ``kind_of`` lacks are ``other``."""
        totals: dict[str, float] = {}
        for operator in self.operators:
            kind = kind_of.get(operator.name, "other")
            totals[kind] = totals.get(kind, 0.0) + operator.seconds
        return dict(sorted(totals.items(), key=lambda pair: -pair[1]))


def profile(replays: Iterable[Sequence[TaskTime]]) -> Profile:
    """Return medians over replays of the same schedule.

    Raises:
        ValueError: there is no replay.

    Example:
        >>> from types import SimpleNamespace as Ran
        >>> replay = [Ran(operator="conv", begin_ns=0, end_ns=3000), Ran(operator="add", begin_ns=3000, end_ns=4000)]
        >>> [one.name for one in profile([replay]).operators]
        ['conv', 'add']
    """
    spent: dict[str, list[int]] = {}
    counts: dict[str, int] = {}
    elapsed: list[int] = []
    for tasks in replays:
        own: dict[str, list[int]] = {}
        for task in tasks:
            own.setdefault(task.operator, []).append(task.end_ns - task.begin_ns)
        for name, durations in own.items():
            spent.setdefault(name, []).append(sum(durations))
            counts[name] = len(durations)
        elapsed.append(
            max((task.end_ns for task in tasks), default=0) - min((task.begin_ns for task in tasks), default=0)
        )
    if not elapsed:
        raise ValueError("no replay to profile")
    operators = [OperatorTime(name, statistics.median(times) / 1e9, counts[name]) for name, times in spent.items()]
    operators.sort(key=lambda operator: -operator.seconds)
    return Profile(tuple(operators), statistics.median(elapsed) / 1e9)


_REPLAYS = 20  # of a profile
_PROFILED = 25  # operators shown


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
        Path | None, typer.Option(help="Replay once; write when each task ran (opens in Perfetto).")
    ] = None,
    profile: Annotated[bool, typer.Option("--profile", help="Replay it and show where the time goes.")] = False,
    threads: Annotated[int, typer.Option(min=1, help="Workers of --trace and --profile.")] = 2,
    device: Device = "cpu",
    trust_code: TrustCode = False,
) -> None:
    """Show what is decided about a model ahead of time: operators, streams, synchronisations, passes, memory.

    The degree of logical concurrency is the largest number of operators of which none depends on another. Streams are
    Algorithm 1's: independent operators never share one. Of the |E'| edges of the minimum equivalent graph the |M|
    matched ones stay within a stream; each other costs a synchronisation.

    The graph of --graph has the operators' streams; with --profile their workers and measured times, and on a CUDA
    device the streams that replay them.

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
    replays = trace is not None or profile
    if torch_device != "cpu" and replays:
        what = "--trace and --profile replay on the CPU's own executor"
        raise InvalidInputError(f"{what}: leave out --device {device}")
    errors = Console(stderr=True)
    with errors.status("loading the model") if errors.is_terminal else nullcontext() as status:

        def progress(step: str) -> None:
            if status is not None:
                status.update(step)

        net = load_model(model, batch=batch, trust_code=trust_code).on(torch_device)
        found = explained(net.module, net.inputs, progress=progress)
        executor: NativeExecutor | None = None
        if replays:
            progress("preparing a replay")
            executor = _executor(found, net, threads)
        if trace is not None and executor is not None:
            _write_trace(executor, net, trace)
    if graph is not None:
        if torch_device.startswith("cuda"):
            from mlsys_nimble.backends.cuda.plan import plan_streams

            drawn = plan_streams(found.program.graph()).to_networkx(found.program.to_networkx())
        else:
            drawn = (executor.schedule if profile and executor is not None else found).to_networkx()
        write_graph(drawn, graph)
    if as_json:
        import json

        typer.echo(json.dumps({"model": model, **found.record()}, indent=1))
        return
    _print(found)
    if profile and executor is not None:
        _print_profile(executor, net)
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
    """Write one replay as a trace, with a track for each worker."""
    from mlsys_core.errors import InvalidInputError
    from mlsys_core.profiling import Recorder, write_trace

    recorder = Recorder()
    for task in executor.trace(_tensors(net)):
        name = task.operator if task.num_parts == 1 else f"{task.operator} {task.part + 1}/{task.num_parts}"
        recorder.complete(name, task.begin_ns, task.end_ns, track=f"worker {task.worker}")
    try:
        write_trace(recorder.recording(), path)
    except OSError as error:
        raise InvalidInputError(f"cannot write {path}: {error.strerror or error}") from error


def _print_profile(executor: NativeExecutor, net: Net) -> None:
    from rich.console import Console
    from rich.table import Table

    found = profile(executor.trace(_tensors(net)) for _ in range(_REPLAYS))
    kinds = {operator.name: type(operator.kind).__name__ for operator in executor.schedule.layout.program.operators}
    console = Console()
    console.print(
        f"{_REPLAYS} replays on {executor.num_threads} workers: {found.elapsed_s * 1e3:.3f} ms each, "
        f"workers busy for {found.busy_s / max(executor.num_threads * found.elapsed_s, 1e-12):.0%} of it"
    )
    table = Table("operator", "kind", "tasks", "us", "share")
    for operator in found.operators[:_PROFILED]:
        share = f"{operator.seconds / found.busy_s:.1%}"
        kind = kinds.get(operator.name, "")
        table.add_row(operator.name, kind, str(operator.num_tasks), f"{operator.seconds * 1e6:.1f}", share)
    console.print(table)
    parts = [f"{kind} {seconds / found.busy_s:.0%}" for kind, seconds in found.by_kind(kinds).items()]
    console.print(f"by kind: {', '.join(parts)}")


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
