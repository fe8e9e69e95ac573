"""The host's part of an exported pipeline as plain data: raw columns of one type each, and the tables made of them.

``onnx_columns.py`` writes a plan as nodes of ONNX, which run without WindTunnel. What no plan can say is refused by
name. Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from mlsys_core.errors import InvalidInputError

from mlsys_windtunnel.convert.trees_lookup import KnownLookup, MixedLookup
from mlsys_windtunnel.export.host_parts import (
    Category,
    Cells,
    Code,
    Codes,
    Column,
    ColumnType,
    Fill,
    Flags,
    HostPlan,
    Numbers,
    Part,
    cannot,
)
from mlsys_windtunnel.frontend import Frontend, FrontierValue
from mlsys_windtunnel.host.fill import Filler, Words
from mlsys_windtunnel.host.lookup import UNKNOWN, CategoryLookup, HashLookup, MissingLookup, Vocabulary, is_missing
from mlsys_windtunnel.host.raw_table import is_polars
from mlsys_windtunnel.parse.graph import Kind, Operator


def plan_host(frontend: Frontend, types: Mapping[str, ColumnType] | None = None) -> HostPlan:
    """Plan the host's part of a pipeline for programs that stand alone.

    Args:
        frontend: The host's part.
        types: Types of raw columns by name; the others have the type of their categories, or are numbers (double).

    Raises:
        InvalidInputError: an operator, a look-up or a type that no plan can say; the message names it.
    """
    resolver = _Resolver(frontend)
    parts = [resolver.part(value) for value in frontend.frontier]
    kinds: dict[int, set[ColumnType]] = {}
    for part in parts:
        for place, kind in _types(part, resolver.names):
            kinds.setdefault(place, set()).add(kind)
    places = sorted(kinds)
    columns = tuple(Column(resolver.names[place], _one_type(kinds[place], resolver.names[place])) for place in places)
    columns = tuple(_declared(column, (types or {}).get(column.name)) for column in columns)
    moved = {place: index for index, place in enumerate(places)}
    return HostPlan(
        columns=columns,
        is_named=frontend.columns is not None,
        indices=tuple(places),
        width=len(resolver.names),
        tables=tuple(_moved(part, moved) for part in parts),
        frontier=tuple(value.name for value in frontend.frontier),
    )


def types_of(rows: Any) -> dict[str, ColumnType]:
    """Return the types of a frame's columns: of pandas or polars."""
    found: dict[str, ColumnType] = {}
    for name in rows.columns:
        array = rows[name].to_numpy() if is_polars(rows) else np.asarray(rows[name])
        kind = array.dtype.kind
        if kind == "O":
            cells = {type(cell) for cell in array.tolist() if cell is not None and not is_missing(cell)}
            kind = "b" if cells == {bool} else "i" if cells == {int} else "f" if cells <= {int, float} else "U"
        wide: ColumnType = "float" if array.dtype == np.float32 else "double"
        by_kind: dict[str, ColumnType] = {"f": wide, "i": "int64", "u": "int64", "b": "bool", "U": "string"}
        if kind in by_kind:
            found[str(name)] = by_kind[kind]
    return found


class _Resolver:
    """Values of the host's graph, followed back to raw columns."""

    def __init__(self, frontend: Frontend) -> None:
        if frontend.width is None:
            raise InvalidInputError(
                "this pipeline takes texts, not a table of columns, so its file cannot take named columns; "
                "put the text into a column with a ColumnTransformer, or export with columns=False"
            )
        self.names = list(frontend.columns or (f"x{place}" for place in range(frontend.width)))
        self._made: Mapping[str, Operator] = {each.output.name: each for each in frontend._operators}
        self._input = frontend._input

    def part(self, value: FrontierValue) -> Part:
        """Return how a value of the frontier is made."""
        lookup = value.lookup
        if lookup is None and len(value.reads) == 1 and self._are_words(value.reads[0]):
            raise InvalidInputError(
                "ONNX has no operator that splits text as scikit-learn's vectorisers do; save a folder, or export with "
                "columns=False (--packed)"
            )
        cells = [each for name in value.reads for each in self._cells(name)]
        if lookup is None:
            return Numbers(self._unfilled(cells, value.name))
        if isinstance(lookup, CategoryLookup):
            if isinstance(lookup, HashLookup):
                raise InvalidInputError(
                    "ONNX has no operator that hashes categories as HashEncoder does; save a folder, or export with "
                    "columns=False (--packed)"
                )
            if type(lookup) is not CategoryLookup:
                raise cannot(type(lookup).__name__)
            pairs = zip(cells, lookup.vocabularies, strict=True)
            refuses = lookup.unknown == "refuse"
            return Codes(tuple(_code(each, words, words.size, refuses=refuses) for each, words in pairs))
        if isinstance(lookup, MixedLookup):
            plain = self._unfilled(cells, value.name)
            known, refuses = lookup.vocabularies, isinstance(lookup, KnownLookup)
            return Codes(
                tuple(
                    _code(cells[place], known[place], np.nan, refuses=refuses) if place in known else plain[place]
                    for place in lookup.columns
                )
            )
        if isinstance(lookup, MissingLookup):
            marker = np.nan if is_missing(lookup.marker) else _category(lookup.marker, value.name)
            return Flags(self._unfilled(cells, value.name), lookup.places, marker, lookup.refuses_new)
        raise cannot(f"the look-up of categories of {value.name} ({type(lookup).__name__.removesuffix('Lookup')})")

    def _cells(self, name: str) -> list[Cells]:
        if name == self._input:
            return [Cells(place) for place in range(len(self.names))]
        operator = self._made.get(name)
        if operator is None:
            raise cannot(name)
        if operator.kind is Kind.SELECT:
            inner = self._cells(operator.inputs[0].name)
            return [inner[place] for place in operator.columns or ()]
        if operator.kind is Kind.CONCATENATE:
            return [each for value in operator.inputs for each in self._cells(value.name)]
        inner = [each for value in operator.inputs for each in self._cells(value.name)]
        filler = operator.estimator
        if not isinstance(filler, Filler):
            raise cannot(f"{operator.source or operator.kind.value} ({operator.name})")
        filled = zip(filler.kept, filler.values, strict=True)
        return [
            Cells(
                inner[place].column,
                (*inner[place].fills, Fill(filler.marker, value, filler.takes_all_missing)),
            )
            for place, value in filled
        ]

    def _are_words(self, name: str) -> bool:
        operator = self._made.get(name)
        return operator is not None and isinstance(operator.estimator, Words)

    def _unfilled(self, cells: Sequence[Cells], name: str) -> tuple[int, ...]:
        if any(each.fills for each in cells):
            raise cannot(f"an imputer of objects whose values {name} reads as they are")
        return tuple(each.column for each in cells)


def _code(cells: Cells, words: Vocabulary, unknown: float, *, refuses: bool = False) -> Code:
    categories, missing = words.items()
    plain = tuple(_category(category, "a category") for category in categories)
    return Code(
        cells=cells,
        categories=plain,
        codes=tuple(categories.values()),
        missing=None if missing == UNKNOWN else missing,
        unknown=unknown,
        refuses=refuses,
    )


def _category(value: Any, where: str) -> Category:
    value = value.item() if isinstance(value, np.generic) else value
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise cannot(f"{where} of the type {type(value).__name__}")


def _types(part: Part, names: Sequence[str]) -> list[tuple[int, ColumnType]]:
    """Return the raw columns that a part reads, by place, and the types that suit it."""
    if isinstance(part, Numbers):
        return [(place, "double") for place in part.columns]
    if isinstance(part, Flags):
        return [(place, "string" if isinstance(part.marker, str) else "double") for place in part.columns]
    return [
        (each, "double") if isinstance(each, int) else (each.cells.column, _type_of(each, names))
        for each in part.columns
    ]


def _type_of(code: Code, names: Sequence[str]) -> ColumnType:
    values = [*code.categories, *(fill.value for fill in code.cells.fills), *(fill.marker for fill in code.cells.fills)]
    kinds = {type(value) for value in values if value is not None and not is_missing(value)}
    has_gaps = code.missing is not None or any(is_missing(fill.marker) for fill in code.cells.fills)
    if kinds <= {str}:
        return "string"
    if kinds == {bool}:
        return "bool"
    if kinds <= {int, float} and not any(value is None for value in values):
        return "int64" if kinds == {int} and not has_gaps else "double"
    raise cannot(
        f"the column {names[code.cells.column]!r}, whose categories are of several types "
        f"({', '.join(sorted(kind.__name__ for kind in kinds))}); make them text"
    )


def _one_type(kinds: set[ColumnType], name: str) -> ColumnType:
    if len(kinds) == 1:
        return next(iter(kinds))
    if "string" in kinds:
        raise cannot(f"the column {name!r}, which is read as text and as numbers")
    return "bool" if kinds == {"bool", "double"} else "double"


def _declared(column: Column, wanted: ColumnType | None) -> Column:
    if wanted is None or wanted == column.type:
        return column
    if "string" in (wanted, column.type) or column.type == "bool":
        raise InvalidInputError(
            f"the column {column.name!r} is of type {wanted} in the example, and the pipeline reads {column.type}; "
            "give rows as the pipeline was fitted on"
        )
    return Column(column.name, wanted)


def _moved(part: Part, moved: Mapping[int, int]) -> Part:
    """Return the part with indices in the plan's columns for places in the input."""
    if isinstance(part, Numbers):
        return Numbers(tuple(moved[place] for place in part.columns))
    if isinstance(part, Flags):
        return Flags(tuple(moved[each] for each in part.columns), part.flagged, part.marker, part.refuses_new)
    columns: list[Code | int] = []
    for each in part.columns:
        if isinstance(each, int):
            columns.append(moved[each])
            continue
        cells = Cells(moved[each.cells.column], each.cells.fills)
        columns.append(Code(cells, each.categories, each.codes, each.missing, each.unknown, each.refuses))
    return Codes(tuple(columns))
