"""A path and a place to the part of the model that runs there; or to all but the weights, for the master.

Called by holders (:func:`load_shard`) and by the engine's master (:func:`load_head_only`).
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from mlsys_core.errors import InvalidInputError, MlsysError

from mlsys_orca.backends.native.plan_writer import LoweringError
from mlsys_orca.backends.runner import intra_op_threads
from mlsys_orca.loading.load import DTYPES, check_forms, default_dtype, model_files
from mlsys_orca.loading.loaded import DividedModel, LoadedModel
from mlsys_orca.loading.rows import Activations, rows_of
from mlsys_orca.model.blocks import Decoder
from mlsys_orca.model.config import ModelConfig
from mlsys_orca.model.decoder import DecoderModel
from mlsys_orca.model.family import Family
from mlsys_orca.model.slices import num_slices
from mlsys_orca.model.weights.checkpoint import Checkpoint, Progress, WeightForm
from mlsys_orca.model.weights.damage import readable
from mlsys_orca.parallel.native_shard import NativeShard
from mlsys_orca.parallel.placement import Placement, shard_config
from mlsys_orca.parallel.reading import load_part
from mlsys_orca.parallel.shard import Shard
from mlsys_orca.parallel.torch_shard import TorchShard

_log = logging.getLogger(__name__)


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
    backend: str = "auto",
    num_threads: int = 1,
    progress: Progress | None = None,
    slices: bool | None = None,
    takes_adapters: bool = False,
    activations: Activations | None = None,
) -> Shard:
    """Load the part of a model at ``placement``; no more of the file is read, and no more is held.

    A native program gives the same bits for all degrees, one process included. In torch's operators all degrees give
    the same bits where the model is sliced; that costs one process some speed, and is what ``slices`` is for.

    Args:
        path: As of :func:`~mlsys_orca.loading.load.load_model`.
        placement: The part's place.
        dtype: As there, and so the others.
        weights: Form of matrices.
        backend: ``"native"``, ``"torch"`` or ``"auto"``; every place of a model comes to the same.
        num_threads: torch's threads while loading.
        progress: Called with the bytes of this part read so far and those in all.
        slices: Sums in torch's operators have the shape that ranks can share; None: where there are several ranks. All
            places of a model take the same.
        takes_adapters: LoRA adapters may be added (:meth:`.torch_shard.TorchShard.add_adapter`); the part runs in
            torch's operators.
        activations: As of ``load_model``.

    Raises:
        InvalidInputError: as ``load_model``, or the model does not divide so.
        LoweringError: ``backend`` is ``"native"`` and some part of the model has no native operator.
        MissingDependencyError: ``backend`` is ``"native"`` and there is no C++ compiler.

    Example:
        >>> shard = load_shard("model.gguf", Placement(rank=1, num_ranks=3))  # doctest: +SKIP
        >>> shard.join(reducer, num_threads=1).run(inputs, None, out, kv_cache)  # doctest: +SKIP
    """
    check_forms(dtype=dtype, weights=weights, backend=backend, activations=activations)
    if takes_adapters and backend == "native":
        raise InvalidInputError("adapters need torch's operators: leave out backend='native'")
    if takes_adapters and activations == "int8":
        raise InvalidInputError("adapters need torch's operators, which take no activations in int8: leave that out")
    where, load = model_files(path)
    wanted = DTYPES[dtype or default_dtype()]
    found: list[Any] = []

    def read(family: Family, config: ModelConfig, checkpoint: Checkpoint, **options: Any) -> DecoderModel:
        found[:] = [config]
        return load_part(family, config, checkpoint, placement=placement, **options)

    def read_slices(family: Family, config: ModelConfig, checkpoint: Checkpoint, **options: Any) -> DecoderModel:
        is_sliced = placement.num_ranks > 1 if slices is None else slices
        number = num_slices(config) if is_sliced else 1
        places = [replace(placement, rank=rank, num_ranks=number) for rank in _own(placement, number)]
        parts = [load_part(family, config, checkpoint, placement=place, **options) for place in places]
        own = shard_config(config, placement)
        found[:] = [TorchShard(parts, config, own, placement, slices=number, takes_adapters=takes_adapters)]
        return parts[0]

    with intra_op_threads(num_threads), readable(where):
        options: dict[str, Any] = {"dtype": wanted, "device": torch.device("cpu"), "progress": progress}
        if backend != "torch" and not takes_adapters:
            model = load(where, weights=weights or "packed", read=read, **options).model
            try:
                if not isinstance(model, Decoder):
                    raise LoweringError(f"a model by {type(model).__name__}")
                rows = rows_of(where, activations, dtype=dtype, weights=weights)
                return NativeShard(model, found[0], placement, activations=rows.form)
            except MlsysError as error:
                if backend == "native" or activations == "int8":
                    raise
                _log.info("the part runs in torch: %s", error)
        load(where, weights=weights or "float", read=read_slices, **options)
        shard: TorchShard = found[0]
        return shard


def _own(placement: Placement, slices: int) -> range:
    """Return the slices that a rank adds itself."""
    own = max(1, slices // placement.num_ranks)
    return range(placement.rank * own, (placement.rank + 1) * own)
