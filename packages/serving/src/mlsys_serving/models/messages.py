"""Messages between the front and a model: one request in, one or more responses out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mlsys_core.errors import InvalidInputError

from mlsys_serving.models.datatypes import Array

Parameter = bool | int | float | str


@dataclass(frozen=True, slots=True, kw_only=True)
class InferRequest:
    """One request, decoded and checked against the model's spec: names, datatypes and shapes are right."""

    key: str  # unique in this process; what a scheduler may call the request
    model_name: str
    model_version: str
    inputs: Mapping[str, Array]  # dtypes and shapes as the spec says; read-only, may be views of the request's body
    outputs: tuple[str, ...]  # those the client wants, in its order; more may be given and are dropped
    num_rows: int = 1  # size of the batch dimension; 1 if the model has none
    request_id: str = ""  # the client's own, empty if it gave none; need not be unique
    parameters: Mapping[str, Parameter] = field(default_factory=dict)  # the client's, less those the front understands
    priority: int = 0  # as sent: 0 is the model's default, else 1 goes first, then 2, ...
    deadline_s: float | None = None  # seconds of the front's clock; the front itself ends the request then


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of a request's parts, in seconds; for statistics only."""

    queue_s: float = 0.0
    compute_input_s: float = 0.0  # gathering and padding
    compute_infer_s: float = 0.0
    compute_output_s: float = 0.0  # scattering


@dataclass(frozen=True, slots=True)
class InferResponse:
    """One answer. A unary request has one; a streaming one any number."""

    outputs: Mapping[str, Array]  # as the spec says; non-contiguous ones are copied
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    timing: Timing | None = None  # None: all of the request's time counts as compute_infer


def flag(parameters: Mapping[str, object], name: str) -> bool:
    """Return a parameter that is true or false; False if it is not given.

    Raises:
        InvalidInputError: it is something else.
    """
    value = parameters.get(name, False)
    if not isinstance(value, bool):
        raise InvalidInputError(f"parameter {name!r} is true or false, got {str(value)[:40]!r}")
    return value
