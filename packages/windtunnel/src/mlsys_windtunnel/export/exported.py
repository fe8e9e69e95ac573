"""A pipeline read from a ``.pt2`` or ONNX file: the program that it holds, and the host's part around it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from mlsys_core.errors import InvalidInputError

from mlsys_windtunnel.checks.table import no_rows
from mlsys_windtunnel.checks.values import Contract, rounded
from mlsys_windtunnel.export.plain import DAMAGE, Reader, check_schema
from mlsys_windtunnel.frontend import Frontend
from mlsys_windtunnel.host.raw_table import Table
from mlsys_windtunnel.module import METHODS, ROWS_PER_CHUNK
from mlsys_windtunnel.modules.ties import UndecidedError

FORMAT, VERSION = "mlsys-windtunnel-program", 3

MAIN = "main"  # the name of what forward answers
TIES = "undecided"  # of what tells rows that tie, see ``modules/ties.py``: [rows] bool

Program = Callable[[npt.NDArray[Any]], Sequence[npt.NDArray[Any]]]


@dataclass(frozen=True)
class ExportedPipeline:
    """A program with the host's part: raw rows in, answers out. Its methods are those that the file holds.

    ``predict``, ``predict_proba``, ... take and give what the source's do.
    """

    program: Program  # packed table of ``dtype`` to the answers
    answers: tuple[str, ...]
    flat: frozenset[str]  # those of one number a row
    classes: tuple[object, ...]
    outputs: tuple[tuple[object, ...], ...]  # the labels of each output, of a classifier of several
    dtype: str  # numpy's name
    frontend: Frontend
    checks: tuple[tuple[slice, Contract], ...] = ()  # columns of the packed table, and the numbers they may hold
    refusals: tuple[str, ...] = ()  # why input is refused, for each truth value after the answers

    @property
    def classes_(self) -> npt.NDArray[Any]:
        """The labels of a classifier; empty otherwise."""
        return np.asarray(self.classes)

    def encode(self, x: Table) -> npt.NDArray[np.float64]:
        """Encode raw input to the packed table; errors as :meth:`Frontend.encode`."""
        return self.frontend.encode(x)

    def answer(self, method: str, x: Table) -> Any:
        """Return the answer called ``method``, one of :attr:`answers`, for raw input: an array, or a list of them."""
        table = self.frontend.encode(x, method)
        if not len(table):
            raise no_rows(table.shape)
        for columns, contract in self.checks:
            contract.check(table[:, columns])
        packed = rounded(table, self.dtype)
        index = self.answers.index(method)
        starts = range(0, len(packed), ROWS_PER_CHUNK)
        parts = [self.program(packed[start : start + ROWS_PER_CHUNK]) for start in starts]
        for place, refusal in enumerate(self.refusals, len(self.answers)):
            if any(np.any(part[place]) for part in parts):
                raise InvalidInputError(refusal)
        if TIES in self.answers:
            unsure = np.concatenate([part[self.answers.index(TIES)] for part in parts])
            if unsure.any():
                raise UndecidedError(np.flatnonzero(unsure).tolist())
        result = np.concatenate([part[index] for part in parts])
        if self.outputs and method in ("predict", "predict_proba", "predict_log_proba"):
            return self._of_outputs(method, result)
        if method == "predict" and self.classes:
            result = self.classes_[result]
        return result[:, 0] if method in self.flat else result

    def _of_outputs(self, method: str, result: npt.NDArray[Any]) -> Any:
        """Return labels side by side, or a list of probabilities."""
        if method == "predict":
            each = [np.asarray(labels)[result[:, index]] for index, labels in enumerate(self.outputs)]
            return np.stack(each, axis=1)
        return np.split(result, np.cumsum([len(labels) for labels in self.outputs])[:-1], axis=1)

    def __getattr__(self, name: str) -> Any:
        if name in METHODS and name in self.answers:
            return lambda x: self.answer(name, x)
        if name in METHODS:
            raise AttributeError(f"this file has no {name}; it holds {', '.join(self.answers)}")
        raise AttributeError(name)


def restore(description: str, program: Program, path: Path) -> ExportedPipeline:
    """Join a program and its description.

    Raises:
        InvalidInputError: the description is damaged, of another version, or names fallback operators.
    """
    try:
        fields = json.loads(description)
        if fields["format"] != FORMAT or fields["version"] != VERSION:
            raise ValueError(f"format {fields['format']!r}, version {fields['version']!r}")
        check_schema(fields, "program", path)
        if fields["foreign"]:
            raise InvalidInputError(
                f"{path} takes the packed table alone: {', '.join(fields['foreign'])} runs on the host as it is and is "
                "not in the file; give the program what encode() of the translated module makes"
            )
        reader = Reader({})
        frontend = reader.read(fields["frontend"])
        if not isinstance(frontend, Frontend):
            raise TypeError("the frontend is another thing")
        unknown = {*fields["answers"], *fields["flat"]} - {*METHODS, MAIN, TIES}
        if unknown:
            raise ValueError(f"it has answers that no source gives: {sorted(map(str, unknown))}")
        return ExportedPipeline(
            program=program,
            answers=tuple(map(str, fields["answers"])),
            flat=frozenset(map(str, fields["flat"])),
            classes=tuple(reader.read(fields["classes"])),
            outputs=tuple(map(tuple, reader.read(fields["outputs"]))),
            dtype=str(np.dtype(fields["dtype"])),
            frontend=frontend,
            checks=_checks(fields["inputs"], reader.read(fields["checks"])),
            refusals=tuple(fields.get("refusals", ())),
        )
    except InvalidInputError:
        raise
    except DAMAGE as error:
        raise InvalidInputError(f"{path}: its description is damaged ({type(error).__name__}: {error})") from error


def _checks(inputs: list[Any], checks: list[Any]) -> tuple[tuple[slice, Contract], ...]:
    """Return checks by columns of the packed table."""
    ends = np.cumsum([int(width) for _, width in inputs]).tolist()
    columns = {name: slice(end - width, end) for (name, width), end in zip(inputs, ends, strict=True)}
    if not all(isinstance(contract, Contract) for _, contract in checks):
        raise TypeError("a check is no contract")
    return tuple((columns[name], contract) for name, contract in checks)
