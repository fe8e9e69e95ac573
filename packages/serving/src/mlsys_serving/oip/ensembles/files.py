"""Read an ensemble or a cascade from a JSON file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlsys_core.errors import InvalidInputError

from mlsys_serving.oip.ensembles.plan import Cascade, Declared, Ensemble, Level, Step, check_rule

_MAX_NBYTES = 1 << 20


def read_declared(path: Path) -> Declared:
    """Return what a file declares: ``{"name", "steps", "outputs"}``, or ``{"name", "cascade"}``.

    Raises:
        InvalidInputError: It cannot be read, or declares neither; the message names the file.
    """
    try:
        if path.stat().st_size > _MAX_NBYTES:
            raise InvalidInputError(f"{path} is larger than {_MAX_NBYTES} bytes")
        value = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_object)
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidInputError(f"{path} cannot be read: {error}") from error
    try:
        return declared(value)
    except InvalidInputError as error:
        raise InvalidInputError(f"{path}: {error}") from error


def declared(value: Any) -> Declared:
    """Return the ensemble or cascade in a JSON value.

    Raises:
        InvalidInputError: It is neither.

    Example:
        >>> small = {"model": "small", "output": "y", "at_least": 0.9}
        >>> declared({"name": "a", "cascade": [small, {"model": "large"}]}).levels[1]
        Level(model='large', output='', rule='confidence', at_least=0.0)
    """
    if isinstance(value, dict) and "cascade" in value:
        fields = _fields(value, "a cascade", {"name": str, "cascade": list})
        given = fields["cascade"]
        if len(given) < 2:
            raise InvalidInputError("a cascade has two models or more")
        levels = [_level(fields["name"], each, is_last=each is given[-1]) for each in given]
        return Cascade(fields["name"], tuple(levels))
    fields = _fields(value, "an ensemble", {"name": str, "steps": list, "outputs": list})
    if not fields["steps"] or not fields["outputs"] or not all(isinstance(each, str) for each in fields["outputs"]):
        raise InvalidInputError("an ensemble has steps, and names of outputs")
    if len(set(fields["outputs"])) != len(fields["outputs"]):
        raise InvalidInputError("an ensemble names an output twice")
    return Ensemble(fields["name"], tuple(map(_step, fields["steps"])), tuple(fields["outputs"]))


def _step(value: Any) -> Step:
    fields = _fields(value, "a step", {"model": str, "inputs": dict, "outputs": dict})
    for names in (fields["inputs"], fields["outputs"]):
        if not names or not all(isinstance(name, str) for name in names.values()):
            raise InvalidInputError("a step's inputs and outputs are names by the model's own names")
    return Step(fields["model"], fields["inputs"], fields["outputs"])


def _level(name: str, value: Any, *, is_last: bool) -> Level:
    if is_last:
        return Level(_fields(value, "the last level", {"model": str})["model"])
    wanted = {"model": str, "output": str, "at_least": (int, float)}
    fields = _fields(value, "a level", wanted, {"rule": str})
    level = Level(fields["model"], fields["output"], fields.get("rule", "confidence"), _double(fields["at_least"]))
    check_rule(name, level.rule, level.at_least)
    return level


def _double(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # a whole number of hundreds of digits
        return math.inf if value > 0 else -math.inf


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object, none of whose names may come twice: the first of the two would be lost."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {twice[:100]!r} comes twice in one object")
    return found


def _fields(value: Any, what: str, wanted: Mapping[str, Any], optional: Mapping[str, Any] | None = None) -> Any:
    """Return an object that has all fields that are wanted, of their types, and no others."""
    known = {**wanted, **(optional or {})}
    if not isinstance(value, dict):
        raise InvalidInputError(f"{what} is an object, got {type(value).__name__}")
    missing, unknown = wanted.keys() - value.keys(), value.keys() - known.keys()
    if missing or unknown:
        problem = f"lacks {sorted(missing)}" if missing else f"has the unknown fields {sorted(unknown)}"
        raise InvalidInputError(f"{what} has the fields {list(known)}; this one {problem}")
    for name, kind in known.items():
        if name in value and (not isinstance(value[name], kind) or isinstance(value[name], bool)):
            raise InvalidInputError(f"{name!r} of {what} is of another type: {type(value[name]).__name__}")
    return value
