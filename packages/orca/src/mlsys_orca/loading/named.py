"""Load a model that a command names, with a progress bar."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mlsys_core.errors import InvalidInputError

if TYPE_CHECKING:
    from mlsys_orca.loading.loaded import LoadedModel
    from mlsys_orca.text.chat_template import ChatTemplate

DEFAULT_MODEL = "smollm2-135m-instruct"


def load(
    model: str,
    dtype: str | None,
    *,
    device: str = "cpu",
    weights: str | None = None,
    activations: str | None = None,
    adapters: Mapping[str, str] | None = None,
    runs_in_torch: bool = False,
    chat_template: Path | None = None,
) -> LoadedModel:
    """Resolve and load ``model`` with a progress bar on stderr.

    ``adapters`` are directories by name. ``runs_in_torch`` keeps the model from native kernels, so that its layers can
    be compiled.

    Raises:
        InvalidInputError: as ``load_by_name``; or an adapter does not fit.
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

        from mlsys_orca.loading.load import load_by_name  # here: the bar shows while torch is imported

        in_torch = bool(adapters) or runs_in_torch
        given = {"dtype": dtype, "weights": weights, "activations": activations}
        given["backend"] = "torch" if in_torch else None
        context = LoadContext(
            device=device,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
            options={name: value for name, value in given.items() if value is not None},
        )
        loaded = load_by_name(path, context)
    if adapters:
        from mlsys_orca.model.adapters import AdaptedDecoder, read_adapter

        files = {name: read_adapter(path) for name, path in adapters.items()}
        keys = {name: found.key_of(name) for name, found in files.items()}
        adapted = AdaptedDecoder(loaded.model, {keys[name]: found for name, found in files.items()})
        loaded = replace(loaded, model=adapted, adapters=keys)
    if chat_template is not None:
        loaded = replace(loaded, chat_template=read_template(chat_template, loaded))
    return loaded


def read_template(path: Path, loaded: LoadedModel) -> ChatTemplate:
    """Return the chat template of a Jinja file, for ``loaded``.

    Raises:
        InvalidInputError: it cannot be read.
    """
    from mlsys_orca.text.chat_template import ChatTemplate

    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise InvalidInputError(f"the chat template {path} cannot be read: {error}") from error
    return ChatTemplate(source, special_tokens=loaded.tokenizer.special_tokens)
