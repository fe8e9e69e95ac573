"""The one entrance: a path to a model that runs.

Called by the process that will run the model; everything else of this package is behind :func:`load_model`, which
Orca's own registered loader calls. :func:`load_by_name` asks the loaders of all plugins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from mlsys_core.config import settings
from mlsys_core.device import get_device
from mlsys_core.errors import DeviceError, InvalidInputError
from mlsys_core.memory.pages import return_freed_memory
from mlsys_core.plugins import Registry, installed_plugins
from mlsys_core.plugins.loading import LoadContext, endings, find_loader, load_with
from mlsys_core.plugins.specs import ModelLoaderSpec

from mlsys_orca.backends.native.decoder import NativeDecoder, to_native
from mlsys_orca.backends.native.kept import Copies, NotedCheckpoint, can_be_kept
from mlsys_orca.backends.native.packing import Rows
from mlsys_orca.backends.runner import intra_op_threads
from mlsys_orca.loading.gguf import load_gguf
from mlsys_orca.loading.loaded import LoadedModel
from mlsys_orca.loading.rows import Activations, rows_of
from mlsys_orca.model.decoder import DecoderModel
from mlsys_orca.model.layers import has_packed_weights
from mlsys_orca.model.weights.checkpoint import Checkpoint, Progress, WeightForm
from mlsys_orca.model.weights.damage import readable
from mlsys_orca.model.weights.gguf_file import MAGIC, GgufFile
from mlsys_orca.model.weights.quantized import QuantizedMatrix

BACKENDS = ("auto", "native", "torch")
DTYPES: dict[str, torch.dtype] = {  # by each of their names
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
}
_HALVES = ("float16", "fp16", "half")


def load_model(
    path: Path | str,
    *,
    dtype: str | None = None,
    device: str = "cpu",
    weights: WeightForm | None = None,
    backend: str = "auto",
    num_threads: int = 1,
    progress: Progress | None = None,
    copies: Copies | None = None,
    activations: Activations | None = None,
) -> LoadedModel:
    """Load a model, whatever its format: what the path holds decides.

    Args:
        path: A GGUF file, a Hugging Face directory (``config.json``, safetensors, ``tokenizer.json``), or a directory
            with a single GGUF file.
        dtype: ``"fp32"`` or ``"bf16"``, to compute in and to keep weights, keys and values in, or their whole names;
            None or ``"auto"``: what :func:`default_dtype` says.
        device: The registered name of a device.
        weights: Form of matrices: ``"float"``: in the dtype; ``"packed"``: as a GGUF file has them, where that is
            quantised; ``"int8"`` or ``"int4"``: quantised while loading, whatever the file has. Norms, biases and a
            mixture's routers stay floating; int4 keeps 8 bits for the tables and the query, key and value projections.
            None: packed where the native path runs, which is faster there and changes no value, else float.
        backend: ``"native"``: own kernels on the CPU (:mod:`mlsys_orca.backends.native`); ``"torch"``: torch's
            operators; ``"auto"``: native where the model and the machine allow it, and on a CUDA device Triton
            kernels (:mod:`mlsys_orca.backends.triton`).
        num_threads: torch's threads while loading; the process's number is restored after. More than one helps only
            where the cores are free: dequantising is many small operators, each of which waits for the whole team.
        progress: Called with the bytes of weights read so far and those in all.
        copies: Where a packed copy of a quantised GGUF is kept, which later loads map; None: nowhere.
        activations: Form of the rows that meet packed weights in native products: ``"int8"``: quantised, with a scale
            for each group of 16 or 32 features, and multiplied as integers, which is faster and a little less
            exact; ``"float"``: as they are. ``"auto"`` or None: int8 for large quantised models (:mod:`.rows`); float
            in torch's operators.

    Raises:
        InvalidInputError: there is no model at ``path``, it is damaged, or it needs something that is not implemented.
        DeviceError: the device is not usable.
        LoweringError: ``backend`` is ``"native"`` and some part of the model has no native operator.
        MissingDependencyError: ``backend`` is ``"native"`` and there is no C++ compiler.

    Example:
        >>> loaded = load_model("SmolLM2-135M-Instruct.Q4_1.gguf", dtype="fp32")  # doctest: +SKIP
        >>> loaded.tokenizer.eos_ids  # doctest: +SKIP
        frozenset({2})
    """
    dtype = None if dtype == "auto" else dtype
    check_forms(dtype=dtype, weights=weights, backend=backend, activations=activations)
    target = usable_device(device)
    wanted = DTYPES[dtype or default_dtype(target)]
    where, load = model_files(path)
    with intra_op_threads(num_threads), readable(where):
        if backend == "torch" or (backend == "auto" and target.type == "cuda"):
            loaded = load(where, dtype=wanted, device=target, weights=weights or "float", progress=progress)
            model = loaded.model
            if backend != "torch":
                from mlsys_orca.backends.triton import to_gpu

                model = to_gpu(model)
            return _checked(replace(loaded, model=model, device=device), activations)
        is_packed = load is load_gguf and weights in (None, "packed")
        file = GgufFile(where) if load is load_gguf else None
        rows = rows_of(where, activations, dtype=dtype, weights=weights, file=file)
        opened = {} if file is None else {"file": file}
        if is_packed and copies and target.type == "cpu" and (copy := copies.path_of(where, activations=rows.form)):
            options: dict[str, Any] = {"dtype": wanted, "backend": backend, "activations": rows.form, "file": file}
            loaded, model, is_new = _load_with_copy(where, copies, copy, progress=progress, **options)
            if is_new:
                # What was packed for the copy is given back, and the copy mapped as by every later start: its pages are
                # the system's, and of a table only those are in memory that are looked up.
                del loaded, model
                return_freed_memory()
                loaded, model, _ = _load_with_copy(where, copies, copy, progress=None, **options)
        else:
            options = {"weights": weights or "packed", "progress": progress, **opened}
            loaded = load(where, dtype=wanted, device=target, **options)
            model = to_native(loaded.model, backend=backend, activations=rows.form)
        if isinstance(model, NativeDecoder):
            loaded = replace(loaded, rows=rows)
        if model is loaded.model and weights is None and has_packed_weights(model):  # slow in torch's operators
            loaded = load(where, dtype=wanted, device=target, weights="float", progress=progress, **opened)
            return _checked(replace(loaded, device=device), activations)
        return _checked(replace(loaded, model=model, device=device), activations)


def _checked(loaded: LoadedModel, activations: str | None) -> LoadedModel:
    """Return ``loaded``.

    Raises:
        InvalidInputError: quantised rows were asked for, and it runs where there are none.
    """
    if activations == "int8" and not isinstance(loaded.model, NativeDecoder):
        raise InvalidInputError(
            f"{loaded.name} does not run in native products, which alone take activations in int8: leave that out"
        )
    return loaded


def check_forms(*, dtype: str | None, weights: str | None, backend: str, activations: str | None = None) -> None:
    """See that the names of a dtype, a form of weights, a backend and a form of activations are known.

    Raises:
        InvalidInputError: one is not.
    """
    check_dtype(dtype)
    if weights is not None and weights not in get_args(WeightForm):
        raise InvalidInputError(f"weights {weights!r} are not known; {', '.join(get_args(WeightForm))} are")
    if activations is not None and activations not in get_args(Activations):
        raise InvalidInputError(f"activations {activations!r} are not known; {', '.join(get_args(Activations))} are")
    if backend not in BACKENDS:
        raise InvalidInputError(f"the backend {backend!r} is not known; {', '.join(BACKENDS)} are")


def check_dtype(dtype: str | None) -> None:
    """See that the name of a dtype is known.

    Raises:
        InvalidInputError: it is not, or nothing here computes in that dtype.
    """
    if dtype in _HALVES:
        raise InvalidInputError(
            f"nothing here computes in {dtype}: bfloat16 takes as much memory, float32 rounds less. A model in float16 "
            "is read as either (--dtype auto)"
        )
    if dtype is not None and dtype not in DTYPES:
        raise InvalidInputError(f"the dtype {dtype!r} is not known; {', '.join(DTYPES)} and auto are")


def model_files(path: Path | str) -> tuple[Path, Callable[..., LoadedModel]]:
    """Return the directory or GGUF file that ``path`` means, and the loader of its format.

    Raises:
        InvalidInputError: there is no model at ``path``.
    """
    where = Path(path).expanduser()
    if where.is_dir() and not (where / "config.json").is_file():
        where = _only_gguf(where)
    if where.is_dir():
        from mlsys_orca.loading.huggingface import load_huggingface

        return where, load_huggingface
    _check_gguf(where)
    return where, load_gguf


def _load_with_copy(
    where: Path,
    copies: Copies,
    copy: Path,
    *,
    dtype: torch.dtype,
    backend: str,
    progress: Progress | None,
    activations: Rows,
    file: GgufFile | None,
) -> tuple[LoadedModel, DecoderModel, bool]:
    """Load a GGUF and lower it: from its packed copy, or from the file, and then write that.

    Returns:
        What was loaded, the model, and whether a copy was written that can be mapped.
    """
    kept = copies.find(copy)
    noted: list[NotedCheckpoint] = []

    def note(file: Checkpoint) -> Checkpoint:
        noted.append(NotedCheckpoint(file, kept))
        return noted[0]

    options: dict[str, Any] = {"weights": "packed", "progress": progress, "file": file}
    load = partial(load_gguf, where, dtype=dtype, device=torch.device("cpu"), **options)
    loaded = load(noted=note)
    is_new = kept is None and can_be_kept(loaded.model, noted[0])  # before the weights are taken
    model = to_native(loaded.model, backend=backend, kept=kept, activations=activations)
    if kept is not None and model is loaded.model:  # kernels that wrote the copy are gone: read the weights after all
        loaded = load()
        return loaded, loaded.model, False
    if is_new and isinstance(model, NativeDecoder):
        table = model.embedding.table
        is_new = copies.keep(copy, model.linears, table if isinstance(table, QuantizedMatrix) else None, noted[0])
        return loaded, model, is_new and copies.find(copy) is not None
    return loaded, model, False


def _check_gguf(where: Path) -> None:
    if not where.is_file():
        raise InvalidInputError(f"{where} does not exist; give a GGUF file or a Hugging Face model directory")
    with readable(where), where.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise InvalidInputError(
                f"{where} is not a GGUF file: it does not start with the bytes 'GGUF'. "
                "For safetensors give the directory that also holds config.json and tokenizer.json"
            )


def default_dtype(device: torch.device | str = "cpu") -> str:
    """Return the dtype that is faster and still close to fp32 on ``device``: bf16 where it is native, else fp32.

    A CPU without bf16 instructions emulates them, slower than fp32; with them a token takes two thirds of the time.
    The text is not fp32's: of 20 greedy answers of 48 tokens by SmolLM2-135M, 10 were the same in both. Take fp32
    where answers are compared.

    Example:
        >>> default_dtype("cpu") in ("fp32", "bf16")
        True
    """
    target = torch.device(device)
    if target.type == "cuda":
        from mlsys_core.device.cuda import CudaDevice
        from mlsys_core.device.cuda_graphs import has_bf16

        return "bf16" if has_bf16(CudaDevice(target.index or 0)) else "fp32"
    capabilities = torch.cpu.get_capabilities()
    native = any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))  # the last on Arm
    return "bf16" if target.type == "cpu" and native else "fp32"


def usable_device(device: str) -> torch.device:
    """Return where tensors of the registered device of that name lie.

    Raises:
        InvalidInputError: no kind of device is called so.
        DeviceError: there is none, or nothing can be put on it.
    """
    target = torch.device(get_device(device).torch_name)
    try:
        torch.empty(1, device=target)
    except (RuntimeError, AssertionError) as error:
        raise DeviceError(f"the device {device!r} cannot be used: {str(error).splitlines()[0]}") from error
    return target


def _only_gguf(directory: Path) -> Path:
    files = sorted(directory.glob("*.gguf"))
    if len(files) != 1:
        found = ", ".join(file.name for file in files) or "none"
        raise InvalidInputError(
            f"{directory} is no model directory: it has no config.json, and of GGUF files {found}. Give a directory "
            "with a config.json or a single GGUF file, or the file itself"
        )
    return files[0]


ENGINE, OWN = "orca", "orca-llm"


def load_registered(path: Path, context: LoadContext) -> LoadedModel:
    """Load a GGUF file or a Hugging Face directory; Orca's own loader, see :func:`load_model` for what it refuses."""
    options = context.taken("dtype", "weights", "activations", "backend")
    chosen = settings()
    copies = Copies(chosen.cache_dir / "packed", chosen.packed_nbytes)
    return load_model(path, device=context.device, progress=context.progress, copies=copies, **options)


def load_by_name(path: Path, context: LoadContext, registry: Registry | None = None) -> LoadedModel:
    """Load ``path`` with the loader registered for its ending; Orca's own takes what no other does.

    Raises:
        InvalidInputError: the loader refuses the file or an option, or no loader knows it.
        PluginError: the loader fails by a mistake of its own, or gives no :class:`LoadedModel`.
    """
    registry = installed_plugins().registry if registry is None else registry
    spec = find_loader(path, ENGINE, registry)
    if spec is None:
        if path.suffix and not _begins_as_gguf(path):
            raise InvalidInputError(
                f"{path}: no loader takes it; Orca's loaders take files and folders with {endings(ENGINE, registry)}"
            )
        spec = registry.get(ModelLoaderSpec, OWN)  # files without an ending are known by their first bytes
    loaded: LoadedModel = load_with(spec, path, context, registry, kind=LoadedModel)
    return replace(loaded, device=context.device)


def _begins_as_gguf(path: Path) -> bool:
    if path.is_dir():
        return True  # of which the loader says more
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"
