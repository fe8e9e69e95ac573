"""ONNX files: the network for runtimes other than torch, with the same description inside as ``.pt2`` files have."""

from __future__ import annotations

import copy
import importlib
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch
from mlsys_core.errors import InvalidInputError, MissingDependencyError

from mlsys_windtunnel.export import program
from mlsys_windtunnel.module import WindTunnelModule

METADATA = "windtunnel"  # the key of the description in the model's metadata
_PLACE = "pkg.torch.onnx.stack_trace"  # files and lines of the machine, beside each node
_INSTALL = {"onnxruntime": "pip install onnxruntime"}


def export_onnx(
    module: WindTunnelModule, path: Path | str, *, example_rows: int = 2, methods: Sequence[str] | None = None
) -> Path:
    """Write the network of ``module`` as an ONNX file: input ``x`` ``[rows, width]``, an output for each answer.

    Args:
        module: Result of ``translate``; its dtype becomes the file's (float64 unless asked otherwise).
        path: Ends in ``.onnx``.
        example_rows: Number of rows to trace with, at least 2.
        methods: None: one output, ``main``, as ``forward`` answers. Names of the source's methods: outputs of these
            names; labels are class indices.

    Returns:
        The path.

    Raises:
        MissingDependencyError: onnx or onnxscript is not installed.
        InvalidInputError: another ending, a method that the source lacks, or the file cannot be written.
        MlsysError: an operator's module cannot be exported.
    """
    path = Path(path)
    if path.suffix != ".onnx":
        raise InvalidInputError(f"{path}: the name of an ONNX file ends in .onnx")
    for package in ("onnx", "onnxscript"):
        _require(package)
    from mlsys_windtunnel.export.onnx_functions import TRANSLATIONS
    from mlsys_windtunnel.export.onnx_trees import replace_finders, translations

    copied = copy.deepcopy(module)
    ensembles = replace_finders(copied)
    answers = program.Answers(copied, methods)
    x = program.example(module, example_rows)
    with program.tracing(answers), _quiet():
        try:
            exported = torch.onnx.export(
                answers,
                (x,),
                dynamo=True,
                custom_translation_table={**TRANSLATIONS, **translations(ensembles, module.dtype)},
                dynamic_shapes=({0: torch.export.Dim("rows")},),
                input_names=[program.INPUT],
                output_names=list(answers.names),
                verbose=False,
            )
        except Exception as error:  # torch's exporter raises of many kinds
            raise program.export_error(error, "ONNX") from error
    assert exported is not None
    for node in exported.model.graph.all_nodes():
        node.metadata_props.pop(_PLACE, None)
    for function in exported.model.functions.values():
        for node in function.all_nodes():
            node.metadata_props.pop(_PLACE, None)
    exported.model.metadata_props[METADATA] = program.describe(module, answers.names)
    try:
        exported.save(path)
    except OSError as error:
        raise InvalidInputError(f"{path} cannot be written: {error}") from error
    return path


def load_onnx(path: Path | str, *, num_threads: int | None = None) -> program.ExportedPipeline:
    """Load an ONNX file that :func:`export_onnx` wrote; onnxruntime runs it on the CPU, with the host's part.

    Args:
        path: The file.
        num_threads: Threads of onnxruntime; None leaves it the choice.

    Raises:
        MissingDependencyError: onnxruntime is not installed.
        InvalidInputError: no such file, damaged, not of WindTunnel's making, or with fallback operators.
    """
    runtime = _require("onnxruntime")
    path = Path(path)
    if not path.is_file():
        raise InvalidInputError(f"{path} is not a file; write one with mlsys windtunnel translate --onnx")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = num_threads or 0
    try:
        session = runtime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        description = session.get_modelmeta().custom_metadata_map.get(METADATA)
    except Exception as error:  # its errors have no common class, and names may be no text
        raise InvalidInputError(f"{path} cannot be loaded by onnxruntime ({_line(error)})") from error
    if description is None:
        raise InvalidInputError(f"{path} was not written by WindTunnel: its metadata has no {METADATA!r}")

    def answers(table: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        try:
            result: list[npt.NDArray[Any]] = session.run(None, {program.INPUT: table})
        except Exception as error:  # of a damaged program; the table is as the description has it
            raise InvalidInputError(f"{path} does not run in onnxruntime ({_line(error)})") from error
        return result

    return program.restore(description, answers, path)


def _line(error: Exception) -> str:
    """Return the message of onnxruntime in one line."""
    return " ".join(str(error).split()) or type(error).__name__


def _require(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        command = _INSTALL.get(package, "pip install 'mlsys-windtunnel[onnx]'")
        raise MissingDependencyError(f"ONNX needs the package {error.name}: {command}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's notes on packages that are none of ours."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
