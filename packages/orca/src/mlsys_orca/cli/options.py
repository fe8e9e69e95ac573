"""What the commands below ``mlsys orca`` share: options, and loading a model with a progress bar."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from mlsys_core.errors import InvalidInputError

if TYPE_CHECKING:
    from mlsys_orca.loading.loaded import LoadedModel
    from mlsys_orca.text.chat_template import ChatTemplate

Model = Annotated[str, typer.Argument(help="A name from 'mlsys models list', a GGUF file, or a model directory.")]
Adapters = Annotated[
    list[str] | None,
    typer.Option(help="NAME=DIRECTORY of a LoRA adapter (PEFT's), which requests then name as their model; repeat."),
]
ChatTemplateFile = Annotated[Path | None, typer.Option(help="A Jinja file in place of the model's own chat template.")]
Dtype = Annotated[str | None, typer.Option(help="fp32 or bf16; by default what suits the device.")]
Weights = Annotated[
    str | None,
    typer.Option(
        help="float: in the dtype. packed: as the GGUF file has them, the same values in less memory. int8, int4: "
        "quantised while loading, smaller and a little less exact. By default packed where that is fast, else float."
    ),
]
Threads = Annotated[
    int, typer.Option(min=0, help="Threads of the model's operators; 0: all cores this process may use.")
]
DEFAULT_MODEL = "smollm2-135m-instruct"


def num_threads_of(threads: int) -> int:
    """``threads``, or all cores this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return threads or cores


def load(
    model: str,
    dtype: str | None,
    *,
    device: str = "cpu",
    weights: str | None = None,
    adapters: list[str] | None = None,
    chat_template: Path | None = None,
) -> LoadedModel:
    """Resolve and load ``model`` with a progress bar on stderr.

    Raises:
        InvalidInputError: as ``load_by_name``; or an adapter is not written NAME=DIRECTORY, or does not fit.
    """
    from mlsys_core.config import settings
    from mlsys_core.models import resolve_model
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    path: Path = resolve_model(model, settings().cache_dir)
    console = Console(stderr=True)
    columns = [TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn()]
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(f"loading {path.name}", total=None)
        from mlsys_core.plugins.loading import LoadContext
        from mlsys_orca.loading.registered import load_by_name  # here: the bar shows while torch is imported

        given = {"dtype": dtype, "weights": weights, "backend": "torch" if adapters else None}
        context = LoadContext(
            device=device,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
            options={name: value for name, value in given.items() if value is not None},
        )
        loaded = load_by_name(path, context)
    if adapters:
        from mlsys_orca.model.adapters import AdaptedDecoder

        loaded = replace(loaded, model=AdaptedDecoder(loaded.model, _directories(adapters)))
    if chat_template is not None:
        loaded = replace(loaded, chat_template=_read_template(chat_template, loaded))
    return loaded


def _directories(adapters: list[str]) -> dict[str, str]:
    pairs = [adapter.partition("=") for adapter in adapters]
    if wrong := [name for name, _, path in pairs if not name or not path]:
        raise InvalidInputError(f"--adapter {wrong[0]!r} is not written NAME=DIRECTORY")
    return {name: path for name, _, path in pairs}


def _read_template(path: Path, loaded: LoadedModel) -> ChatTemplate:
    from mlsys_orca.text.chat_template import ChatTemplate

    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise InvalidInputError(f"the chat template {path} cannot be read: {error}") from error
    return ChatTemplate(source, special_tokens=loaded.tokenizer.special_tokens)
