"""``mlsys dvabatch explain``: how a model's requests are batched, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from mlsys_core.cli import completion
from mlsys_core.cli.options import Device, TrustCode

if TYPE_CHECKING:
    from mlsys_dvabatch.serve.preparing import Prepared
    from rich.console import Console

Shape = Annotated[str | None, typer.Option(help="Shape of one request, where the file leaves it open: 3,224,224.")]
Mask = Annotated[
    str | None,
    typer.Option(help="Input of a .pt2 that is 0 in padding, like attention_mask; found by trying where left out."),
]


def explain(
    model: Annotated[
        str, typer.Argument(help="As serve takes it: a name, file or folder.", autocompletion=completion.models)
    ],
    mask: Mask = None,
    shape: Shape = None,
    max_batch: Annotated[int, typer.Option(help="Largest batch.", min=1, max=4096)] = 64,
    device: Device = "cpu",
    trust_code: TrustCode = False,
) -> None:
    """Say how requests of a model are batched: its sizes, the padding that was tried, costs, and what follows.

    Example: mlsys dvabatch explain all-minilm-l6-v2
    """
    from mlsys_core.config import settings
    from mlsys_core.device import get_device
    from mlsys_dvabatch.serve.preparing import Batching, prepare
    from mlsys_dvabatch.serve.spec import wire_form
    from mlsys_dvabatch.stages.zoo import Loading
    from rich.console import Console

    console = Console(highlight=False)
    with Console(stderr=True).status(f"{model}: loading, trying and profiling"):
        prepared = prepare(
            model,
            settings().cache_dir,
            Batching(max_batch_size=max_batch),
            Loading(mask=mask, shape=parse_shape(shape), device=get_device(device), trust_code=trust_code),
        )
        wire_form(prepared.loaded, max_batch_size=max_batch)  # what serve refuses is refused here
    print_batching(prepared, console)


def print_batching(prepared: Prepared, console: Console) -> None:
    """Print what decides how requests are batched."""
    from mlsys_dvabatch.stages.model import Packable
    from mlsys_dvabatch.stages.slicing.sized import SizedModel

    model = prepared.loaded.model
    if isinstance(model, SizedModel):
        console.print("Requests may have several sizes:")
        for line in model.sizes.describe():
            console.print(f"  {line}", markup=False)
        for trial in model.trials:
            console.print(f"Padding {trial.describe()}.", markup=False, soft_wrap=True)
        console.print(
            "A batch holds requests of one size only: exact sizes."
            if model.padding is None
            else "A batch may hold several lengths, padded to its longest, where that costs less; by exact size else."
        )
        _print_mix(prepared, console, can_pad=model.padding is not None)
    elif isinstance(model, Packable):
        form = "packed without padding" if model.is_packed else "padded to the longest of a batch"
        console.print(f"Requests may have any length, {form}.")
    else:
        console.print("All requests have one shape.")
    if prepared.profile is not None:
        console.print(prepared.profile.describe(), soft_wrap=True)
    console.print(f"Policy: {prepared.policy_name}, {model.num_stages} stages.")


def _print_mix(prepared: Prepared, console: Console, *, can_pad: bool) -> None:
    """Print the costs, and what eight requests of several sizes cost batched in different ways."""
    from mlsys_dvabatch.scheduling.costs import remaining_s
    from mlsys_dvabatch.scheduling.policies.decisions import cluster
    from rich.box import SIMPLE
    from rich.table import Table

    costs, lengths = prepared.costs, prepared.loaded.lengths
    sizes = (1, 2, 4, 8)
    table = Table("units of a request", box=SIMPLE, padding=(0, 1, 0, 0))
    for size in sizes:
        table.add_column(f"{size}", justify="right")
    for length in lengths:
        table.add_row(f"{length}", *(f"{remaining_s(costs, 0, size, length) * 1e3:.2f}" for size in sizes))
    console.print("Milliseconds of a batch, by number of requests (units: the product of the dynamic dimensions):")
    console.print(table)
    mix = sorted(lengths[number % len(lengths)] for number in range(8))

    def batch_ms(each: list[int]) -> float:
        return remaining_s(costs, 0, len(each), max(each)) * 1e3

    alone = sum(batch_ms([length]) for length in mix)
    exact = sum(batch_ms([length] * mix.count(length)) for length in sorted(set(mix)))
    line = f"{len(mix)} requests of {', '.join(map(str, mix))} units: one by one {alone:.2f} ms, by size {exact:.2f} ms"
    if can_pad:
        chosen = cluster(lambda num, longest, _: remaining_s(costs, 0, num, longest), mix, num_behind=len(mix))
        groups = [[mix[place] for place in places] for places in chosen]
        text = " | ".join(", ".join(map(str, sorted(group))) for group in groups)
        line += f", in one padded batch {batch_ms(mix):.2f} ms"
        line += f"; chosen under load: {text} ({sum(map(batch_ms, groups)):.2f} ms)"
    console.print(f"{line}.", soft_wrap=True)


def parse_shape(text: str | None) -> tuple[int, ...] | None:
    """Return the shape that a text like "3,224,224" gives.

    Raises:
        InvalidInputError: it is none.
    """
    from mlsys_core.errors import InvalidInputError

    if text is None:
        return None
    try:
        shape = tuple(int(part) for part in text.split(","))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise InvalidInputError(f"--shape {text!r}: write positive numbers with commas, like 3,224,224")
    return shape
