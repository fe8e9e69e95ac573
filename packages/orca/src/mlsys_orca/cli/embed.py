"""The command ``mlsys orca embed``: lines of text to vectors."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer
from mlsys_core.cli import completion
from mlsys_core.cli.registered import Device
from mlsys_core.errors import InvalidInputError
from mlsys_orca.cli.options import (
    Dtype,
    PipelineParallel,
    ReplicaThreads,
    Sliced,
    TensorParallel,
    is_divided,
    num_threads_of,
    refuse_divided,
)

if TYPE_CHECKING:
    from mlsys_orca.engine.embedding import TextEncoder

DEFAULT_ENCODER = "all-minilm-l6-v2"
_LINES = 256  # embedded and written at a time


def embed(
    source: Annotated[str, typer.Argument(help="A file with a text per line, or - for standard input.")],
    model: Annotated[
        str,
        typer.Option(
            help="A name from 'mlsys models list', or an encoder's directory.", autocompletion=completion.models
        ),
    ] = DEFAULT_ENCODER,
    truncate: Annotated[bool, typer.Option(help="Cut texts that are too long, instead of refusing them.")] = False,
    dtype: Dtype = None,
    device: Device = "cpu",
    threads: ReplicaThreads = 0,
    tensor_parallel: TensorParallel = 1,
    pipeline_parallel: PipelineParallel = 1,
    sliced: Sliced = False,
) -> None:
    """Turn each line into a vector: JSON lines with "text" and "embedding" on standard output.

    Example: echo "Plants need light." | mlsys orca embed -
    """
    from mlsys_core.config import settings
    from mlsys_core.models import resolve_model
    from mlsys_core.plugins.loading import LoadContext
    from rich.console import Console
    from rich.progress import Progress

    degrees: Any = {"tensor_parallel": tensor_parallel, "pipeline_parallel": pipeline_parallel}
    refuse_divided({f"--device {device}": device != "cpu"}, **degrees, sliced=sliced)
    path = resolve_model(model, settings().cache_dir)
    if source != "-" and not Path(source).is_file():
        raise InvalidInputError(
            f"there is no file {source!r}; give a file with a text per line, or - for standard input"
        )
    with (
        _divided(path, dtype, threads, **degrees, sliced=sliced) as divided,
        sys.stdin if source == "-" else Path(source).open(encoding="utf-8") as texts,
        Progress(console=Console(stderr=True), transient=True) as progress,
    ):
        task = progress.add_task(f"loading {path.name}", total=None)
        from mlsys_core.device import get_device, run_on
        from mlsys_orca.backends.runner import intra_op_threads
        from mlsys_orca.engine.encoder_loaders import (
            load_encoder_by_name,
        )  # here: the bar shows while torch is imported

        context = LoadContext(
            device=device,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
            options={} if dtype is None else {"dtype": dtype},
        )
        encoder = divided or load_encoder_by_name(path, context)
        place = get_device(device)
        total = None if source == "-" else Path(source).stat().st_size
        progress.reset(task, description="embedding", total=total)
        with intra_op_threads(num_threads_of(threads)):
            for lines in _groups(texts):
                vectors = run_on(place, partial(encoder.embed, lines, truncate=truncate))
                for line, vector in zip(lines, vectors.tolist(), strict=True):
                    typer.echo(json.dumps({"text": line, "embedding": vector}))
                progress.advance(task, sum(len(line.encode()) + 1 for line in lines))


@contextmanager
def _divided(
    path: Path, dtype: str | None, threads: int, *, tensor_parallel: int, pipeline_parallel: int, sliced: bool
) -> Iterator[TextEncoder | None]:
    """Have processes load the parts of a divided encoder, before this one has threads; None: it is not divided."""
    if not is_divided(tensor_parallel=tensor_parallel, pipeline_parallel=pipeline_parallel, sliced=sliced):
        yield None
        return
    import torch
    from mlsys_orca.engine.divided_encoder import load_divided_encoder
    from mlsys_serving.processes import can_supervise

    if why := can_supervise():
        raise InvalidInputError(f"an encoder cannot be divided here: {why}")
    torch.set_num_threads(1)  # threads do not survive a fork
    encoder = load_divided_encoder(
        path,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        dtype=dtype,
        slices=sliced or None,
        num_threads=num_threads_of(threads, replicas=tensor_parallel * pipeline_parallel),
    )
    assert encoder.holders is not None
    with encoder.holders as holders:
        holders.start()
        yield encoder


def _groups(texts: TextIO) -> Iterator[list[str]]:
    """Yield the lines, some at a time, without their ends; empty ones are left out."""
    lines = (line.rstrip("\r\n") for line in texts)
    kept = (line for line in lines if line)
    while group := list(islice(kept, _LINES)):
        yield group
