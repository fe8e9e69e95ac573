"""``mlsys windtunnel predict``: answers for the rows of a file, from an artifact, a ``.pt2`` or an ONNX file."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from mlsys_core.cli.options import Device, TrustCode
from mlsys_core.errors import InvalidInputError

if TYPE_CHECKING:
    import pandas as pd
    from mlsys_core.device import Device as ComputeDevice

ROWS_AT_ONCE = 65_536  # between two moves of the progress bar


def predict(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A folder, .pt2 or .onnx that translate wrote.")],
    data: Annotated[Path, typer.Argument(metavar="DATA", help="Rows: .csv, .csv.gz or .parquet with a header.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Where answers go: .csv, .csv.gz or .parquet.")
    ],
    proba: Annotated[bool, typer.Option("--proba", help="Add a column with the probability of each class.")] = False,
    device: Device = "cpu",
    trust_code: TrustCode = False,
) -> None:
    """Answer the rows of a file: a column "prediction", or the features of a pipeline without a predictor.

    Columns are taken by name where the pipeline was fitted on names; missing ones are refused before any row is read.

    Example: mlsys windtunnel predict churn customers.csv -o answers.csv --proba

    Example: mlsys windtunnel predict churn.pt2 customers.parquet -o answers.parquet
    """
    from mlsys_core.device import get_device
    from mlsys_windtunnel.cli.data import check_table_path, read_table

    check_table_path(data)
    suffix = check_table_path(output)
    if not output.absolute().parent.is_dir():
        raise InvalidInputError(f"{output}: there is no folder {output.absolute().parent}")
    compute_device = get_device(device)
    answering = load_model(model, trust_code=trust_code)
    if compute_device.torch_name != "cpu":
        if not model.is_dir():
            raise InvalidInputError(
                f"{model} is a program for the CPU; give the folder, or leave out --device {device}"
            )
        answering.to(compute_device.torch_name)
    if proba and not hasattr(answering, "predict_proba"):
        raise InvalidInputError(f"{model} gives no probabilities; leave --proba out")
    rows = read_table(data, answering.frontend)
    table = rows if answering.frontend.columns is not None else rows.to_numpy()
    _save(_answers(answering, table, compute_device, proba=proba), output, suffix)
    typer.echo(f"{len(rows):,} rows answered in {output}")


def load_model(path: Path, *, trust_code: bool = False) -> Any:
    """Load what answers from a folder, a ``.pt2`` or an ONNX file.

    Raises:
        InvalidInputError: it is none of these, or damaged.
    """
    if path.suffix == ".pt2":
        from mlsys_windtunnel.export.pt2 import load_pt2

        return load_pt2(path, trust_code=trust_code)
    if path.suffix == ".onnx":
        from mlsys_windtunnel.export.onnx import load_onnx

        return load_onnx(path)
    if not path.is_dir():
        raise InvalidInputError(f"{path} is no folder, .pt2 or .onnx file; write one with mlsys windtunnel translate")
    from mlsys_windtunnel.export.artifact import load

    return load(path)


def _answers(answering: Any, rows: Any, compute_device: ComputeDevice, *, proba: bool) -> Iterator[pd.DataFrame]:
    """Yield tables of answers, some rows each, computed on a device, with a progress bar on stderr."""
    from mlsys_core.device import run_on
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("predicting", total=len(rows))
        for start in range(0, len(rows), ROWS_AT_ONCE):
            part = rows[start : start + ROWS_AT_ONCE]
            yield run_on(compute_device, partial(_table, answering, part, proba=proba))
            progress.advance(task, len(part))


def _table(answering: Any, rows: Any, *, proba: bool) -> pd.DataFrame:
    import pandas as pd

    has_predictions = hasattr(answering, "predict")
    answer = answering.predict(rows) if has_predictions else answering.transform(rows)
    name = "prediction" if has_predictions else "feature"
    if answer.ndim == 1:
        columns = {name: answer}
    else:
        columns = {f"{name}_{index}": answer[:, index] for index in range(answer.shape[1])}
    if proba:
        tables = answering.predict_proba(rows)
        if isinstance(tables, list):
            named = [(f" in {name}_{index}", labels) for index, labels in enumerate(_outputs(answering))]
        else:
            labels = getattr(answering, "classes_", range(tables.shape[1]))
            tables, named = [tables], [("", labels)]
        for table, (where, labels) in zip(tables, named, strict=True):
            columns |= {f"probability of {label}{where}": table[:, index] for index, label in enumerate(labels)}
    return pd.DataFrame(columns)


def _outputs(answering: Any) -> Any:
    """Return the labels of each output of a classifier of several."""
    return answering.outputs if hasattr(answering, "outputs") else answering.predictor.outputs


def _save(parts: Iterator[pd.DataFrame], path: Path, suffix: str) -> None:
    """Write all parts to ``path``, whole or not at all."""
    import pandas as pd

    partial = path.with_name(f".{path.name}.partial")
    try:
        table = pd.concat(parts, ignore_index=True)
        if suffix == ".parquet":
            table.to_parquet(partial)
        else:
            table.to_csv(partial, index=False, compression="gzip" if suffix == ".csv.gz" else None)
        partial.replace(path)
    except OSError as error:
        raise InvalidInputError(f"{path} cannot be written: {error}") from error
    finally:
        partial.unlink(missing_ok=True)
