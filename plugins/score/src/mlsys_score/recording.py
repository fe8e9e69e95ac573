"""Recordings of a board: read from a file or a request's body, and checked before anything is made of them."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import Annotated, Any, Literal

from mlsys_core.errors import InvalidInputError
from pydantic import BaseModel, ConfigDict, Field, ValidationError

MAX_COLUMNS, MAX_ROWS = 20_000, 50_000
_MAX_NBYTES = 256 * 2**20  # of a file, unpacked

_Count = Annotated[int, Field(ge=0, le=2**31)]
_Ms = Annotated[float, Field(ge=-1e12, le=1e12, allow_inf_nan=False)]
_Span = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
_Square = tuple[_Count, Literal["p", "d", "g", "x", "r"], _Count, _Count]
_Text = Annotated[str, Field(max_length=200)]


class _Wire(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class RecordedRow(_Wire):
    """See :class:`~.events.Row`; times in milliseconds."""

    row: _Count
    name: _Text = ""
    opened: _Ms | None = None
    prompt: _Count | None = None
    max_new: _Count | None = None
    cached: _Count = 0
    ended: _Ms | None = None
    reason: _Text | None = None


class RecordedColumn(_Wire):
    """See :class:`~.events.Column`; times in milliseconds."""

    n: _Count
    t: _Ms
    ms: _Span
    split: dict[_Text, _Span] = {}
    squares: list[_Square] = Field(max_length=10_000)
    waiting: _Count = 0
    lane: _Count = 0
    label: _Text = ""
    free: _Count | None = None
    tables: list[tuple[_Count, _Count, list[_Count]]] = []


class ScoreRecording(_Wire):
    """All that a board had, as :meth:`~.board.Board.snapshot` returns it."""

    format: Literal["mlsys-score"]
    version: Literal[1]
    system: _Text
    unit: _Text
    facts: dict[str, Any] = {}
    started: float = 0.0
    now: _Ms = 0.0
    waiting: _Count = 0
    rows: list[RecordedRow] = Field(max_length=MAX_ROWS)
    tables: list[tuple[_Count, list[_Count]]] = []
    columns: list[RecordedColumn] = Field(max_length=MAX_COLUMNS)


def parse_recording(data: bytes | str) -> ScoreRecording:
    """Return the recording in ``data``, JSON.

    Raises:
        InvalidInputError: it is none; the message names the first field that does not fit.
    """
    try:
        return ScoreRecording.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise InvalidInputError(
            f"this is no recording of the score ({where}: {first['msg']}); download one from a server's page, or from "
            "/ui/score/recording. A trace of mlsys or another tool opens at ui.perfetto.dev"
        ) from error


def read_recording(path: Path) -> ScoreRecording:
    """Return the recording in a file, ``.json`` or ``.json.gz``.

    Raises:
        InvalidInputError: it cannot be read, or holds none.
    """
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            with gzip.open(path) as unpacked:
                data = unpacked.read(_MAX_NBYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise InvalidInputError(f"cannot read {path}: {error}") from error
    if len(data) > _MAX_NBYTES:
        raise InvalidInputError(f"{path} has over {_MAX_NBYTES >> 20} MiB: no recording of a score is so large")
    return parse_recording(data)
