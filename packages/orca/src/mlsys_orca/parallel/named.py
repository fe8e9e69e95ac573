"""Find a divided model that a command names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mlsys_core.errors import InvalidInputError

if TYPE_CHECKING:
    from mlsys_orca.loading.loaded import LoadedModel
    from mlsys_orca.model.weights.checkpoint import WeightForm
    from mlsys_orca.parallel.ranks import ParallelModel


def find_divided(
    model: str,
    dtype: str | None,
    *,
    tensor_parallel: int,
    pipeline_parallel: int,
    weights: str | None = None,
    activations: str | None = None,
    chat_template: Path | None = None,
    share: float = 1.0,
) -> tuple[LoadedModel, ParallelModel]:
    """Resolve ``model``; return all of it but the weights, and its parts, which holders are to load.

    ``share`` is the part of the model that this machine is to hold.

    Raises:
        InvalidInputError: there is no such model, or it does not divide so or fit the memory.
    """
    import torch
    from mlsys_core.config import settings
    from mlsys_core.models import resolve_model
    from mlsys_serving.processes import can_supervise

    from mlsys_orca.loading.load import check_forms
    from mlsys_orca.loading.named import read_template
    from mlsys_orca.parallel.parts import divide

    if why := can_supervise():
        raise InvalidInputError(f"a model cannot be divided here: {why}")
    torch.set_num_threads(1)  # threads do not survive the fork of the processes to come
    check_forms(dtype=dtype, weights=weights, backend="auto", activations=activations)
    form: WeightForm | None = weights  # type: ignore[assignment]  # checked
    loaded, parts = divide(
        resolve_model(model, settings().cache_dir),
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        dtype=dtype,
        weights=form,
        activations=activations,  # type: ignore[arg-type]  # checked
        share=share,
    )
    if chat_template is not None:
        loaded = replace(loaded, chat_template=read_template(chat_template, loaded))
    return loaded, parts
