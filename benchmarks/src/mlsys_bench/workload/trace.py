"""A trace: the requests of one run, in order of arrival, in memory and as a JSON-lines file.

Joins arrivals and lengths; the load generator sends it and the simulators read it. The file's first line is a header:
the format and its version, how the trace was made, and the number of lines, so that a file cut short is noticed.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from mlsys_core.errors import InvalidInputError
from mlsys_core.workload import require_positive

from mlsys_bench.workload.arrivals import Arrivals, ClosedLoop, require_count, require_not_negative
from mlsys_bench.workload.files import read_text, write_text
from mlsys_bench.workload.lengths import Lengths

FORMAT = "mlsys-trace"
VERSION = 1


@dataclass(frozen=True, slots=True)
class TraceItem:
    """One request of a trace."""

    arrival_s: float  # seconds from the start of the run
    num_input_tokens: int
    num_output_tokens: int  # tokens to generate
    prompt: str | None = None  # the text to send; None: the target makes one of num_input_tokens
    extra: Mapping[str, Any] = field(default_factory=dict)  # more fields of the request's body; they win over ours
    index: int = 0  # position in the trace; not stored, the line order gives it

    def __post_init__(self) -> None:
        require_not_negative("arrival_s", self.arrival_s)
        require_count("num_input_tokens", self.num_input_tokens)
        require_count("num_output_tokens", self.num_output_tokens)


@dataclass(frozen=True, slots=True)
class Trace:
    """Items in order of arrival, and ``made_by``: the recipe (JSON values; empty if unknown)."""

    items: tuple[TraceItem, ...]
    made_by: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[TraceItem]:
        return iter(self.items)

    @property
    def closed_loop(self) -> ClosedLoop | None:
        """Closed-loop mode to run the trace in, or None if it was not made for one."""
        arrivals = self.made_by.get("arrivals")
        if not isinstance(arrivals, Mapping) or arrivals.get("kind") != ClosedLoop.__name__:
            return None
        return ClosedLoop(arrivals.get("concurrency", 1), arrivals.get("think_time_s", 0.0))

    def at_speed(self, speed: float) -> Trace:
        """Return the same requests arriving ``speed`` times as fast: one trace serves a whole sweep of loads.

        Example:
            >>> Trace((TraceItem(3.0, 1, 1),)).at_speed(2.0).items[0].arrival_s
            1.5
        """
        require_positive("the speed", speed)
        items = tuple(dataclasses.replace(item, arrival_s=item.arrival_s / speed) for item in self.items)
        return Trace(items, {**self.made_by, "speed": speed})


def make_trace(arrivals: Arrivals, *, prompts: Lengths, outputs: Lengths, num_items: int, seed: int) -> Trace:
    """Make a trace of ``num_items`` requests; equal arguments give an equal trace (and, written, the same bytes).

    Arrivals, prompts and outputs draw from three independent streams of ``seed``: with another rate the same requests
    come in the same order.

    Args:
        arrivals: process of the arrival times.
        prompts: the number of input tokens.
        outputs: the number of output tokens.
        num_items: number of requests.
        seed: of the random streams, 0 or above.

    Raises:
        InvalidInputError: ``num_items`` is below 1, ``seed`` below 0, or a replay is too short.

    Example:
        >>> from mlsys_core.workload import Poisson
        >>> from mlsys_bench.workload.lengths import Constant, Uniform
        >>> [item.num_output_tokens for item in
        ...  make_trace(Poisson(4), prompts=Uniform(32, 512), outputs=Constant(7), num_items=2, seed=0)]
        [7, 7]
    """
    require_count("the number of requests", num_items)
    require_count("the seed", seed, minimum=0)
    streams = [np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(3)]
    times_s = arrivals.times(num_items, streams[0])
    num_inputs = prompts.sample(num_items, streams[1])
    num_outputs = outputs.sample(num_items, streams[2])
    items = tuple(
        TraceItem(round(time_s, 6), num_input, num_output, index=index)  # microseconds: shorter lines, no loss in use
        for index, (time_s, num_input, num_output) in enumerate(
            zip(times_s.tolist(), num_inputs.tolist(), num_outputs.tolist(), strict=True)
        )
    )
    made_by = {"arrivals": arrivals, "prompts": prompts, "outputs": outputs}
    return Trace(items, {**{key: _describe(part) for key, part in made_by.items()}, "seed": seed})


def _describe(part: object) -> dict[str, Any]:
    """Return the record's kind and parameters; fields with ``repr=False`` hold data and are left out."""
    described: dict[str, Any] = {"kind": type(part).__name__}
    if dataclasses.is_dataclass(part):
        described |= {each.name: getattr(part, each.name) for each in dataclasses.fields(part) if each.repr}
    return described


def write_trace(trace: Trace, path: Path) -> None:
    """Write ``trace`` to ``path`` as JSON lines; a file already there is replaced whole or not at all.

    Raises:
        InvalidInputError: the file cannot be written, or an ``extra`` is no JSON value.
    """
    header = {"format": FORMAT, "version": VERSION, "num_items": len(trace), "made_by": trace.made_by}
    try:
        text = "".join(_dumps(entry) + "\n" for entry in [header, *map(_to_json, trace.items)])
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"the trace holds something that JSON cannot: {error}") from error
    write_text(path, text, "the trace")


def _dumps(entry: Mapping[str, Any]) -> str:
    return json.dumps(entry, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _to_json(item: TraceItem) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "arrival_s": item.arrival_s,
        "num_input_tokens": item.num_input_tokens,
        "num_output_tokens": item.num_output_tokens,
    }
    if item.prompt is not None:
        entry["prompt"] = item.prompt
    if item.extra:
        entry["extra"] = dict(item.extra)
    return entry


def read_trace(path: Path) -> Trace:
    """Return the trace in ``path``.

    Raises:
        InvalidInputError: the file cannot be read, is of another format or version, was cut short, or has a malformed
            line; the message names the line.
    """
    lines = read_text(path, "a trace").removesuffix("\n").split("\n")
    header = _parse_line(lines[0], f"{path}, line 1")
    if header.get("format") != FORMAT:
        raise InvalidInputError(f'{path}, line 1: no {FORMAT} header; write one with "mlsys workload generate"')
    if header.get("version") != VERSION:
        raise InvalidInputError(
            f"{path} has version {header.get('version')!r} of the format: this mlsys reads {VERSION}"
        )
    items: list[TraceItem] = []
    for index, line in enumerate(lines[1:]):
        where = f"{path}, line {index + 2}"
        item = _to_item(_parse_line(line, where), index, where)
        if items and item.arrival_s < items[-1].arrival_s:
            raise InvalidInputError(f"{where}: arrival_s {item.arrival_s:g} lies before the line above: sort the lines")
        items.append(item)
    if header.get("num_items") != len(items):
        raise InvalidInputError(f"{path} holds {len(items)} requests, its header says {header.get('num_items')!r}")
    made_by = header.get("made_by", {})
    if not isinstance(made_by, dict):
        raise InvalidInputError(f"{path}, line 1: made_by must be an object, got {made_by!r}")
    return Trace(tuple(items), made_by)


def _parse_line(line: str, where: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise InvalidInputError(f"{where}: not JSON ({error})") from error
    if not isinstance(entry, dict):
        raise InvalidInputError(f"{where}: expected a JSON object, got {line[:60]!r}")
    return entry


_ALLOWED_TYPES: dict[str, tuple[type, ...]] = {
    "arrival_s": (int, float),
    "num_input_tokens": (int,),
    "num_output_tokens": (int,),
    "prompt": (str, type(None)),
    "extra": (dict,),
}
_REQUIRED = ("arrival_s", "num_input_tokens", "num_output_tokens")


def _to_item(entry: dict[str, Any], index: int, where: str) -> TraceItem:
    for name in _REQUIRED:
        if name not in entry:
            raise InvalidInputError(f"{where}: {name!r} is missing")
    for name, value in entry.items():
        if name not in _ALLOWED_TYPES:
            raise InvalidInputError(f"{where}: unknown field {name!r}; allowed are {', '.join(_ALLOWED_TYPES)}")
        if isinstance(value, bool) or not isinstance(value, _ALLOWED_TYPES[name]):
            raise InvalidInputError(f"{where}: {name} is {value!r}, which is not of its type")
    try:
        return TraceItem(**{**entry, "arrival_s": float(entry["arrival_s"])}, index=index)
    except (InvalidInputError, OverflowError) as error:  # OverflowError: an integer beyond float
        raise InvalidInputError(f"{where}: {error}") from error
