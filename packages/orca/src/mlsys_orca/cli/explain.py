"""The command ``mlsys orca explain``: a model's need of this machine's memory, and the requests that then fit."""

from __future__ import annotations

from typing import Annotated

import typer
from mlsys_core.cli.registered import Device
from mlsys_orca.cli.options import Dtype, Model, Weights
from mlsys_orca.loading.named import DEFAULT_MODEL, load


def explain(
    model: Model = DEFAULT_MODEL,
    dtype: Dtype = None,
    weights: Weights = None,
    device: Device = "cpu",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of prompt and answer that a request usually has.")] = 1024,
) -> None:
    """Say what fits: weights, keys and values per token, slots, and a --max-batch-size to begin with.

    Example: mlsys orca explain smollm2-135m-instruct --tokens 512
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    loaded = load(model, dtype, device=device, weights=weights)
    from mlsys_orca.api.server import available_memory_nbytes
    from mlsys_orca.engine.fit import fit_of

    fit = fit_of(loaded, available_nbytes=available_memory_nbytes(loaded.device), tokens_per_request=tokens)
    table = Table(box=box.SIMPLE, show_header=False)
    for name, value in fit.rows():
        table.add_row(name, value)
    console = Console()
    console.print(f"\n[bold]{loaded.name}[/bold]", highlight=False)
    console.print(table)
