"""Translated pipelines in a folder: a state dict as safetensors, and all else as JSON.

``load`` needs neither scikit-learn nor pickle and runs nothing that the folder names, so a folder from a stranger can
be a wrong model but no program. What is written, and how it is read safely, is ``export/plain.py``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mlsys_core.errors import InvalidInputError
from torch import Tensor

from mlsys_windtunnel.backends.direct.program import direct_program
from mlsys_windtunnel.export.plain import DAMAGE, Reader, Writer
from mlsys_windtunnel.export.schema import check_schema
from mlsys_windtunnel.export.sound import check_sound
from mlsys_windtunnel.frontend import Frontend
from mlsys_windtunnel.module import METHODS, WindTunnelModule
from mlsys_windtunnel.modules.network import Network

FORMAT, VERSION = "mlsys-windtunnel", 3
READABLE = (2, VERSION)  # version 2 has paths of classes and private attributes; see ``renamed.py``
MOST_COLUMNS = 1 << 20  # of raw rows and of the packed table: a folder must not ask for memory without end
GRAPH_FILE, TENSORS_FILE = "graph.json", "tensors.safetensors"


def save(module: WindTunnelModule, directory: Path | str, *, packages: Sequence[str] = ()) -> Path:
    """Write ``module`` into ``directory``, which is made if need be; earlier files of an artifact are replaced.

    Args:
        module: Without fallback operators.
        directory: Folder to write to.
        packages: Packages beside WindTunnel's own whose classes the module holds; ``load`` must name them too.

    Returns:
        The directory.

    Raises:
        InvalidInputError: the module has fallback operators or holds what is no plain data, or the folder cannot be
            written.

    Example:
        >>> save(translate(fitted_pipeline), "churn")  # doctest: +SKIP
        >>> load("churn").predict_proba(frame)  # doctest: +SKIP
    """
    from safetensors.torch import save as to_bytes

    refuse_fallbacks(module.frontend, "pickle it, or train the pipeline with operators that are covered")
    writer = Writer(packages=tuple(packages))
    graph = {
        "format": FORMAT,
        "version": VERSION,
        "frontend": writer.write(module.frontend, "frontend"),
        "network": writer.write(module.network, "network"),
    }
    tensors = to_bytes(writer.tensors)
    graph["sha256"] = hashlib.sha256(tensors).hexdigest()
    path = Path(directory)
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / TENSORS_FILE).write_bytes(tensors)
        (path / GRAPH_FILE).write_text(json.dumps(graph, indent=1, allow_nan=False), encoding="ascii")
    except OSError as error:
        raise InvalidInputError(f"the artifact cannot be written to {path}: {error}") from error
    return path


def load(directory: Path | str, *, packages: Sequence[str] = ()) -> WindTunnelModule:
    """Load the module in ``directory``, in evaluation mode, as :func:`save` wrote it.

    Args:
        directory: A folder with ``graph.json`` and ``tensors.safetensors``.
        packages: Packages beside WindTunnel's own whose classes may be made. They are imported: name only what you
            trust.

    Raises:
        InvalidInputError: no artifact, a damaged one, of another version, or one that names what is not allowed.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load as from_bytes

    path = Path(directory)
    try:
        graph = json.loads((path / GRAPH_FILE).read_text(encoding="ascii"))
        data = (path / TENSORS_FILE).read_bytes()
    except OSError as error:
        raise InvalidInputError(
            f"{path} is no artifact: it needs {GRAPH_FILE} and {TENSORS_FILE} ({error.strerror or error})"
        ) from error
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"{path / GRAPH_FILE} is damaged: it is no JSON ({error})") from error
    _check_header(graph, data, path)
    try:
        tensors = from_bytes(data)
    except (SafetensorError, *DAMAGE) as error:
        raise InvalidInputError(f"{path / TENSORS_FILE} is damaged ({error})") from error
    module = _read(graph, tensors, path, tuple(packages))
    _try(module, path)
    return module


def refuse_fallbacks(frontend: Frontend, advice: str) -> None:
    """Raise InvalidInputError if operators run on the host as they are, naming them and what to do instead."""
    if frontend.fallbacks:
        raise InvalidInputError(
            f"{', '.join(dict.fromkeys(frontend.fallbacks))} cannot be saved as plain data, since it runs on the host "
            f"as it is; {advice}"
        )


def _check_header(graph: Any, data: bytes, path: Path) -> None:
    if not isinstance(graph, dict) or graph.get("format") != FORMAT:
        raise InvalidInputError(f"{path / GRAPH_FILE} is not of the format {FORMAT}")
    if graph.get("version") not in READABLE:
        raise InvalidInputError(
            f"{path / GRAPH_FILE} is of version {graph.get('version')!r}; this program reads version {VERSION} and "
            f"older ones from {READABLE[0]}"
        )
    check_schema(graph, "graph", path / GRAPH_FILE)
    if graph.get("sha256") != hashlib.sha256(data).hexdigest():
        raise InvalidInputError(f"{path / TENSORS_FILE} is damaged: it is not the file that {GRAPH_FILE} was made with")


def _read(graph: dict[str, Any], tensors: dict[str, Tensor], path: Path, packages: tuple[str, ...]) -> WindTunnelModule:
    reader = Reader(tensors, packages=packages)
    try:
        frontend, network = reader.read(graph["frontend"]), reader.read(graph["network"])
        if not isinstance(frontend, Frontend) or not isinstance(network, Network):
            raise TypeError("frontend and network are other things than these")
        module = WindTunnelModule(frontend, network).eval()
        check_sound(module)
        return module
    except InvalidInputError as error:
        raise InvalidInputError(f"{path}: {error}") from error
    except DAMAGE as error:
        raise InvalidInputError(
            f"{path / GRAPH_FILE} is damaged: it does not describe a module ({type(error).__name__}: {error})"
        ) from error


def _ask(module: WindTunnelModule) -> None:
    """Ask each method for raw rows of zeros, in each form that the source takes; a refusal is an answer."""
    frontend = module.frontend
    names, width = frontend.columns, frontend.width
    for cell in (0.0, np.nan):
        rows = np.full((2, width or 1), cell)
        inputs: list[Any] = [rows, rows.astype(object), rows[:, :0]]
        if names is not None:
            inputs.append(dict.fromkeys(names, rows[:, 0]))
        for method in METHODS:
            for x in inputs if hasattr(module, method) else ():
                with contextlib.suppress(InvalidInputError), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    _check_width(module, method, getattr(module, method)(x))


def _check_width(module: WindTunnelModule, method: str, answer: Any) -> None:
    """Compare a column of each class with the classes: with fewer names, an answer would be one of those left."""
    num_classes = len(module.predictor.classes) if module.predictor is not None else 0
    if num_classes and method == "predict_proba" and answer.shape != (len(answer), num_classes):
        raise ValueError(f"it has {num_classes} classes, and probabilities of shape {answer.shape}")


def _try(module: WindTunnelModule, path: Path) -> None:
    """Run two rows of zeros, which every module takes: parts that do not fit together show here, not in service."""
    try:
        width = module.network.width
        if not 0 <= width <= MOST_COLUMNS or not 0 <= (module.frontend.width or 0) <= MOST_COLUMNS:
            raise ValueError(f"it has more than {MOST_COLUMNS:,} columns")
        with torch.inference_mode():
            answer = module(torch.zeros(2, width, dtype=module.dtype))
        if answer.shape[0] != 2 or [name for name, _ in module.network.frontier] != [
            value.name for value in module.frontend.frontier
        ]:
            raise ValueError("its parts do not fit together")
        direct_program(module.network)
        _ask(module)
    except (AssertionError, RuntimeError, StopIteration, *DAMAGE) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InvalidInputError(f"{path}: the module does not run ({reason})") from error
