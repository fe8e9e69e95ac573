"""Tables of ``mlsys dvabatch profile``: measurements of one model."""

from __future__ import annotations

from pathlib import Path

from mlsys_core.device import Device
from mlsys_core.graphs import write_graph
from mlsys_core.memory.plan import format_nbytes
from mlsys_core.profiling import ProfileTable
from mlsys_dvabatch.cli.serving_options import profiled
from mlsys_dvabatch.scheduling.costs import TableCosts, unit_name
from mlsys_dvabatch.scheduling.policies.registry import choose
from mlsys_dvabatch.stages.models.bert import BertStages
from mlsys_dvabatch.stages.profile import (
    BATCH_SIZES,
    boundary_nbytes,
    choose_num_stages,
    diversities_of,
    profile_operators,
)
from mlsys_dvabatch.stages.zoo import load, open_program
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import Progress
from rich.table import Table


def report(
    name: str,
    cache_dir: Path,
    console: Console,
    *,
    stages: int | None = None,
    max_batch_size: int = 64,
    shape: tuple[int, ...] | None = None,
    slice_at: str = "time",
    trust_code: bool = False,
    device: Device | None = None,
    graph: Path | None = None,
) -> None:
    """Profile a model and print the results; ``graph``: a file for the graph of its stages."""
    operators = None
    num_stages = stages
    with Progress(console=Console(stderr=True), transient=True) as bar:
        if Path(name).suffix in (".pt2", ".onnx") or _is_vision(name):
            program = open_program(name, shape, trust_code=trust_code, device=device)
            task = bar.add_task("operators")
            sizes = tuple(size for size in BATCH_SIZES if size <= max_batch_size)
            operators = profile_operators(
                program, batch_sizes=sizes, progress=lambda done, total: bar.update(task, completed=done, total=total)
            )
            if num_stages is None:
                trying = bar.add_task("numbers of stages")
                num_stages, tries = choose_num_stages(
                    program,
                    operators,
                    max_batch_size=max_batch_size,
                    progress=lambda done, total: bar.update(trying, completed=done, total=total),
                )
                lines = ", ".join(f"{each.num_stages}: {each.mean_s * 1e3:.1f} ms" for each in tries)
                console.print(f"Average latency at 9/10 load by number of stages: {lines}")
        loaded = load(
            name,
            cache_dir,
            num_stages=num_stages,
            shape=shape,
            slice_at=slice_at,
            trust_code=trust_code,
            device=device,
        )
        measuring = bar.add_task("stages")
        costs = profiled(
            loaded,
            cache_dir,
            max_batch_size=max_batch_size,
            progress=lambda done, total: bar.update(measuring, completed=done, total=total),
        )
    assert isinstance(costs, TableCosts)
    _print_costs(costs, console)
    if graph is not None:
        write_graph(loaded.to_networkx(costs), graph)
        console.print(f"wrote {graph}")
    length = costs.lengths[-1]
    between = boundary_nbytes(loaded.model, loaded.request, num=max_batch_size, length=length)
    if between:
        what = f"{max_batch_size} requests" + (f" of length {length}" if len(costs.lengths) > 1 else "")
        each = ", ".join(format_nbytes(nbytes) for nbytes in between)
        total = format_nbytes(sum(between))
        console.print(f"Between the stages, for {what}: {each}. Each buffer pair holds up to {total}.")
    is_encoder = isinstance(loaded.model, BertStages)
    found = diversities_of(has_lengths=is_encoder, profile=operators)
    names = ["load", *(["input"] if found.input else []), *(["operator"] if found.operator else [])]
    console.print(f"Diversities: {', '.join(names)}. Policy: {choose(found, can_pack=is_encoder)}.")


def _is_vision(name: str) -> bool:
    from mlsys_dvabatch.stages.models.vision import SHAPES

    return name in SHAPES


def _print_costs(costs: TableCosts, console: Console) -> None:
    measured: ProfileTable = costs.table
    sizes = measured[unit_name(0, costs.lengths[0])].batch_sizes
    table = Table("stage", *(["length"] if len(costs.lengths) > 1 else []), box=SIMPLE, padding=(0, 1, 0, 0))
    for size in sizes:
        table.add_column(f"{size}", justify="right")
    table.add_column("preferred", justify="right")
    for stage in range(costs.num_stages):
        for length in costs.lengths:
            unit = unit_name(stage, length)
            times = [f"{seconds * 1e3:.2f}" for seconds in measured[unit].seconds]
            where = [str(stage + 1), *([str(length)] if len(costs.lengths) > 1 else [])]
            table.add_row(*where, *times, str(measured.knee(unit)))
    console.print("Milliseconds of a batch, by batch size:")
    console.print(table)
