"""Kinds of operators that make up a program: plain frozen data with torch's semantics, without torch.

Each docstring gives the operator's inputs in order (``?``: may be absent) and its result. A kind that takes an
:class:`Epilogue` applies it to every element of its result before it is stored; a residual is then the last input.
``docs/adding.md`` lists the files of a new kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Activation: TypeAlias = Literal[
    "relu", "relu6", "silu", "sigmoid", "tanh", "gelu", "gelu_tanh", "hardswish", "hardsigmoid", "leaky_relu", "elu"
]


@dataclass(frozen=True, slots=True)
class Epilogue:
    """Operation on a result ``y`` before it is stored: ``activation(y + residual)``."""

    activation: Activation | None = None
    slope: float = 0.0  # slope of leaky_relu, alpha of elu
    has_residual: bool = False  # the operator's last input, of the result's shape, is added before the activation
    activates_first: bool = False  # activation(y) + residual instead


NOTHING = Epilogue()


@dataclass(frozen=True, slots=True)
class Convolution:
    """Convolution over one to three dims of space.

    x [N, C, *space], weight [O, C/groups, *kernel] (constant), bias? [O]; -> [N, O, *space'].
    """

    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]  # zeros before and after, per dimension of space; negative crops
    dilation: tuple[int, ...]
    groups: int
    has_bias: bool
    epilogue: Epilogue = NOTHING


@dataclass(frozen=True, slots=True)
class Separable:
    """Separable convolution: depthwise, then 1x1; the result of the first is never stored whole.

    x [N, C, H, W], weight [C, 1, *kernel], bias? [C], weight [O, C, 1, 1], bias? [O], constants; -> [N, O, H', W'].
    """

    depthwise: Convolution  # without a residual
    pointwise: Convolution  # its residual is the last input

    @property
    def epilogue(self) -> Epilogue:
        """Return the epilogue of the whole."""
        return self.pointwise.epilogue

    @property
    def num_weights(self) -> int:
        """Return the number of constants that follow x."""
        return 2 + self.depthwise.has_bias + self.pointwise.has_bias


@dataclass(frozen=True, slots=True)
class Linear:
    """Affine map: x [*, K], weight [O, K] (constant), bias? [O]; -> [*, O]."""

    has_bias: bool
    epilogue: Epilogue = NOTHING


@dataclass(frozen=True, slots=True)
class Codes:
    """Whole numbers that stand for floats: ``(code - zero_point) * scale``."""

    scale: float
    zero_point: int
    least: int  # smallest and largest code that rounding gives
    most: int


@dataclass(frozen=True, slots=True)
class Quantise:
    """Quantisation: x float32, parameters? (scale, zero point) float32 [2]; -> uint8 or int8."""

    codes: Codes
    is_dynamic: bool = False  # scale and zero point are the parameters, the range that of ``codes``


@dataclass(frozen=True, slots=True)
class Dequantise:
    """Dequantisation: x uint8 or int8, parameters? float32 [2]; -> float32."""

    codes: Codes
    is_dynamic: bool = False


@dataclass(frozen=True, slots=True)
class ChooseScale:
    """Scale and zero point for the range of x, as ``choose_qparams`` of PT2E; x float32 -> float32 [2]."""

    least: int
    most: int
    eps: float  # smallest scale


@dataclass(frozen=True, slots=True)
class IntegerProduct:
    """Convolution or linear of quantised values, with exact sums in int32; the epilogue is in float32.

    x uint8, weight int8 and scales float32 [O] (constants), bias? [O], parameters? of x float32 [2], residual?;
    -> codes of ``result``, or float32. The scales are the weight's.
    """

    main: Convolution | Linear
    x: Codes
    is_dynamic: bool = False  # scale and zero point of x are the parameters
    residual: Codes | None = None  # None: float32
    result: Codes | None = None

    @property
    def epilogue(self) -> Epilogue:
        """Return the epilogue, of the product in floats."""
        return self.main.epilogue


@dataclass(frozen=True, slots=True)
class Bf16Product:
    """Convolution or linear whose input is rounded to bf16; sums and epilogue are in float32.

    Inputs and result are those of ``main``, float32. The weight is a constant whose values bf16 holds.
    """

    main: Convolution | Linear

    @property
    def epilogue(self) -> Epilogue:
        """Return the epilogue, which is that of ``main``."""
        return self.main.epilogue


@dataclass(frozen=True, slots=True)
class MatMul:
    """Batched product: a [*batch, M, K], b [*batch, K, N], both computed; -> [*batch, M, N] times ``scale``."""

    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Gemm:
    """GEMM of rows, both sides computed: a linear layer while its weight changes.

    a [*rows, K], b [K, N], bias? [N], mask? [*rows, N], residual?; -> a b + bias [*rows, N], 0 where mask <= 0.
    """

    has_bias: bool = False
    has_mask: bool = False  # a relu's result, to form its gradient; applied after the epilogue
    epilogue: Epilogue = NOTHING


@dataclass(frozen=True, slots=True)
class WeightGradient:
    """Gradient of a Linear: dy [*rows, N], x [*rows, K]; -> dweight [N, K], dbias? [N], sums over the rows."""

    has_bias: bool = False


@dataclass(frozen=True, slots=True)
class Attention:
    """Scaled dot product attention.

    q [B, H, L, D], k [B, H, S, D], v [B, H, S, E], mask? broadcastable to [B, H, L, S] (added); -> [B, H, L, E].
    """

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
    """Elementwise steps; -> the last one's result, computed in ``dtype`` and cast. Inputs broadcast to its shape."""

    steps: tuple[Step, ...]
    dtype: str = "float32"  # inputs are cast to it first; float32 also where all are bool


@dataclass(frozen=True, slots=True)
class Pool:
    """Maximum or average over windows: x [N, C, *space]; -> [N, C, *space']."""

    op: Literal["max", "average"]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    counts_padding: bool = False  # averages: padded zeros are counted in the divisor
    epilogue: Epilogue = NOTHING


@dataclass(frozen=True, slots=True)
class Reduce:
    """Reduction: x; -> x reduced over ``dims`` (non-negative, ascending), kept as ones or dropped."""

    op: Literal["sum", "mean", "max", "min"]
    dims: tuple[int, ...]
    keeps_dims: bool
    squares: bool = False  # each element is squared first


@dataclass(frozen=True, slots=True)
class Softmax:
    """Softmax or its logarithm: x; -> over ``dim`` (non-negative)."""

    dim: int
    is_log: bool = False


@dataclass(frozen=True, slots=True)
class BatchNormTraining:
    """Batch norm that computes the batch's statistics.

    x [N, C, *space], weight [C], bias [C], running mean [C], running var [C], residual?; -> y, the batch's mean [C],
    1 / its standard deviation [C], the new running mean [C] and variance [C].
    """

    momentum: float
    eps: float
    epilogue: Epilogue = NOTHING  # applied to y: a residual, relu, or both


@dataclass(frozen=True, slots=True)
class BatchNormGradient:
    """Gradient of batch norm: dy, x, weight [C], mean [C], 1 / std [C]; -> dx, dweight [C], dbias [C]."""


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """Layer norm: x, weight?, bias? (constants over the last ``num_dims`` dims); -> x normalised over those dims."""

    num_dims: int
    eps: float
    has_weight: bool
    has_bias: bool


@dataclass(frozen=True, slots=True)
class Reshape:
    """Reshape: x; -> the same elements in row-major order of the logical dims, in the result's shape."""


@dataclass(frozen=True, slots=True)
class Permute:
    """Permutation: x; -> dimension ``dims[i]`` of x as dimension i."""

    dims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Slice:
    """Slice: x; -> every ``step``-th element of ``dim`` from ``start``, as many as the result has."""

    dim: int
    start: int
    step: int = 1


@dataclass(frozen=True, slots=True)
class Expand:
    """Broadcast: x; -> x in the result's shape (leading dims are added)."""


@dataclass(frozen=True, slots=True)
class Concat:
    """Concatenation: any number of inputs; -> one after another along ``dim``."""

    dim: int


@dataclass(frozen=True, slots=True)
class Pad:
    """Padding: x; -> x with ``value`` around it; negative amounts crop."""

    amounts: tuple[tuple[int, int], ...]  # before and after, for every dim
    value: float = 0.0


@dataclass(frozen=True, slots=True)
class Embedding:
    """Gather of rows: table [V, D] (constant), indices [*] (integers); -> [*, D]."""


@dataclass(frozen=True, slots=True)
class Gather:
    """Gather of rows: x [N, *row] (computed), indices [*] (integers); -> [*, *row]."""

    wraps: bool  # negative indices count from the end


@dataclass(frozen=True, slots=True)
class ScatterAdd:
    """Sum of rows: x [N, *row], indices [E] (integers), source [E, *row]; -> x with source added, in order.

    With ``taken``, source is [M, *row], and further indices [E] say which of its rows are added; with ``has_scale``,
    each is multiplied by a number of the last input, [E, 1, ...].
    """

    taken: Gather | None = None
    has_scale: bool = False


@dataclass(frozen=True, slots=True)
class Cast:
    """Cast: x; -> x in the result's dtype."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy: x; -> a value of its own (a result that must not share memory with an input or another result)."""


@dataclass(frozen=True, slots=True)
class Input:
    """Placeholder in :attr:`Aten.arguments` for the operator's input number ``index``."""

    index: int


@dataclass(frozen=True, slots=True)
class Aten:
    """Operator that torch runs. Inputs are the tensors among its arguments, in order."""

    target: str  # "aten.topk.default"
    arguments: tuple[Any, ...]  # tensors are Input(k); nested tuples allowed; dtypes and the like as torch's objects
    keywords: tuple[tuple[str, Any], ...] = ()
    contiguous: tuple[int, ...] = ()  # inputs that must be row-major, as in eager: results may depend on it

    def __str__(self) -> str:
        return self.target


Kind: TypeAlias = (
    Convolution
    | Separable
    | Linear
    | Quantise
    | Dequantise
    | ChooseScale
    | IntegerProduct
    | Bf16Product
    | MatMul
    | Gemm
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
    | Gather
    | ScatterAdd
    | Cast
    | Copy
    | Aten
)
VIEWS = (Reshape, Permute, Slice, Expand)  # may share their input's memory where strides allow it
ROW_MAJOR = (Linear, MatMul, Embedding, Gather, ScatterAdd, Aten, LayerNorm)  # results are row-major for any input
