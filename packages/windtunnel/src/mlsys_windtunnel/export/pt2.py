"""``.pt2`` files: the network as a program of torch.export, with the host's part beside it as JSON.

torch alone runs the program; :func:`load_pt2` adds the host's part back. Neither needs scikit-learn.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch
from mlsys_core.errors import InvalidInputError
from mlsys_core.pt2.program import load_program, without_places

from mlsys_windtunnel.export import program
from mlsys_windtunnel.export.exported import ExportedPipeline, restore
from mlsys_windtunnel.module import WindTunnelModule

HOST_FILE = "windtunnel.json"


def export_pt2(
    module: WindTunnelModule,
    path: Path | str,
    *,
    methods: Sequence[str] | None = None,
) -> Path:
    """Write the network of ``module`` as a ``.pt2`` file, for any number of rows.

    Args:
        module: Result of ``translate``.
        path: Ends in ``.pt2``.
        methods: None: the program answers as ``forward`` does, one table. Names of the source's methods: a tuple of
            tables, in that order; labels are class indices.

    Returns:
        The path.

    Raises:
        InvalidInputError: another ending, a method that the source lacks, or the file cannot be written.
        MlsysError: an operator's module cannot be exported.

    Example:
        >>> export_pt2(translate(fitted_pipeline), "churn.pt2")  # doctest: +SKIP
        >>> torch.export.load("churn.pt2").module()(torch.from_numpy(module.encode(frame)))  # doctest: +SKIP
    """
    path = Path(path)
    if path.suffix != ".pt2":
        raise InvalidInputError(f"{path}: the name of an exported program ends in .pt2")
    answers = program.Answers(module, methods, tells_refusals=methods is not None and "within")
    traced = module if methods is None else answers
    x, rows = program.example(module), {0: torch.export.Dim("rows")}
    with program.tracing(module), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch's own making
        try:
            exported = torch.export.export(traced, (x,), dynamic_shapes=(rows if methods is None else (rows,),))
        except Exception as error:  # torch.export raises of many kinds
            raise program.export_error(error, ".pt2") from error
    _own_empty_tensors(exported)
    try:
        torch.export.save(
            without_places(exported),
            path,
            extra_files={HOST_FILE: program.describe(module, answers.names, answers.refusals)},
        )
    except (OSError, RuntimeError) as error:
        raise InvalidInputError(f"{path} cannot be written: {error}") from error
    return path


def _own_empty_tensors(exported: torch.export.ExportedProgram) -> None:
    """Give tensors without elements strides of torch's own: saving fails on numpy's."""
    for tensors in (exported.state_dict, exported.constants):
        for name, tensor in tensors.items():
            if isinstance(tensor, torch.Tensor) and not tensor.numel():
                tensors[name] = torch.empty(tensor.shape, dtype=tensor.dtype)


def load_pt2(path: Path | str, *, trust_code: bool = False) -> ExportedPipeline:
    """Load a ``.pt2`` file that :func:`export_pt2` wrote, with the host's part: raw rows in, answers out.

    Nothing in the file is run or unpickled, so it may come from a stranger.

    Args:
        path: The file.
        trust_code: Let ``torch.export.load`` read the program, which runs code that it holds.

    Raises:
        InvalidInputError: no such file, damaged, not of WindTunnel's making, or with fallback operators.
    """
    path = Path(path)
    saved = load_program(path, trust_code=trust_code)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = saved.program.module()
    if not saved.extra.get(HOST_FILE):
        raise InvalidInputError(f"{path} was not written by WindTunnel: it holds no {HOST_FILE}")

    def answers(table: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        with torch.inference_mode():
            result = run(torch.from_numpy(table))
        return [tensor.detach().numpy() for tensor in (result if isinstance(result, tuple | list) else [result])]

    return restore(saved.extra[HOST_FILE], answers, path)
