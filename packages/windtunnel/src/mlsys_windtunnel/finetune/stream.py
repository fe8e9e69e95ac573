"""Training rows from parquet files larger than memory: shuffled among row groups, and within a buffer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from mlsys_core.errors import InvalidInputError, MissingDependencyError
from torch import Tensor

from mlsys_windtunnel.backends.direct.watch import column_checks
from mlsys_windtunnel.backends.soft.options import SoftOptions
from mlsys_windtunnel.finetune.options import TrainingOptions
from mlsys_windtunnel.finetune.residual import Tunable
from mlsys_windtunnel.finetune.rows import Batch, encode_rows, generator_of, with_offset
from mlsys_windtunnel.finetune.tune import FineTuned, head_of, on_device, run, tunable_of, with_changes
from mlsys_windtunnel.module import WindTunnelModule


@dataclass(frozen=True, slots=True)
class ParquetRows:
    """Files to train on.

    Attributes:
        paths: Files of the same columns.
        target: The column of labels or numbers.
        weight: The column of row weights, if there is one.
        buffer_rows: Approximate number of rows in memory at once; rows are shuffled within as many.
    """

    paths: Sequence[Path | str]
    target: str
    weight: str | None = None
    buffer_rows: int = 200_000


class StreamedRows:
    """Rows of parquet files as the network reads them; see :class:`~.rows.Rows`.

    Args:
        source: The files.
        module: Module that names the columns to read.

    Raises:
        InvalidInputError: a file is missing or no parquet file, or lacks a column.
        MissingDependencyError: pyarrow or pandas is not installed.
    """

    def __init__(self, source: ParquetRows, module: WindTunnelModule) -> None:
        try:
            import pandas as pd  # noqa: F401
            import pyarrow.parquet as pq  # type: ignore[import-untyped]
        except ModuleNotFoundError as error:
            raise MissingDependencyError(f"parquet files need {error.name}: pip install pandas pyarrow") from error
        self.source, self.frontend, self.head = source, module.frontend, head_of(module)
        self.checks = column_checks(module.network)
        self.tunable: Tunable | None = None  # adds offsets, once it is known
        if source.buffer_rows < 1 or not source.paths:
            raise InvalidInputError("there must be at least one file, and a buffer of at least one row")
        self.groups: list[tuple[str, int, int]] = []  # file, row group, rows
        for path in map(str, source.paths):
            try:
                file = pq.ParquetFile(path)
            except Exception as error:  # pyarrow raises of many kinds
                raise InvalidInputError(f"{path} cannot be read as a parquet file: {error}") from error
            names = file.schema_arrow.names
            wanted = [source.target, *([source.weight] if source.weight else []), *(module.frontend.columns or ())]
            missing = [name for name in wanted if name not in names]
            if missing:
                raise InvalidInputError(f"{path} lacks the columns {missing}; it has {names}")
            groups = range(file.num_row_groups)
            self.groups += [(path, group, file.metadata.row_group(group).num_rows) for group in groups]

    @property
    def num_rows(self) -> int:
        """Number of rows of all files."""
        return sum(rows for _, _, rows in self.groups)

    def batches(self, batch_size: int, *, seed: int, epoch: int) -> Iterator[Batch]:
        """See :class:`~.rows.Rows`."""
        generator = generator_of(seed, epoch)
        order = torch.randperm(len(self.groups), generator=generator).tolist()
        kept: list[Batch] = []
        for index, number in enumerate(order):
            kept += self._group(*self.groups[number][:2])
            is_last = index == len(order) - 1
            if not is_last and sum(map(len, kept)) < self.source.buffer_rows:
                continue
            rows = _joined(kept)
            shuffled = torch.randperm(len(rows), generator=generator)
            end = len(rows) if is_last else len(rows) // batch_size * batch_size
            for start in range(0, end, batch_size):
                indices = shuffled[start : min(start + batch_size, end)]
                batch = rows[indices]
                yield batch if self.tunable is None else with_offset(self.tunable, batch)
            kept = [rows[shuffled[end:]]] if end < len(rows) else []

    def sample(self, most: int) -> Tensor:
        """See :class:`~.rows.Rows`: of the first groups."""
        parts: list[Batch] = []
        for path, group, _ in self.groups:
            parts += self._group(path, group)
            if sum(map(len, parts)) >= most:
                break
        return _joined(parts).x[:most]

    def _group(self, path: str, group: int) -> list[Batch]:
        import pyarrow.parquet as pq

        frame = pq.ParquetFile(path).read_row_group(group).to_pandas()
        if not len(frame):
            return []
        weight = None if self.source.weight is None else frame[self.source.weight].to_numpy()
        named = [self.source.target, *([self.source.weight] if self.source.weight else [])]
        x: Any = frame[list(self.frontend.columns)] if self.frontend.columns is not None else None
        if x is None:
            x = frame.drop(columns=named).to_numpy()
        target = frame[self.source.target].to_numpy()
        return [encode_rows(self.frontend, self.head, x, target, weight=weight, checks=self.checks)]


def fine_tune_stream(
    module: WindTunnelModule,
    rows: ParquetRows,
    *,
    eval_set: tuple[Any, Any] | None = None,
    soft: SoftOptions | None = None,
    options: TrainingOptions | None = None,
    **changes: Any,
) -> FineTuned:
    """Fine-tune as :func:`~.tune.fine_tune` does, on rows read from files as they are needed, in each epoch anew.

    Statistics of columns are taken of the first 100,000 rows.

    Raises:
        InvalidInputError: as there, and what is wrong with the files.
    """
    soft, options = with_changes(soft or SoftOptions(), options or TrainingOptions(), changes)
    streamed = StreamedRows(rows, module)

    def work() -> FineTuned:
        tunable = tunable_of(module, streamed, soft, options)
        evaluation = None
        if eval_set is not None:
            evaluation = with_offset(
                tunable, encode_rows(module.frontend, streamed.head, *eval_set, checks=streamed.checks)
            )
        streamed.tunable = tunable
        return run(module, tunable, streamed, evaluation, soft, options)

    return on_device(work, options)


def _joined(parts: Sequence[Batch]) -> Batch:
    return Batch(
        torch.cat([part.x for part in parts]),
        torch.cat([part.target for part in parts]),
        torch.cat([part.weight for part in parts]),
        None,
    )
