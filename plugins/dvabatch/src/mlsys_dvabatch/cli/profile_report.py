"""Tables of ``mlsys dvabatch profile``: measurements of one model."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from mlsys_core.device import Device
from mlsys_core.errors import InvalidInputError
from mlsys_core.graphs import write_graph
from mlsys_core.memory.plan import format_nbytes
from mlsys_core.profiling import ProfileTable
from mlsys_dvabatch.engine import NO_EXITS
from mlsys_dvabatch.scheduling.costs import TableCosts, catch_up_s, unit_name
from mlsys_dvabatch.scheduling.policies.registry import choose
from mlsys_dvabatch.serve.preparing import profiled
from mlsys_dvabatch.serve.spec import wire_form
from mlsys_dvabatch.stages.model import Packable
from mlsys_dvabatch.stages.profile import (
    BATCH_SIZES,
    boundary_nbytes,
    choose_num_stages,
    diversities_of,
    profile_operators,
)
from mlsys_dvabatch.stages.slicing.program import naming
from mlsys_dvabatch.stages.zoo import Loading, load, open_program
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
    has_exits: bool = False,
    trust_code: bool = False,
    device: Device | None = None,
    graph: Path | None = None,
) -> None:
    """Profile a model and print the results.

    Args:
        name: See :func:`~mlsys_dvabatch.stages.zoo.load`, for the other options too.
        cache_dir: Folder of models and profiles.
        console: Output.
        stages: Number of stages; None: found by trying.
        max_batch_size: Largest batch measured.
        shape: Shape of one request.
        slice_at: Rule for cuts.
        has_exits: Cut the model at its exits, which decide the number of stages.
        trust_code: Let a ``.pt2`` file run code.
        device: Device to measure on.
        graph: File for the graph of the stages.

    Raises:
        InvalidInputError: no such model, one that is not served, or one without exits where these are asked for.
    """
    operators = None
    num_stages = stages
    with Progress(console=Console(stderr=True), transient=True) as bar:
        if not has_exits and (Path(name).suffix in (".pt2", ".onnx") or _is_vision(name)):
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
            Loading(
                num_stages=num_stages,
                shape=shape,
                slice_at=slice_at,
                trust_code=trust_code,
                exit_confidence=1.0 if has_exits else None,  # costs do not depend on it
                device=device,
            ),
        )
        if has_exits and not loaded.has_exits:
            raise InvalidInputError(f"{name}: {NO_EXITS}")
        with naming(name):  # what serve refuses is refused here
            loaded.model.isolation.require(max_batch_size)
            wire_form(loaded, max_batch_size=max_batch_size)
        measuring = bar.add_task("stages")
        profile = profiled(
            loaded,
            cache_dir,
            max_batch_size=max_batch_size,
            progress=lambda done, total: bar.update(measuring, completed=done, total=total),
        )
    costs = profile.costs
    console.print(profile.describe())
    _print_costs(costs, console, has_exits=loaded.has_exits)
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
    if loaded.has_exits:
        console.print("Policy: early-exit.")
        return
    has_lengths = len(costs.lengths) > 1
    found = diversities_of(has_lengths=has_lengths, profile=operators)
    names = ["load", *(["input"] if found.input else []), *(["operator"] if found.operator else [])]
    chosen = choose(found, can_pack=isinstance(loaded.model, Packable))
    console.print(f"Diversities: {', '.join(names)}. Policy: {chosen}.")


def _is_vision(name: str) -> bool:
    from mlsys_dvabatch.stages.vision import SHAPES

    return name in SHAPES


def _print_costs(costs: TableCosts, console: Console, *, has_exits: bool) -> None:
    """Print a row for each stage and length, and for each exit one of all stages up to it."""
    measured: ProfileTable = costs.table
    sizes = measured[unit_name(0, costs.lengths[0])].batch_sizes
    many = len(costs.lengths) > 1
    table = Table("stage", *(["length"] if many else []), box=SIMPLE, padding=(0, 1, 0, 0))
    for size in sizes:
        table.add_column(f"{size}", justify="right")
    table.add_column("preferred", justify="right")
    for stage in range(costs.num_stages):
        for length in costs.lengths:
            unit = unit_name(stage, length)
            table.add_row(*_row(f"{stage + 1}", length, measured[unit].seconds, many=many), str(measured.knee(unit)))
    if has_exits:
        table.add_section()
        for stage in range(costs.num_stages):
            for length in costs.lengths:
                seconds = [catch_up_s(costs, stage + 1, size, length) for size in sizes]
                table.add_row(*_row(f"to exit {stage + 1}", length, seconds, many=many))
    console.print("Milliseconds of a batch, by batch size:")
    console.print(table)


def _row(what: str, length: int, seconds: Iterable[float], *, many: bool) -> list[str]:
    return [what, *([str(length)] if many else []), *(f"{each * 1e3:.2f}" for each in seconds)]
