"""A path and two degrees to a divided model: what the master has of it, and how its parts are loaded and meet."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path

from mlsys_core.device import get_device
from mlsys_core.errors import InvalidInputError, MlsysError

from mlsys_orca import __version__
from mlsys_orca.backends.native import library
from mlsys_orca.loading.load import DTYPES, default_dtype, model_files
from mlsys_orca.loading.loaded import DividedModel, LoadedModel
from mlsys_orca.loading.rows import Activations, rows_of
from mlsys_orca.model.config import ModelConfig
from mlsys_orca.model.weights.checkpoint import Checkpoint, WeightForm
from mlsys_orca.model.weights.gguf_file import GgufFile
from mlsys_orca.model.weights.safetensors_file import SafetensorsDirectory
from mlsys_orca.parallel.group import Holders, layout_of
from mlsys_orca.parallel.holder import Loaded
from mlsys_orca.parallel.loading import load_head_only, load_shard
from mlsys_orca.parallel.messages import Hello
from mlsys_orca.parallel.placement import Placement, shard_config
from mlsys_orca.parallel.ranks import ParallelModel
from mlsys_orca.parallel.shard import Reducer, Shard
from mlsys_orca.parallel.tensors.ring import new_memory
from mlsys_orca.parallel.tensors.shared_memory import SharedReducer
from mlsys_orca.parallel.wiring import GroupShape

_SAMPLE_NBYTES = 4096
_NUM_SAMPLES = 64  # of each file


def divide(
    path: Path,
    *,
    tensor_parallel: int,
    pipeline_parallel: int,
    dtype: str | None = None,
    weights: WeightForm | None = None,
    activations: Activations | None = None,
    share: float = 1.0,
) -> tuple[LoadedModel, ParallelModel]:
    """Return a model without weights, and its parts.

    Args:
        path: As of :func:`~mlsys_orca.loading.load.load_model`.
        tensor_parallel: Ranks of each stage.
        pipeline_parallel: Stages.
        dtype: As of ``load_model``.
        weights: Likewise.
        activations: Likewise.
        share: Part of the model that this machine is to hold, from 0 to 1.

    Raises:
        InvalidInputError: there is no model at ``path``, it does not divide so, or it does not fit the memory.
    """
    place = Placement(num_stages=pipeline_parallel, num_ranks=tensor_parallel)
    loaded = load_head_only(path, dtype=dtype, placement=place)
    whole = loaded.config
    _check_room(path, loaded.name, dtype=dtype or default_dtype(), weights=weights, share=share)
    where, _ = model_files(path)
    rows = rows_of(where, activations, dtype=dtype, weights=weights)  # may differ by machine: parts must not
    model = digest_of(path, whole, dtype=str(loaded.model.dtype), weights=repr((weights, rows.form)))

    def load(place: Placement) -> Shard:
        return load_shard(path, place, dtype=dtype, weights=weights, activations=activations)

    parts = parallel_model(whole, load, model, tensor_parallel=tensor_parallel, pipeline_parallel=pipeline_parallel)
    return replace(loaded, rows=rows), parts


def parallel_model(
    whole: ModelConfig,
    load: Callable[[Placement], Shard],
    digest: str,
    *,
    tensor_parallel: int,
    pipeline_parallel: int,
) -> ParallelModel:
    """Return the parts of a model that ``load`` loads, and the memory in which they meet.

    Args:
        whole: The model's configuration.
        load: Loads a part.
        digest: Tells the model from all others.
        tensor_parallel: Ranks of each stage.
        pipeline_parallel: Stages.
    """

    def hello_of(shard: Shard) -> Hello:
        place = shard.placement
        return Hello(place.stage, place.rank, __version__, recipe_of(), digest, shard.needs_logits, shard.nbytes)

    def reducer_of(place: Placement, fd: int) -> Reducer:
        nbytes = SharedReducer.nbytes_needed(whole, num_ranks=place.num_ranks)
        return SharedReducer(mmap.mmap(fd, nbytes), whole, rank=place.rank, num_ranks=place.num_ranks)

    def new_reducer(shape: GroupShape) -> int:
        return new_memory("orca-sums", SharedReducer.nbytes_needed(whole, num_ranks=shape.tensor_parallel))

    return ParallelModel(
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        load=load,
        hello_of=hello_of,
        expected=Hello(0, 0, __version__, recipe_of(), digest, needs_logits=False, nbytes=0),
        reducer_of=reducer_of if tensor_parallel > 1 else None,
        new_reducer=new_reducer if tensor_parallel > 1 else None,
    )


def with_parts(loaded: LoadedModel, reports: Sequence[Loaded]) -> LoadedModel:
    """Return ``loaded`` with what the holders of its parts, which have started, report of each."""
    nbytes = sum(report.nbytes for report in reports)
    is_native = all(report.is_native for report in reports)
    assert isinstance(loaded.model, DividedModel)
    divided = replace(loaded.model, nbytes=nbytes, is_native=is_native)
    return replace(loaded, model=divided)


def layout_rows(whole: ModelConfig, holders: Holders) -> list[tuple[str, str]]:
    """Return rows on where the parts are and what each takes: (name, value)."""
    places = holders.model.places
    rows = [("layout", layout_of(places))]
    for place, report in zip(places, holders.loaded, strict=True):
        part = shard_config(whole, place)
        what = f"{part.num_layers} layers, {part.num_heads} heads, {part.intermediate_size} features of the MLP"
        rows.append((f"stage {place.stage}, rank {place.rank}", f"{what}, {report.nbytes / 2**20:.0f} MiB"))
    return rows


def recipe_of() -> str:
    """Return the name of the compiled kernels, which follows from their sources and options; empty: there are none."""
    try:
        return Path(library.load()._name).stem
    except MlsysError:
        return ""


def digest_of(path: Path, whole: ModelConfig, *, dtype: str, weights: str | None) -> str:
    """Return a digest of a model: its configuration, and the sizes and samples of its files.

    Two checkpoints of one shape differ in it, and a large one is not read whole.
    """
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    digest = hashlib.blake2b(repr((whole, dtype, weights)).encode(), digest_size=16)
    for file in files:
        if file.suffix in (".gguf", ".safetensors"):
            _add(digest, file)
    return digest.hexdigest()


def _add(digest: hashlib.blake2b, file: Path) -> None:
    nbytes = file.stat().st_size
    digest.update(nbytes.to_bytes(8, "little"))
    with file.open("rb") as data:
        for index in range(_NUM_SAMPLES):
            data.seek(max(0, nbytes - _SAMPLE_NBYTES) * index // (_NUM_SAMPLES - 1))
            digest.update(data.read(_SAMPLE_NBYTES))


def _check_room(path: Path, name: str, *, dtype: str, weights: str | None, share: float) -> None:
    """See that the weights fit the memory of this host, of which no process needs more than its part.

    Raises:
        InvalidInputError: they do not.
    """
    where, _ = model_files(path)
    files: Checkpoint = SafetensorsDirectory(where) if where.is_dir() else GgufFile(where)
    needed = int(share * weights_nbytes_at_least(files, dtype=dtype, weights=weights or "packed"))
    available = get_device("cpu").memory_info().available_nbytes
    if needed > available:
        raise InvalidInputError(
            f"the weights of {name} take {needed / 2**20:.0f} MiB or more in all parts here together, and "
            f"{available / 2**20:.0f} MiB are available: free memory, or take a smaller form (--weights int8 or int4)"
        )


_BITS = {"int8": 8, "int4": 4}
_FULL_BITS = 16  # of a value that is not quantised, at least


def weights_nbytes_at_least(files: Checkpoint, *, dtype: str, weights: str) -> int:
    """Return the bytes that the weights of ``files`` take in memory, at least: without what packing adds.

    Args:
        files: The model's tensors.
        dtype: ``"fp32"`` or ``"bf16"``.
        weights: ``"float"``, ``"packed"``, ``"int8"`` or ``"int4"``.
    """
    total = 0
    for name in files.names:
        shape, nbytes = files.shape(name), files.nbytes(name)
        count = prod(shape)
        if weights == "packed" and 8 * nbytes < _FULL_BITS * count:
            total += nbytes
        elif weights in _BITS and len(shape) > 1:
            total += count * _BITS[weights] // 8
        else:
            total += count * DTYPES[dtype].itemsize
    return total
