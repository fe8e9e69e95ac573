"""A decoder's iteration as a list of operators over registers: what lowering writes and the native program runs.

Registers are fp32 matrices [rows, width], named by what they hold. ``states`` enters as the embedded tokens,
``logits`` leaves. Three operators are enough, since norms enter GEMMs and activations, gates and sums leave them:
about five a layer, so that five times a layer the threads meet. A fourth leaves rows behind: what the last layer makes
of a token after its attention is read by the head alone, and that only where a token is sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from mlsys_orca.model.blocks import Attention, Limits
from mlsys_orca.model.layers import LayerNorm, Linear, RMSNorm
from torch import Tensor, nn

if TYPE_CHECKING:
    from mlsys_orca.model.experts import Choice
    from mlsys_orca.model.recurrent import GateNorm, Recurrence

STATES = "states"
LOGITS = "logits"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemm:
    """``target (+)= activation(norm(source) @ weight.T + bias)``, or ``activation(gates) * factors`` of its halves."""

    source: str
    target: str
    linear: Linear
    norm: RMSNorm | LayerNorm | None = None
    activation: str | None = None  # a name of layers.ACTIVATIONS
    is_gated: bool = False  # the first half of the columns gates the second; the target is half as wide
    accumulates: bool = False  # adds to what the target holds
    num_slices: int = 1  # of the features that go in, summed apart and added in the tree of model.slices
    column: int = 0  # of the target, where the first one of the product's goes
    limits: Limits | None = None  # of a gated one, whose activation is then that of Limits
    is_partial: bool = False  # a part of the sum, without the bias; a `Reduce` makes the target of all ranks' parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Attend:
    """Operator that keeps one layer's new keys and values and attends to all of its own, request by request."""

    source: str  # queries, keys and values, head after head
    target: str
    attention: Attention
    rotary: int | None  # which of the decoder's rotaries turns the heads
    value_column: int | None = None  # of the source, where values begin; None: behind the keys
    only_sampled: bool = False  # attends for the sampled rows alone; the others' keys and values are kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Normalise:
    """``target (+)= norm(source)``, where a norm follows a product instead of going before one."""

    source: str
    target: str
    norm: RMSNorm | LayerNorm
    column: int = 0  # the first of those that are normalised
    target_column: int | None = None  # where it goes; None: as in the source
    accumulates: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherRows:
    """Operator that leaves only the sampled rows in ``register``, one after another."""

    register: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduce:
    """``target (+)= sum of the ranks' partial products + bias``: the ranks of a stage meet here."""

    target: str
    linear: Linear | None  # the partial product before it, for its bias; None: it has none
    accumulates: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Operator that chooses the experts of each row by a router's scores: an entry for each choice."""

    source: str  # [rows, experts]
    routing: int  # the number under which later operators find the entries
    choice: Choice


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouped:
    """Products by several matrices, all alike, each of rows of its own.

    A register of entries has as many rows for a token as this chose experts: its width is that of all of them.
    """

    source: str
    target: str
    linears: tuple[Linear, ...]
    rows_of: Literal["tokens", "entries", "parts"]  # of the source: the tokens that chose a matrix, its entries, or all
    routing: int | None = None  # None: of parts, which are features of each row
    norm: RMSNorm | LayerNorm | None = None
    activation: str | None = None
    is_gated: bool = False
    limits: Limits | None = None
    num_slices: int = 1
    is_partial: bool = False
    source_column: int = 0  # of parts: where the first one begins
    source_step: int = 0  # of parts: features from one to the next; 0: all matrices meet the same ones
    column: int = 0  # of the target, where the first part's result goes
    target_step: int = 0  # of parts: features from one result to the next
    accumulates: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Combine:
    """``target (+)= sum of a row's entries by their weights + sigmoid(gate) * shared``."""

    source: str
    target: str
    routing: int
    accumulates: bool = False
    biases: Tensor | None = None  # fp32 [experts, features], of entries
    shared: str | None = None
    gate: str | None = None  # one number a row; None: 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolve:
    """``target = silu(convolution(source))`` over a request's rows, those of earlier iterations included."""

    source: str  # its first columns are the channels
    target: str
    recurrence: Recurrence


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """Operator that changes the states of one recurrent layer token by token; ``target`` gets what they give."""

    source: str  # values, keys, queries
    steps: str  # behind its channels and gates: each head's step and rate
    target: str
    recurrence: Recurrence


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """``target = norm(source, silu(gate))``, or ``source * sigmoid(gate)``."""

    source: str
    gate: str
    target: str
    column: int  # of the gate's register
    size: int  # features
    norm: GateNorm | None = None


Operator = Gemm | Attend | Normalise | GatherRows | Reduce | Route | Grouped | Combine | Convolve | Scan | Gate


def reads(operator: Operator) -> tuple[str, ...]:
    """Return the registers that ``operator`` reads; what it adds to is one of them."""
    match operator:
        case Reduce():
            found: tuple[str | None, ...] = ()
        case Combine():
            found = (operator.source, operator.shared, operator.gate)
        case Gate():
            found = (operator.source, operator.gate)
        case Scan():
            found = (operator.source, operator.steps)
        case GatherRows():
            found = (operator.register,)
        case _:
            found = (operator.source,)
    if getattr(operator, "accumulates", False) and not isinstance(operator, GatherRows | Route):
        found += (operator.target,)
    return tuple(register for register in found if register is not None)


def written(operator: Operator) -> str | None:
    """Return the register that ``operator`` fills; None: it fills none."""
    if isinstance(operator, GatherRows | Route) or getattr(operator, "is_partial", False):
        return None
    return operator.target


def leaving_rows_behind(operators: Sequence[Operator]) -> list[Operator]:
    """Return ``operators`` with sampled rows gathered from every register still read, once no row reads another."""
    last = max((i for i, operator in enumerate(operators) if isinstance(operator, Attend | Scan)), default=-1)
    before: list[Operator] = list(operators[: last + 1])
    after = operators[last + 1 :]
    if before and isinstance(before[-1], Attend):
        before[-1] = replace(before[-1], only_sampled=True)
    read, filled = list[str](), set[str | None]()
    for operator in after:
        for register in reads(operator):
            if register not in (*read, *filled):
                read.append(register)
        filled.add(written(operator))
    return [*before, *(GatherRows(register=register) for register in read), *after]


@dataclass(frozen=True, slots=True)
class DecoderPlan:
    """All operators of one iteration. Owner: the native decoder."""

    widths: dict[str, int]  # register -> features; STATES first, LOGITS last
    operators: tuple[Operator, ...]

    def __str__(self) -> str:
        return "\n".join(_line(operator) for operator in self.operators)


def _line(operator: Operator) -> str:
    if isinstance(operator, GatherRows):
        return f"{operator.register} = sampled rows of {operator.register}"
    if isinstance(operator, Reduce):
        return f"{operator.target} {'+=' if operator.accumulates else '='} sum of all ranks' parts"
    source = operator.source
    if isinstance(operator, Route):
        return f"entries {operator.routing} = {operator.choice.num_chosen} experts by {source}"
    if isinstance(operator, Combine):
        arrow = "+=" if operator.accumulates else "="
        beside = "" if operator.shared is None else f" + {operator.shared}"
        if operator.gate is not None:
            beside = f" + sigmoid({operator.gate}) * {operator.shared}"
        return f"{operator.target} {arrow} weighted sum of {source} by entries {operator.routing}{beside}"
    if isinstance(operator, Attend):
        rows = "sampled rows of " if operator.only_sampled else ""
        return f"{operator.target} = attention {operator.attention.index} ({rows}{source})"
    if isinstance(operator, Convolve):
        return f"{operator.target} = silu(convolution {operator.recurrence.index} of {source})"
    if isinstance(operator, Scan):
        return f"{operator.target} = scan {operator.recurrence.index} ({source} by {operator.steps})"
    if isinstance(operator, Gate):
        gates = "sigmoid" if operator.norm is None else "silu"
        return f"{operator.target} = {source} let through by {gates}({operator.gate} from column {operator.column})"
    arrow = "+=" if operator.accumulates else "="
    if operator.norm is not None:
        source = f"{_norm_name(operator.norm)}({source})"
    if isinstance(operator, Normalise):
        return f"{operator.target} {arrow} {source}" + (f" from column {operator.column}" if operator.column else "")
    linear = operator.linears[0] if isinstance(operator, Grouped) else operator.linear
    product = f"[{linear.out_features}, {linear.in_features}] x {source}"
    if isinstance(operator, Grouped):
        of = "parts of" if operator.rows_of == "parts" else f"{operator.rows_of} {operator.routing} of"
        product = f"{len(operator.linears)} x [{linear.out_features}, {linear.in_features}] x {of} {source}"
    if operator.is_partial:
        return f"part = {product}" + (f" in {operator.num_slices} slices" if operator.num_slices > 1 else "")
    if operator.num_slices > 1:
        product += f" in {operator.num_slices} slices"
    if operator.activation is not None:
        product = f"{operator.activation}{' gate' if operator.is_gated else ''}({product})"
    columns = f" from column {operator.column}" if operator.column else ""
    return f"{operator.target}{columns} {arrow} {product}"


def _norm_name(norm: nn.Module) -> str:
    return "rms_norm" if isinstance(norm, RMSNorm) else "layer_norm"
