"""ONNX files: the network for runtimes other than torch, with the same description inside as ``.pt2`` files have."""

from __future__ import annotations

import copy
import hashlib
import importlib
import json
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from mlsys_core.errors import InvalidInputError, MissingDependencyError

from mlsys_windtunnel.backends.direct.watch import frontier_checks
from mlsys_windtunnel.checks.table import is_frame
from mlsys_windtunnel.export import program
from mlsys_windtunnel.export.exported import TIES, ExportedPipeline, restore
from mlsys_windtunnel.export.host_parts import ColumnType, HostPlan
from mlsys_windtunnel.export.host_plan import plan_host, types_of
from mlsys_windtunnel.export.onnx_rows import ColumnsPipeline, refusal_of
from mlsys_windtunnel.host.raw_table import Table
from mlsys_windtunnel.module import WindTunnelModule

METADATA = "windtunnel"  # the key of the description in the model's metadata
_PLACE = "pkg.torch.onnx.stack_trace"  # files and lines of the machine, beside each node
NAMES = {  # of outputs that take raw columns; a classifier's prediction is its label
    "predict": "prediction",
    "predict_proba": "probabilities",
    "predict_log_proba": "log_probabilities",
    "decision_function": "scores",
    "score_samples": "samples",
    "transform": "features",
}
_SEAL = b"\x72\x4a\x0a\x06sha256\x12\x40"  # a protobuf entry of the metadata, up to its 64 digits
_SEAL_NBYTES = len(_SEAL) + 64
_INSTALL = {"onnxruntime": "pip install onnxruntime"}


def export_onnx(
    module: WindTunnelModule,
    path: Path | str,
    *,
    methods: Sequence[str] | None = None,
    columns: bool = False,
    X_example: Table | None = None,  # noqa: N803 - scikit-learn's name
) -> Path:
    """Write the network of ``module`` as an ONNX file: input ``x`` ``[rows, width]``, an output for each answer.

    With ``columns`` the file stands alone: an input ``[rows, 1]`` for each raw column by its name (or ``X``, for a
    pipeline that was fitted on an array of numbers), outputs ``label`` with the source's own labels, ``probabilities``
    and so on (``NAMES``). Metadata ``classes`` and ``columns`` hold labels and inputs as JSON.

    Args:
        module: Result of ``translate``; its dtype becomes the file's (float64 unless asked otherwise).
        path: Ends in ``.onnx``.
        methods: None: one output, ``main``, as ``forward`` answers; with ``columns`` predictions and probabilities.
            Names of the source's methods: outputs of these names; labels are class indices.
        columns: Take raw columns, look categories up in the graph, and refuse what the source refuses.
        X_example: A few raw rows, whose dtypes the inputs take; None: text where categories are text, else float64.

    Returns:
        The path.

    Raises:
        MissingDependencyError: onnx or onnxscript is not installed.
        InvalidInputError: another ending, a method that the source lacks, the file cannot be written, or with
            ``columns`` a part of the host's that ONNX cannot hold.
        MlsysError: an operator's module cannot be exported.
    """
    path = Path(path)
    if path.suffix != ".onnx":
        raise InvalidInputError(f"{path}: the name of an ONNX file ends in .onnx")
    for package in ("onnx", "onnxscript"):
        _require(package)
    if columns:
        model = _standalone(module, methods, X_example)
    else:
        answers, exported = _traced(module, methods, [program.example(module)], columns=False)
        model = exported.model_proto
        _describe(model, METADATA, program.describe(module, answers.names, answers.refusals))
    try:
        data = model.SerializeToString()
        path.write_bytes(data + _seal(data))
    except OSError as error:
        raise InvalidInputError(f"{path} cannot be written: {error}") from error
    return path


def _standalone(module: WindTunnelModule, methods: Sequence[str] | None, rows: Table | None) -> Any:
    """Return a model that takes raw columns."""
    from mlsys_windtunnel.export.onnx_columns import Output, with_columns

    plan = plan_host(module.frontend)
    if is_frame(rows):
        plan = plan_host(module.frontend, _types(module, plan, rows))
    predictor = module.predictor
    if predictor is not None and predictor.outputs:
        raise InvalidInputError("labels of several outputs do not go to ONNX; export with columns=False (--packed)")
    methods = list(methods or program.default_methods(module))
    packed = program.example(module)
    widths = [width for _, width in module.network.frontier]
    whole = program.whole_codes(module, plan)
    tables = [
        table.long() if name in whole else table
        for name, table in zip(plan.frontier, torch.split(packed, widths, dim=1), strict=True)
    ]
    answers, exported = _traced(module, methods, tables, columns=True, coded=whole)
    flat = set(program.flat_answers(module, methods))
    taken = {column.name for column in plan.columns}
    outputs = []
    for name in methods:
        labels = predictor.classes if predictor is not None and name == "predict" else ()
        called = "label" if labels else NAMES[name]
        outputs.append(Output(f"{called}_" if called in taken else called, name in flat, tuple(labels)))
    messages = [contract.refusal for _, contract in answers.refusals]
    model = with_columns(exported.model_proto, plan, outputs, messages, is_float32=module.dtype == torch.float32)
    inputs = [
        {"name": each.name, "type": each.type, "place": place}
        for each, place in zip(plan.columns, plan.indices, strict=True)
    ]
    _describe(model, "columns", json.dumps(inputs))
    if predictor is not None and predictor.classes:
        _describe(model, "classes", json.dumps(np.asarray(predictor.classes).tolist()))
    _describe(model, METADATA, program.describe(module, methods))
    return model


def _types(module: WindTunnelModule, plan: HostPlan, rows: Table) -> dict[str, ColumnType]:
    """Return the types of an example's columns; int64, which has no NaN, only where the source refuses that."""
    refuse = {name for name, contract in frontier_checks(module.network) if not contract.takes_nan}
    may_lack: set[str] = set()
    for name, part in zip(plan.frontier, plan.tables, strict=True):
        if name not in refuse:
            places = (each if isinstance(each, int) else each.cells.column for each in part.columns)
            may_lack.update(plan.columns[place].name for place in places)
    return {name: kind for name, kind in types_of(rows).items() if kind != "int64" or name not in may_lack}


def _traced(
    module: WindTunnelModule,
    methods: Sequence[str] | None,
    tables: Sequence[torch.Tensor],
    *,
    columns: bool,
    coded: frozenset[str] = frozenset(),
) -> tuple[program.Answers, Any]:
    """Return the answers and the exporter's program, whose inputs are the packed table or the tables one by one."""
    from mlsys_windtunnel.export.onnx_trees import TRANSLATIONS, replace_finders, translations

    copied = copy.deepcopy(module)
    answers = program.Answers(
        copied, methods, tells_refusals=columns or (methods is not None and "within"), coded=coded
    )
    trees = replace_finders(copied)  # from now on the copy can only be traced
    refusals = [f"refusal_{number}" for number in range(len(answers.refusals))]
    rows = {0: torch.export.Dim("rows")}
    with program.tracing(answers), _quiet():
        try:
            exported = torch.onnx.export(
                answers,
                tuple(tables),
                dynamo=True,
                custom_translation_table={**TRANSLATIONS, **translations(trees, module.dtype)},
                dynamic_shapes=(tuple(rows for _ in tables),),
                input_names=[f"table_{number}" for number in range(len(tables))] if columns else [program.INPUT],
                output_names=[*answers.names, *refusals],
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
    return answers, exported


def _seal(data: bytes) -> bytes:
    """Return a checksum of a file's bytes as an entry of its metadata, which stands at the end."""
    return _SEAL + hashlib.sha256(data).hexdigest().encode()


def _describe(model: Any, key: str, value: str) -> None:
    entry = model.metadata_props.add()
    entry.key, entry.value = key, value


def load_onnx(path: Path | str, *, num_threads: int | None = None) -> ExportedPipeline | ColumnsPipeline:
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
    data = path.read_bytes()
    body, seal = data[:-_SEAL_NBYTES], data[-_SEAL_NBYTES:]
    if seal.startswith(_SEAL) and seal != _seal(body):  # files of earlier versions have none
        raise InvalidInputError(f"{path} is damaged, or was changed since it was written: its checksum is another")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = num_threads or 0
    try:
        session = runtime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        metadata = session.get_modelmeta().custom_metadata_map
        description = metadata.get(METADATA)
    except Exception as error:  # its errors have no common class, and names may be no text
        raise InvalidInputError(f"{path} cannot be loaded by onnxruntime ({_line(error)})") from error
    if description is None:
        raise InvalidInputError(f"{path} was not written by WindTunnel: its metadata has no {METADATA!r}")

    def run(names: Sequence[str] | None, feed: dict[str, npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
        try:
            result: list[npt.NDArray[Any]] = session.run(names, feed)
        except Exception as error:  # a refusal, or a damaged program: the feed is as the description has it
            if (refusal := refusal_of(error)) is not None:
                raise InvalidInputError(refusal) from error
            raise InvalidInputError(f"{path} does not run in onnxruntime ({_line(error)})") from error
        return result

    pipeline = restore(description, lambda table: run(None, {program.INPUT: table}), path)
    return pipeline if "columns" not in metadata else _of_columns(pipeline, metadata, session, run, path)


def _of_columns(
    pipeline: ExportedPipeline, metadata: dict[str, str], session: Any, run: Any, path: Path
) -> ColumnsPipeline:
    """Return a pipeline over raw columns; its description has the host's part, its metadata the inputs."""
    try:
        columns = [
            {"name": str(each["name"]), "type": str(each["type"]), "place": int(each["place"])}
            for each in json.loads(metadata["columns"])
        ]
        given = [output.name for output in session.get_outputs()]
        answers = [name for name in pipeline.answers if name != TIES]
        return ColumnsPipeline(
            run=run,
            outputs=dict(zip(answers, given, strict=False)),
            has_ties=TIES in given,
            columns=columns,
            classes=pipeline.classes,
            frontend=pipeline.frontend,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidInputError(f"{path}: its description of columns is damaged ({error})") from error


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
