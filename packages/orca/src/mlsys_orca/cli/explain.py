"""The command ``mlsys orca explain``: a model's need of this machine's memory, and the requests that then fit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from mlsys_core.cli.options import Device
from mlsys_orca.cli.options import (
    ActivationsForm,
    Dtype,
    KvDtype,
    Model,
    PipelineParallel,
    TensorParallel,
    Weights,
    refuse_divided,
)
from mlsys_orca.loading.named import DEFAULT_MODEL, load
from mlsys_orca.parallel.named import find_divided

if TYPE_CHECKING:
    from mlsys_orca.loading.loaded import LoadedModel


app = typer.Typer()


@app.command()
def explain(
    model: Model = DEFAULT_MODEL,
    dtype: Dtype = None,
    weights: Weights = None,
    activations: ActivationsForm = None,
    kv_dtype: KvDtype = None,
    device: Device = "cpu",
    tensor_parallel: TensorParallel = 1,
    pipeline_parallel: PipelineParallel = 1,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of prompt and answer that a request usually has.")] = 1024,
) -> None:
    """Say what fits: weights, keys and values per token, slots, and the limits that serve takes by itself.

    Example: mlsys orca explain smollm2-135m-instruct --tokens 512
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    degrees: Any = {"tensor_parallel": tensor_parallel, "pipeline_parallel": pipeline_parallel}
    refuse_divided({f"--device {device}": device != "cpu"}, **degrees)
    if max(degrees.values()) > 1:
        from mlsys_orca.parallel.group import Holders
        from mlsys_orca.parallel.parts import layout_rows, with_parts

        loaded, parts = find_divided(model, dtype, weights=weights, activations=activations, **degrees)
        with Holders(parts) as holders:
            holders.start()
            loaded, layout = with_parts(loaded, holders.loaded), layout_rows(loaded.config, holders)
            rows = [*_rows(loaded, tokens, kv_dtype), ("activations", str(loaded.rows or "float")), *layout]
    else:
        loaded = load(model, dtype, device=device, weights=weights, activations=activations)
        rows = [*_rows(loaded, tokens, kv_dtype), ("activations", _activations(loaded))]
    table = Table(box=box.SIMPLE, show_header=False)
    for name, value in rows:
        table.add_row(name, value)
    console = Console()
    console.print(f"\n[bold]{loaded.name}[/bold]", highlight=False)
    console.print(table)


def _rows(loaded: LoadedModel, tokens: int, kv_dtype: str | None) -> list[tuple[str, str]]:
    from mlsys_orca.api.server import available_memory_nbytes
    from mlsys_orca.engine.fit import fit_of

    available_nbytes = available_memory_nbytes(loaded.device)
    fit = fit_of(loaded, available_nbytes=available_nbytes, tokens_per_request=tokens, kv_dtype=kv_dtype)
    return fit.rows()


def _activations(loaded: LoadedModel) -> str:
    """Return the form in which rows meet the weights, and why."""
    from mlsys_orca.backends.native.decoder import NativeDecoder

    if not isinstance(loaded.model, NativeDecoder) or not (whole := loaded.model.num_integer_products):
        return str(loaded.rows or "float")
    count = len(loaded.model.linears)
    where = f"{whole} of {count} products" + ("" if whole == count else ", float in the others")
    return f"int8 in {where} ({loaded.rows.why})" if loaded.rows else f"int8 in {where}"
