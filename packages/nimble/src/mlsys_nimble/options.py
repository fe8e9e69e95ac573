"""Options by which models are prepared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlsys_core.errors import InvalidInputError

BF16, BF16_PAIRS = "bf16", "bf16-pairs"
# Of linears and convolutions (docs/nimble-cpu.md): "bf16" rounds the weights, "bf16-pairs" their inputs as well.
PRECISIONS = ("fp32", BF16, BF16_PAIRS)
WEIGHTS = ("pages", "bytes")

_MOST = {"num_threads": 1024, "max_schedules": 2**31, "max_concurrency": 1024}  # each at least 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options by which models are prepared."""

    executor: str = "auto"  # "native", "cuda", "reference", or "auto": by device
    use_multi_stream: bool = True  # run independent operators concurrently
    num_threads: int | None = None  # workers of the native executor; None: as many as torch uses
    max_schedules: int = 8  # sets of input shapes kept; the least recently used one is dropped
    max_concurrency: int = 1  # calls of one schedule that may run at once, each with memory of its own
    winograd: int = 4  # the largest tile for 3x3 convolutions in the native executor: 0, 2 or 4 (docs/nimble-cpu.md)
    kernels: str = "triton"  # CUDA executor: "triton" or "aten" (docs/nimble-cuda.md)
    rematerialises: bool = True  # training: recompute cheap values in the backward pass (min-cut)
    precision: str = "fp32"  # one of PRECISIONS
    weights: str = "pages"  # how a change is detected: one of WEIGHTS (docs/nimble.md)
    optimises: bool = True  # run the passes; without them the program has the model's operators

    def __post_init__(self) -> None:
        for name, most in _MOST.items():
            value = getattr(self, name)
            if name == "num_threads" and value is None:
                continue
            if type(value) is not int or not 1 <= value <= most:
                raise InvalidInputError(f"{name} is {value!r}; it must be an integer, at least 1 and at most {most}")
        for name in ("use_multi_stream", "rematerialises", "optimises"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidInputError(f"{name} is {getattr(self, name)!r}; it must be True or False")
        if self.precision not in PRECISIONS:
            names = ", ".join(map(repr, PRECISIONS))
            raise InvalidInputError(f"precision is {self.precision!r}; it may be one of {names}")
        if self.precision == BF16_PAIRS and self.executor == "cuda":
            raise InvalidInputError(
                f"precision {BF16_PAIRS!r} is for CPUs; on a GPU use model.bfloat16(), or precision 'bf16'"
            )
        if self.weights not in WEIGHTS:
            names = ", ".join(map(repr, WEIGHTS))
            raise InvalidInputError(f"weights is {self.weights!r}; it may be one of {names}")
        if self.winograd not in (0, 2, 4):
            raise InvalidInputError(f"winograd is {self.winograd!r}; it may be 0, 2 or 4")
        if self.kernels not in ("triton", "aten"):
            raise InvalidInputError(f"kernels is {self.kernels!r}; it may be 'triton' or 'aten'")


def make_options(options: Mapping[str, Any]) -> Options:
    """Make options from names and values.

    Raises:
        InvalidInputError: a name does not exist, or a value is out of range.

    Example:
        >>> make_options({"num_threads": 2}).num_threads
        2
    """
    known = Options.__dataclass_fields__
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise InvalidInputError(f"there is no option {unknown[0]!r}; there are {', '.join(known)}")
    return Options(**options)
