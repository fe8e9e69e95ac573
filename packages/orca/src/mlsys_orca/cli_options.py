"""What the commands below ``mlsys orca`` share: options, and loading a model with a progress bar."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

if TYPE_CHECKING:
    from mlsys_orca.loading.checkpoint import WeightForm
    from mlsys_orca.loading.loaded import LoadedModel

Dtype = Annotated[str | None, typer.Option(help="fp32 or bf16; by default what suits the device.")]
Weights = Annotated[
    str | None,
    typer.Option(
        help="float: in the dtype. packed: as the GGUF file has them, the same values in less memory. int8, int4: "
        "quantised while loading, smaller and a little less exact. By default packed where that is fast, else float."
    ),
]
Device = Annotated[str, typer.Option(help="Where the model runs: cpu, cuda, or cuda:1 for the second GPU.")]
Threads = Annotated[
    int, typer.Option(min=0, help="Threads of the model's operators; 0: all cores this process may use.")
]
DEFAULT_MODEL = "smollm2-135m-instruct"


def num_threads_of(threads: int) -> int:
    """``threads``, or all cores this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return threads or cores


def load(model: str, dtype: str | None, *, device: str = "cpu", weights: str | None = None) -> LoadedModel:
    """Resolve and load ``model`` with a progress bar on stderr."""
    from mlsys_core.config import settings
    from mlsys_core.models import resolve_model
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    path: Path = resolve_model(model, settings().cache_dir)
    console = Console(stderr=True)
    columns = [TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn()]
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(f"loading {path.name}", total=None)
        from mlsys_orca.loading.load import load_model  # here: the bar shows while torch is imported

        return load_model(
            path,
            dtype=dtype,
            device=device,
            weights=cast("WeightForm | None", weights),  # load_model refuses others
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
