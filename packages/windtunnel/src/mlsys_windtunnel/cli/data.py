"""Inputs of the commands of ``mlsys windtunnel``: fitted pipelines with their warnings, and tables of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer
from mlsys_core.errors import InvalidInputError, MissingDependencyError

if TYPE_CHECKING:
    import pandas as pd
    from mlsys_windtunnel.frontend import Frontend
    from mlsys_windtunnel.host.lookup import Vocabulary

Result = TypeVar("Result")

TABLES = (".csv", ".csv.gz", ".parquet")


def load_pipeline(path: Path, *, trust_code: bool, then: Callable[[Any], Result]) -> Result:
    """Load the pipeline in a file and return ``then`` of it; warnings on the way become notes on stderr, each once."""
    import warnings

    from mlsys_windtunnel.parse.load import load_estimator

    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")  # e.g. saved by another version of scikit-learn
        result = then(load_estimator(path, trust_code=trust_code))
    for text in dict.fromkeys(" ".join(str(note.message).split()) for note in notes):
        typer.echo(f"mlsys: note: {text}", err=True)
    return result


def check_table_path(path: Path) -> str:
    """Return the kind of table that a file name says, one of :data:`TABLES`.

    Raises:
        InvalidInputError: it says none.
    """
    for suffix in TABLES:
        if path.name.lower().endswith(suffix):
            return suffix
    raise InvalidInputError(f"{path}: a table's name ends in {', '.join(TABLES)}")


def read_table(path: Path, frontend: Frontend | None = None) -> pd.DataFrame:
    """Read the rows of a CSV or parquet file.

    Args:
        path: The file.
        frontend: Host part of the pipeline for them: its columns must be there, others are left unread, and a column
            whose categories are text is read as text ("01" stays "01").

    Raises:
        InvalidInputError: no such file, no table, or columns are missing; checked before the rows are read.
        MissingDependencyError: pandas (or pyarrow, for parquet) is not installed.
    """
    suffix = check_table_path(path)
    if not path.is_file():
        raise InvalidInputError(f"{path} is not a file")
    try:
        import pandas as pd

        if suffix == ".parquet":
            import pyarrow.parquet as pq  # type: ignore[import-untyped]
    except ModuleNotFoundError as error:
        raise MissingDependencyError(f"reading {path.name} needs {error.name}: pip install pandas pyarrow") from error
    try:
        names = pq.read_schema(path).names if suffix == ".parquet" else list(pd.read_csv(path, nrows=0).columns)
        wanted = None if frontend is None else _check_columns(path, names, frontend)
        if suffix == ".parquet":
            frame = pd.read_parquet(path, columns=wanted)
        else:
            texts = [] if frontend is None else text_columns(frontend, wanted or names)
            frame = pd.read_csv(path, usecols=wanted, dtype=dict.fromkeys(texts, "str"), low_memory=False)
    except InvalidInputError:
        raise
    except Exception as error:  # pandas and pyarrow raise of many kinds
        reason = str(error).strip().splitlines()
        raise InvalidInputError(f"{path} cannot be read as a table: {reason[0] if reason else error!r}") from error
    if not len(frame):
        raise InvalidInputError(f"{path} has no rows")
    return frame if wanted is None else frame[wanted]


def _check_columns(path: Path, names: Sequence[str], frontend: Frontend) -> list[str] | None:
    """Return the columns to read, or None for all."""
    if frontend.columns is not None:
        missing = [name for name in frontend.columns if name not in names]
        if missing:
            raise InvalidInputError(f"{path} lacks the columns {missing}; it has {list(names)}")
        return list(frontend.columns)
    if frontend.width is not None and len(names) != frontend.width:
        raise InvalidInputError(
            f"{path} has {len(names)} columns; the pipeline was fitted on {frontend.width} without names, so the file "
            "must hold just these, in order"
        )
    return None


def text_columns(frontend: Frontend, names: Sequence[str]) -> list[str]:
    """Return those of the input's columns ``names`` that feed a look-up with text categories only."""
    picked: dict[str, Sequence[str]] = {frontend._input: names}
    for operator in frontend._operators:
        source = operator.inputs[0].name
        if operator.columns is not None and source in picked:
            picked[operator.output.name] = [picked[source][index] for index in operator.columns]
    texts = []
    for value in frontend.frontier:
        if all(name in picked for name in value.reads):
            columns = [column for name in value.reads for column in picked[name]]
            vocabularies = getattr(value.lookup, "vocabularies", ())
            texts += [name for name, each in zip(columns, vocabularies, strict=False) if _is_text(each)]
    return texts


def _is_text(vocabulary: Vocabulary) -> bool:
    return bool(vocabulary._code_of) and all(isinstance(category, str) for category in vocabulary._code_of)
