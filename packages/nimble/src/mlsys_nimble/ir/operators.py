"""The kinds of operators a program is made of: plain frozen data, torch's semantics, no torch.

Each docstring gives the operator's inputs in order (``?``: may be absent) and its result. A kind that takes an
:class:`Epilogue` applies it to every element of its result before it is stored; a residual is then the last input.
Adding a kind: its class here, its meaning in ``reference.py``, its kernel in ``native/`` (without one it cannot be
planned natively, so capture only makes kinds that have one), a rule in ``capture``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Activation: TypeAlias = Literal[
    "relu", "relu6", "silu", "sigmoid", "tanh", "gelu", "gelu_tanh", "hardswish", "hardsigmoid", "leaky_relu", "elu"
]


@dataclass(frozen=True, slots=True)
class Epilogue:
    """What is done to ``y`` before it is stored: ``activation(y + residual)``."""

    activation: Activation | None = None
    slope: float = 0.0  # of leaky_relu; alpha of elu
    has_residual: bool = False  # the operator's last input, of the result's shape, is added before the activation
    activates_first: bool = False  # activation(y) + residual instead


NOTHING = Epilogue()


@dataclass(frozen=True, slots=True)
class Convolution:
    """x [N, C, *space], weight [O, C/groups, *kernel] (constant), bias? [O]; -> [N, O, *space'].

    Space has one to three dims.
    """

    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]  # zeros before and after, per dimension of space; negative crops
    dilation: tuple[int, ...]
    groups: int
    has_bias: bool
    epilogue: Epilogue = NOTHING


@dataclass(frozen=True, slots=True)
class Separable:
    """x [N, C, H, W], weight [C, 1, *kernel], bias? [C], weight [O, C, 1, 1], bias? [O], constants; -> [N, O, H', W'].

    Two convolutions, one filter a channel and then 1x1; what the first gives is never stored whole.
    """

    depthwise: Convolution  # without a residual
    pointwise: Convolution  # its residual is the last input

    @property
    def epilogue(self) -> Epilogue:
        """Of the whole."""
        return self.pointwise.epilogue

    @property
    def num_weights(self) -> int:
        """How many constants follow x."""
        return 2 + self.depthwise.has_bias + self.pointwise.has_bias


@dataclass(frozen=True, slots=True)
class Linear:
    """x [*, K], weight [O, K] (constant), bias? [O]; -> [*, O]."""

    has_bias: bool
    epilogue: Epilogue = NOTHING


@dataclass(frozen=True, slots=True)
class MatMul:
    """a [*batch, M, K], b [*batch, K, N], both computed, batch dims equal; -> [*batch, M, N] times ``scale``."""

    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Product:
    """a [*rows, K], b [K, N], bias? [N], mask? [*rows, N], residual?; -> a b + bias [*rows, N], 0 where mask <= 0."""

    has_bias: bool = False
    has_mask: bool = False  # what a relu gave: its gradient; applied after the epilogue
    epilogue: Epilogue = NOTHING


@dataclass(frozen=True, slots=True)
class WeightGradient:
    """dy [*rows, N], x [*rows, K]; -> the sum of their outer products over the rows [N, K], and dy's sum? [N]."""

    has_bias: bool = False


@dataclass(frozen=True, slots=True)
class Attention:
    """q [B, H, L, D], k [B, H, S, D], v [B, H, S, E], mask? broadcastable to [B, H, L, S] (added); -> [B, H, L, E]."""

    scale: float
    is_causal: bool
    has_mask: bool
    has_zero_rows: bool = True  # a query that may see no key gives 0, as torch's does; False: NaN, as a softmax gives


@dataclass(frozen=True, slots=True)
class Step:
    """One elementwise operation of a :class:`Pointwise`."""

    op: str  # a key of pointwise.OPS, such as "add"; its arity is there
    arguments: tuple[int | float, ...]  # k >= 0: input k; -1 - k: the result of step k; a float: that constant


@dataclass(frozen=True, slots=True)
class Pointwise:
    """Inputs that broadcast to the result's shape; -> the last step, computed in ``dtype`` and cast to the result's."""

    steps: tuple[Step, ...]
    dtype: str = "float32"  # inputs are cast to it first; float32 also where all are bool


@dataclass(frozen=True, slots=True)
class Pool:
    """x [N, C, *space]; -> [N, C, *space']: maximum or average over windows."""

    op: Literal["max", "average"]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    counts_padding: bool = False  # averages: padded zeros are counted in the divisor
    epilogue: Epilogue = NOTHING


@dataclass(frozen=True, slots=True)
class Reduce:
    """x; -> x reduced over ``dims`` (non-negative, ascending), kept as ones or dropped."""

    op: Literal["sum", "mean", "max", "min"]
    dims: tuple[int, ...]
    keeps_dims: bool


@dataclass(frozen=True, slots=True)
class Softmax:
    """x; -> softmax over ``dim`` (non-negative)."""

    dim: int
    is_log: bool = False


@dataclass(frozen=True, slots=True)
class BatchNormTraining:
    """x [N, C, *space], weight [C], bias [C], running mean [C], running var [C], residual?; -> y and its statistics.

    These are the batch's mean [C], 1 / its standard deviation [C], the new running mean [C] and variance [C].
    """

    momentum: float
    eps: float
    epilogue: Epilogue = NOTHING  # of y: a residual, relu, or both


@dataclass(frozen=True, slots=True)
class BatchNormGradient:
    """dy, x, weight [C], mean [C], 1 / standard deviation [C]; -> dx, dweight [C], dbias [C]."""


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """x, weight?, bias? (constants over the last ``num_dims`` dims); -> x normalised over those dims."""

    num_dims: int
    eps: float
    has_weight: bool
    has_bias: bool


@dataclass(frozen=True, slots=True)
class Reshape:
    """x; -> the same elements in row-major order of the logical dims, in the result's shape."""


@dataclass(frozen=True, slots=True)
class Permute:
    """x; -> dimension ``dims[i]`` of x as dimension i."""

    dims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Slice:
    """x; -> every ``step``-th element of ``dim`` from ``start``, as many as the result has."""

    dim: int
    start: int
    step: int = 1


@dataclass(frozen=True, slots=True)
class Expand:
    """x; -> broadcast to the result's shape (leading dims are added)."""


@dataclass(frozen=True, slots=True)
class Concat:
    """Any number of inputs; -> one after another along ``dim``."""

    dim: int


@dataclass(frozen=True, slots=True)
class Pad:
    """x; -> ``value`` around it; negative amounts crop."""

    amounts: tuple[tuple[int, int], ...]  # before and after, for every dim
    value: float = 0.0


@dataclass(frozen=True, slots=True)
class Embedding:
    """table [V, D] (constant), indices [*] (integers); -> [*, D]."""


@dataclass(frozen=True, slots=True)
class Cast:
    """x; -> in the result's dtype."""


@dataclass(frozen=True, slots=True)
class Copy:
    """x; -> a value of its own (a result that must not share memory with an input or another result)."""


@dataclass(frozen=True, slots=True)
class Input:
    """Stands in :attr:`Aten.arguments` for the operator's k-th input."""

    index: int


@dataclass(frozen=True, slots=True)
class Aten:
    """Whatever torch has: run by torch. Inputs are the tensors among its arguments, in order."""

    target: str  # "aten.topk.default"
    arguments: tuple[Any, ...]  # tensors are Input(k); nested tuples allowed; dtypes and the like as torch's objects
    keywords: tuple[tuple[str, Any], ...] = ()
    contiguous: tuple[int, ...] = ()  # inputs that must lie row by row: so they lay in eager, and it may matter

    def __str__(self) -> str:
        return self.target


Kind: TypeAlias = (
    Convolution
    | Separable
    | Linear
    | MatMul
    | Product
    | WeightGradient
    | Attention
    | Pointwise
    | Pool
    | Reduce
    | Softmax
    | LayerNorm
    | BatchNormTraining
    | BatchNormGradient
    | Reshape
    | Permute
    | Slice
    | Expand
    | Concat
    | Pad
    | Embedding
    | Cast
    | Copy
    | Aten
)
VIEWS = (Reshape, Permute, Slice, Expand)  # may share their input's memory where strides allow it
