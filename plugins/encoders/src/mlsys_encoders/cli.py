"""The command ``mlsys orca embed``: lines of text to vectors, without a server."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated, TextIO

import typer
from mlsys_core.cli import completion
from mlsys_core.cli.options import Device
from mlsys_core.errors import InvalidInputError

app = typer.Typer()
_LINES = 64  # embedded and written at a time, as one batch


@app.command()
def embed(
    source: Annotated[str, typer.Argument(help="A file with a text per line, or - for standard input.")],
    model: Annotated[
        str,
        typer.Option(help="As 'mlsys dvabatch serve' takes it: a name or folder.", autocompletion=completion.models),
    ] = "all-minilm-l6-v2",
    truncate: Annotated[bool, typer.Option(help="Cut texts that are too long, instead of refusing them.")] = False,
    weights: Annotated[str, typer.Option(help="float, or int8: int8 products, faster and less exact.")] = "float",
    threads: Annotated[int, typer.Option(min=0, help="Threads of torch; 0: torch's own number.")] = 0,
    device: Device = "cpu",
) -> None:
    """Turn each line into a vector: JSON lines with "text" and "embedding" on standard output.

    Example: echo "Plants need light." | mlsys orca embed -
    """
    from mlsys_core.config import settings
    from mlsys_core.device import get_device
    from rich.console import Console

    if source != "-" and not Path(source).is_file():
        raise InvalidInputError(
            f"there is no file {source!r}; give a file with a text per line, or - for standard input"
        )
    with Console(stderr=True).status(f"loading {model}"):
        import torch  # here: the line shows while torch is imported
        from mlsys_dvabatch.stages.zoo import Loading, load

        from mlsys_encoders.serve.wire import EncoderWire

        if threads:
            torch.set_num_threads(threads)
        loading = Loading(num_stages=1, is_packed=True, weights=weights, device=get_device(device))
        loaded = load(model, settings().cache_dir, loading)
    texts = loaded.wire.texts if isinstance(loaded.wire, EncoderWire) else None
    if texts is None or texts.config.head is not None:
        raise InvalidInputError(f"{model} gives no vectors of texts: an encoder with a tokenizer.json is needed")
    with sys.stdin if source == "-" else Path(source).open(encoding="utf-8") as file, torch.inference_mode():
        for lines in _groups(file):
            vectors = loaded.model.answers(texts.encode(lines, is_cut=truncate))
            for line, (vector,) in zip(lines, vectors, strict=True):
                typer.echo(json.dumps({"text": line, "embedding": vector.tolist()}))


def _groups(texts: TextIO) -> Iterator[list[str]]:
    """Yield the lines, some at a time, without their ends; empty ones are left out."""
    lines = (line.rstrip("\r\n") for line in texts)
    filled = (line for line in lines if line)
    while group := list(islice(filled, _LINES)):
        yield group
