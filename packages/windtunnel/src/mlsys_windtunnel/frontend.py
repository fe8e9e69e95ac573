"""Work on the host before any tensor exists: columns of text, look-ups of categories, fallback operators.

The graph is cut in two. An operator without a converter needs its inputs as its author made them, so it and all it
depends on stay on the host; so does all that a look-up of categories depends on. The rest is the network. Host values
that the network reads are the *frontier*: :meth:`Frontend.encode` packs them side by side in one float64 table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mlsys_windtunnel.host.few_rows import FewRows
from mlsys_windtunnel.host.fill import Filler, Words
from mlsys_windtunnel.host.lookup import CategoryLookup, Lookup
from mlsys_windtunnel.host.raw_table import Table, is_polars, numbers, raw
from mlsys_windtunnel.host.run import run, side_by_side
from mlsys_windtunnel.host.validate import Columns, Schema, validate
from mlsys_windtunnel.parse.graph import Kind, Operator, PipelineGraph, Value

HOST_DATA = (Filler, Words)  # forms of estimators that files can hold
_FLOAT64 = np.dtype(np.float64)
_FEW, _SCHEMA = "_few", "_made_schema"  # what is made at first use


@dataclass(frozen=True, slots=True)
class FrontierValue:
    """A host value that the network reads."""

    name: str  # as the network's wires name it
    reads: tuple[str, ...]  # values of the graph that it is made of
    width: int | None  # columns; None where the graph does not tell
    lookup: Lookup | None = None  # makes codes of what is read; None: read as it is, as numbers
    columns: tuple[int, ...] | None = None  # indices in the input, where what is read was only picked out of it


class Frontend:
    """The host part of a translated pipeline.

    Args:
        graph: The whole pipeline.
        operators: The host's operators, in an order in which they can run.
        frontier: Values that :meth:`encode` packs, in order.
    """

    def __init__(
        self, graph: PipelineGraph, *, operators: Sequence[Operator], frontier: Sequence[FrontierValue]
    ) -> None:
        self.columns = graph.columns
        self.rules = graph.rules
        self.width = graph.input.width
        self._input = graph.input.name
        self._operators = tuple(operators)
        picked = _picked(graph.input, operators)
        self.frontier = tuple(replace(value, columns=_columns_of(value, picked)) for value in frontier)
        self._takes_text = bool(operators) or any(isinstance(value.lookup, CategoryLookup) for value in frontier)
        self._is_by_column = all(value.columns is not None for value in self.frontier)
        reads = [(value.reads, value.lookup) for value in self.frontier]
        self._is_plain = reads == [((self._input,), None)] and not self.rules.needs_names

    @property
    def is_trivial(self) -> bool:
        """True where encoding is only the conversion of the input to float64."""
        return not self._operators and all(value.lookup is None for value in self.frontier)

    @property
    def fallbacks(self) -> tuple[str, ...]:
        """Classes of the estimators that run here as they are."""
        return tuple(
            operator.source
            for operator in self._operators
            if operator.source and operator.kind is not Kind.COMBINE and not isinstance(operator.estimator, HOST_DATA)
        )

    @property
    def host_data(self) -> tuple[Filler | Words, ...]:
        """Estimators that run here as plain data."""
        found = [operator.estimator for operator in self._operators]
        return tuple(each for each in found if isinstance(each, Filler | Words))

    def tables(self, x: Table, method: str | None = None) -> list[npt.NDArray[np.float64]]:
        """Return the frontier's tables, each ``[rows, width]`` float64, for raw input ``x``; they may share its memory.

        Args:
            x: The table.
            method: The answer that is asked for, if one is.

        Raises:
            InvalidInputError: ``x`` has other columns than the pipeline was fitted on, or text where numbers belong.
        """
        if self._is_plain and type(x) is np.ndarray and x.dtype == _FLOAT64 and x.shape[1:] == (self.width,):
            return [x]
        if type(x) is dict and (few := self._few_rows()) is not None and (tables := few(x)) is not None:
            return tables
        columns = validate(x, self._schema(), method)
        if self._is_by_column and columns.is_by_column:
            return [self._read(value, columns) for value in self.frontier]
        values: dict[str, Table] = {self._input: columns.whole}
        for operator in self._operators:
            inputs = [values[value.name] for value in operator.inputs]
            values[operator.output.name] = run(operator, inputs)
        return [_table([values[name] for name in value.reads], value) for value in self.frontier]

    def columns_of(self, x: Table, method: str | None = None, *, read: Sequence[int] | None = None) -> Columns:
        """Return the columns of a table that :meth:`tables` takes; errors are the same, but for those of cells.

        Args:
            x: The table.
            method: The answer that is asked for, if one is.
            read: Indices of the columns that will be read; None: those of the frontier.
        """
        schema = self._schema()
        return validate(x, schema if read is None else replace(schema, read=tuple(read)), method)

    def _schema(self) -> Schema:
        """Return the tables that the pipeline takes; made at first use."""
        if _SCHEMA not in vars(self):
            vars(self)[_SCHEMA] = Schema(
                name=self._input,
                names=self.columns,
                width=self.width,
                rules=self.rules,
                takes_rows=self.takes_rows,
                takes_text=self._takes_text,
                keeps_text=self._fallback_reads_input(),
                read=self._read_columns(),
            )
        found: Schema = vars(self)[_SCHEMA]
        return found

    def _fallback_reads_input(self) -> bool:
        """Return whether an estimator that stays as it is looks at the raw input itself."""
        return any(
            operator.kind in (Kind.TRANSFORM, Kind.PREDICT)
            and not isinstance(operator.estimator, HOST_DATA)
            and any(value.name == self._input for value in operator.inputs)
            for operator in self._operators
        )

    def _read_columns(self) -> tuple[int, ...] | None:
        """Return the indices of the columns that are read, each once; None: all."""
        if not self._is_by_column:
            return self.rules.selected_columns
        if any(value.reads == (self._input,) for value in self.frontier):
            return None
        return tuple(dict.fromkeys(column for value in self.frontier for column in value.columns or ()))

    def _few_rows(self) -> FewRows | None:
        """Return the reader of a few rows by name, made at its first use; None where the input is read otherwise."""
        if _FEW not in vars(self):
            is_by_name = self.columns is not None and self._is_by_column and not self.takes_rows
            vars(self)[_FEW] = self._plan_few_rows(self.columns or ()) if is_by_name else None
        found: FewRows | None = vars(self)[_FEW]
        return found

    def _plan_few_rows(self, names: Sequence[str]) -> FewRows | None:
        parts: list[tuple[list[str], CategoryLookup | None]] = []
        for value in self.frontier:
            lookup = value.lookup
            assert lookup is None or isinstance(lookup, CategoryLookup)
            reads_all = lookup is None and value.reads == (self._input,)
            indices = range(len(names)) if reads_all else value.columns or ()
            parts.append(([names[index] for index in indices], lookup))
        return FewRows(parts) if all(columns for columns, _ in parts) else None

    def __getstate__(self) -> dict[str, Any]:
        """Return what files hold: not what follows from it."""
        return {name: value for name, value in vars(self).items() if name not in (_FEW, _SCHEMA)}

    def encode(self, x: Table, method: str | None = None) -> npt.NDArray[np.float64]:
        """Pack the frontier into one table; arguments and errors as :meth:`tables`."""
        return pack(self.tables(x, method))

    def _read(self, value: FrontierValue, x: Columns) -> npt.NDArray[np.float64]:
        """Return a value of the frontier that is made of the input's columns one by one."""
        if value.lookup is None:
            return x.numbers(None if value.reads == (self._input,) else value.columns, value.name)
        assert isinstance(value.lookup, CategoryLookup)
        cells = x.cells(value.columns or ())
        return value.lookup.of_columns(cells, is_without_frame=x.is_without_frame)

    @property
    def takes_rows(self) -> bool:
        """True where the input may be one text, or another object, a row: only fallback operators read it as it is."""
        return self.width is None and all(self._input not in value.reads for value in self.frontier)


def pack(tables: Sequence[npt.NDArray[np.float64]]) -> npt.NDArray[np.float64]:
    """Put the frontier's tables side by side; writeable, since a tensor will share it."""
    return np.require(tables[0], np.float64, ["C", "W"]) if len(tables) == 1 else np.concatenate(tables, axis=1)


def _picked(source: Value, operators: Sequence[Operator]) -> dict[str, tuple[int, ...]]:
    """Return indices in the input, for the values that only picked columns of it."""
    picked = {} if source.width is None else {source.name: tuple(range(source.width))}
    for operator in operators:
        if operator.kind is Kind.SELECT:
            (read,) = operator.inputs
            columns = operator.columns or ()
            if read.name in picked:
                picked[operator.output.name] = tuple(picked[read.name][column] for column in columns)
            elif read.name == source.name:
                picked[operator.output.name] = columns
    return picked


def _columns_of(value: FrontierValue, picked: Mapping[str, tuple[int, ...]]) -> tuple[int, ...] | None:
    """Return the columns of the input that a frontier's value is made of, if it is made column by column."""
    is_by_column = value.lookup is None or isinstance(value.lookup, CategoryLookup)
    if not is_by_column or not all(name in picked for name in value.reads):
        return None
    return tuple(column for name in value.reads for column in picked[name])


def _table(sources: list[Table], value: FrontierValue) -> npt.NDArray[np.float64]:
    if value.lookup is not None:
        if hasattr(value.lookup, "check_frame") and len(sources) == 1 and hasattr(sources[0], "iloc"):
            value.lookup.check_frame(sources[0])
        return np.asarray(value.lookup(raw(side_by_side(sources))), np.float64)
    (source,) = sources
    if hasattr(source, "toarray"):
        source = source.toarray()
    found = numbers(source.to_numpy() if is_polars(source) else source, value.name)
    return found.reshape(-1, 1) if found.ndim == 1 else found
