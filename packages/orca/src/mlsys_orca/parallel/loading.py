"""A path and a place to the part of the model that runs there; or to all but the weights, for the master.

Called by holders (:func:`load_shard`) and by the engine's master (:func:`load_head_only`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mlsys_orca.backends.native.plan_writer import LoweringError
from mlsys_orca.backends.runner import intra_op_threads
from mlsys_orca.loading.load import DTYPES, check_forms, default_dtype, model_files
from mlsys_orca.loading.loaded import DividedModel, LoadedModel
from mlsys_orca.loading.rows import Activations, rows_of
from mlsys_orca.model.blocks import Decoder
from mlsys_orca.model.config import ModelConfig
from mlsys_orca.model.decoder import DecoderModel
from mlsys_orca.model.family import Family
from mlsys_orca.model.weights.checkpoint import Checkpoint, Progress, WeightForm
from mlsys_orca.model.weights.damage import readable
from mlsys_orca.parallel.native_shard import NativeShard
from mlsys_orca.parallel.placement import Placement, shard_config
from mlsys_orca.parallel.reading import load_part


def load_head_only(
    path: Path | str,
    *,
    dtype: str | None = None,
    placement: Placement | None = None,
) -> LoadedModel:
    """Load all of a model but its weights: configuration, tokenizer, chat template.

    Args:
        path: As of :func:`~mlsys_orca.loading.load.load_model`.
        dtype: As there.
        placement: The degrees that the model is to be divided in; None: they are not checked.

    Raises:
        InvalidInputError: there is no model at ``path``, it is damaged, or it does not divide so.
    """
    check_forms(dtype=dtype, weights=None, backend="auto")
    where, load = model_files(path)

    def read(
        family: Family,
        config: ModelConfig,
        checkpoint: Checkpoint,
        *,
        dtype: torch.dtype,
        device: torch.device,
        **_: Any,
    ) -> DecoderModel:
        del family, checkpoint
        if placement is not None:
            shard_config(config, placement)
        return DividedModel(config=config, dtype=dtype, device=device)

    with readable(where):
        return load(where, dtype=DTYPES[dtype or default_dtype()], device=torch.device("cpu"), read=read)


def load_shard(
    path: Path | str,
    placement: Placement,
    *,
    dtype: str | None = None,
    weights: WeightForm | None = None,
    num_threads: int = 1,
    progress: Progress | None = None,
    activations: Activations | None = None,
) -> NativeShard:
    """Load the part of a model at ``placement``; no more of the file is read, and no more is held.

    It runs as a native program, which gives the same bits for all degrees, one process included.

    Args:
        path: As of :func:`~mlsys_orca.loading.load.load_model`.
        placement: The part's place.
        dtype: As there, and so the others.
        weights: Form of matrices.
        num_threads: torch's threads while loading.
        progress: Called with the bytes of this part read so far and those in all.
        activations: As of ``load_model``.

    Raises:
        InvalidInputError: as ``load_model``, or the model does not divide so.
        LoweringError: some part of the model has no native operator.
        MissingDependencyError: there is no C++ compiler.

    Example:
        >>> shard = load_shard("model.gguf", Placement(rank=1, num_ranks=3))  # doctest: +SKIP
        >>> shard.join(reducer, num_threads=1).run(inputs, None, out, kv_cache)  # doctest: +SKIP
    """
    check_forms(dtype=dtype, weights=weights, backend="native", activations=activations)
    where, load = model_files(path)
    whole: list[ModelConfig] = []

    def read(family: Family, config: ModelConfig, checkpoint: Checkpoint, **options: Any) -> DecoderModel:
        whole.append(config)
        return load_part(family, config, checkpoint, placement=placement, **options)

    with intra_op_threads(num_threads), readable(where):
        options: dict[str, Any] = {"dtype": DTYPES[dtype or default_dtype()], "device": torch.device("cpu")}
        model = load(where, weights=weights or "packed", read=read, progress=progress, **options).model
        if not isinstance(model, Decoder):
            raise LoweringError(f"a model by {type(model).__name__}")
        rows = rows_of(where, activations, dtype=dtype, weights=weights)
        return NativeShard(model, whole[0], placement, activations=rows.form)
