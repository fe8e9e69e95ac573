"""Memory that a model's weights will take, told from its files' tables before a weight is read."""

from __future__ import annotations

from math import prod
from pathlib import Path

from mlsys_core.device import get_device
from mlsys_core.errors import ServingError

from mlsys_orca.loading.load import DTYPES, default_dtype
from mlsys_orca.model.weights.checkpoint import Checkpoint
from mlsys_orca.model.weights.gguf_file import GgufFile
from mlsys_orca.model.weights.safetensors_file import SafetensorsDirectory

_BITS = {"int8": 8, "int4": 4}
_FULL_BITS = 16  # of a value that is not quantised, at least


class NoRoomError(ServingError):
    """The memory does not suffice for one more model."""

    exit_code = 2


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


def check_room(path: Path, *, dtype: str | None, weights: str | None, runs_in_torch: bool, device: str) -> None:
    """See that the model at ``path`` fits beside what is in memory; files that no loader of ours reads are let through.

    Raises:
        NoRoomError: it does not; the message has the figures.
        InvalidInputError: the files are damaged.
    """
    files: Checkpoint
    if path.is_dir() and (path / "config.json").is_file():
        files = SafetensorsDirectory(path)
    elif path.suffix == ".gguf" and path.is_file():
        files = GgufFile(path)
    else:
        return
    form = weights or ("float" if runs_in_torch else "packed")
    needed = weights_nbytes_at_least(files, dtype=dtype if dtype in DTYPES else default_dtype(device), weights=form)
    require(needed, f"the weights of {path.name}", "take a smaller form (weights int8 or int4)", device=device)


def require(nbytes: int, what: str, remedy: str, *, device: str) -> None:
    """See that ``nbytes`` are available beside the model that is served.

    Raises:
        NoRoomError: they are not; the message has the figures.
    """
    available = get_device(device).memory_info().available_nbytes
    if nbytes > available:
        raise NoRoomError(
            f"{what} take {nbytes / 2**20:.0f} MiB or more, and {available / 2**20:.0f} MiB are available beside the "
            f"model that is served: free memory, {remedy}, or start the server anew with this model"
        )
