"""A path and two degrees to a divided encoder: how its parts are loaded and meet."""

from __future__ import annotations

from pathlib import Path

from mlsys_core.errors import InvalidInputError

from mlsys_orca.loading.encoder_files import EncoderFiles, encoder_directory, read_encoder_files
from mlsys_orca.loading.load import DTYPES, default_dtype
from mlsys_orca.model.weights.damage import readable
from mlsys_orca.parallel.encoder_shard import config_of, load_encoder_shard
from mlsys_orca.parallel.group import ParallelModel
from mlsys_orca.parallel.parts import digest_of, parallel_model
from mlsys_orca.parallel.placement import Placement, shard_config
from mlsys_orca.parallel.shard import Shard


def divide_encoder(
    path: Path | str,
    *,
    tensor_parallel: int,
    pipeline_parallel: int,
    dtype: str | None = None,
    slices: bool | None = None,
) -> tuple[EncoderFiles, ParallelModel]:
    """Return an encoder without weights, and its parts.

    Args:
        path: As of :func:`~mlsys_orca.engine.embedding.load_encoder`.
        tensor_parallel: Ranks of each stage.
        pipeline_parallel: Stages.
        dtype: As of ``load_encoder``.
        slices: See :func:`~.encoder_shard.load_encoder_shard`.

    Raises:
        InvalidInputError: there is no encoder at ``path``, it does not divide so, or it is a cross-encoder.
    """
    where = encoder_directory(path, dtype=dtype)
    with readable(where):
        files = read_encoder_files(where)
    if files.config.scores_pairs:
        raise InvalidInputError(f"{files.name} is a cross-encoder, and those are not divided: leave out the degrees")
    whole, wanted = config_of(files.config), DTYPES[dtype or default_dtype()]
    shard_config(whole, Placement(num_stages=pipeline_parallel, num_ranks=tensor_parallel))

    def load(place: Placement) -> Shard:
        with readable(where):
            return load_encoder_shard(files, place, dtype=wanted, slices=slices)

    digest = digest_of(files.path, whole, dtype=str(wanted), weights=repr(slices))
    degrees = {"tensor_parallel": tensor_parallel, "pipeline_parallel": pipeline_parallel}
    return files, parallel_model(whole, load, digest, **degrees)
