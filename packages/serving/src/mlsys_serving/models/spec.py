"""Description of a model: its name and version, its tensors, and its maximum number of rows at once. Plain data.

:class:`ModelSettings` are what an operator or a load request sets beside it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mlsys_core.errors import InvalidInputError

from mlsys_serving.models.datatypes import DataType

_NAME = re.compile(r"[^/\s%?#\x00-\x1f\x7f]{1,200}")  # one segment of a URL's path, as clients write it there
_VERSION = re.compile(r"[1-9][0-9]{0,17}")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output of a model.

    Raises:
        InvalidInputError: an empty name, or a size below -1.

    Example:
        >>> TensorSpec("x", DataType.FP32, (-1, 80)).shape
        (-1, 80)
    """

    name: str
    datatype: DataType
    shape: tuple[int, ...]  # with the batch dimension, if the model has one; -1 takes any size
    optional: bool = False  # an input that requests may leave out
    finite_only: bool = False  # an input that is refused if it holds NaN or infinity
    utf8_only: bool = False  # a BYTES input whose elements are refused if they are no text
    labels: tuple[str, ...] = ()  # of an output: names of the classes along its last dimension

    def __post_init__(self) -> None:
        if not self.name:
            raise InvalidInputError("a tensor needs a name that is not empty")
        if any(size < -1 for size in self.shape):
            raise InvalidInputError(f"tensor {self.name!r} has shape {self.shape}: sizes are -1 (any) or 0 and more")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One version of a model.

    With ``max_batch_size`` above 0 the first dimension of every tensor is that of the batch: it is -1 in each shape,
    all inputs of a request have the same number of rows there, from 1 to ``max_batch_size``, and outputs as many.
    0 means that the model has no such dimension.

    Raises:
        InvalidInputError: the name does not fit into a URL's path, the version is no positive number, a tensor is named
            twice, or a shape does not begin with -1 where there is a batch dimension.

    Example:
        >>> rows = TensorSpec("x", DataType.FP32, (-1, 4))
        >>> ModelSpec(name="scale", inputs=(rows,), outputs=(rows,), max_batch_size=16).version
        '1'
    """

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    version: str = "1"  # a positive number; requests that name none get the greatest one that is ready
    platform: str = "mlsys"  # kind of model, e.g. "mlsys_dvabatch"
    max_batch_size: int = 0  # rows
    parameters: Mapping[str, str] = field(default_factory=dict)  # shown in the model's configuration
    is_stateful: bool = False  # an answer depends on earlier requests, as in a sequence

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise InvalidInputError(
                f"model name {self.name[:200]!r}: use 1 to 200 characters without spaces, '/', '%', '?' and '#'"
            )
        if not _VERSION.fullmatch(self.version):
            raise InvalidInputError(f"model {self.name!r} has version {self.version!r}: versions are '1', '2', ...")
        if self.max_batch_size < 0:
            raise InvalidInputError(f"model {self.name!r}: max_batch_size is 0 or more, got {self.max_batch_size}")
        for what, tensors in (("input", self.inputs), ("output", self.outputs)):
            names = [tensor.name for tensor in tensors]
            if len(set(names)) != len(names):
                raise InvalidInputError(f"model {self.name!r} has two {what}s of one name among {names}")
            for tensor in tensors:
                if self.max_batch_size and tensor.shape[:1] != (-1,):
                    raise InvalidInputError(
                        f"{what} {tensor.name!r} of model {self.name!r} has shape {tensor.shape}: the first dimension "
                        "is that of the batch and must be -1 (or set max_batch_size=0)"
                    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """Bounds of a model's requests."""

    max_batch_size: int = 0  # rows of a request; 0: the model's own
    default_timeout_s: float | None = None  # None: a request without a timeout has none
    may_override_timeout: bool = False  # a request's own timeout counts, not the default

    def timeout_s(self, asked_s: float | None) -> float | None:
        """Return how long a request may take; a request's own timeout counts where it may override the default.

        Example:
            >>> settings = ModelSettings(default_timeout_s=2.0)
            >>> settings.timeout_s(None), settings.timeout_s(0.5)
            (2.0, 2.0)
        """
        if self.default_timeout_s is None or (self.may_override_timeout and asked_s is not None):
            return asked_s
        return self.default_timeout_s

    def applied(self, spec: ModelSpec) -> ModelSpec:
        """Return the spec under these settings.

        Raises:
            InvalidInputError: The model takes fewer rows.
        """
        if self.max_batch_size > spec.max_batch_size:
            raise InvalidInputError(
                f"the configuration of model {spec.name!r} has max_batch_size {self.max_batch_size}, and the model "
                f"takes {spec.max_batch_size}: serve it with a larger --max-batch"
            )
        return replace(spec, max_batch_size=self.max_batch_size or spec.max_batch_size)


NO_SETTINGS = ModelSettings()
