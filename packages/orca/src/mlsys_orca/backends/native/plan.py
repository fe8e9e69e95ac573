"""A decoder's iteration as a list of operators over registers: what lowering writes and the native program runs.

Registers are fp32 matrices [rows, width], named by what they hold. ``states`` enters as the embedded tokens,
``logits`` leaves. Three operators are enough, since norms enter GEMMs and activations, gates and sums leave them:
about five a layer, so that five times a layer the threads meet. A fourth leaves rows behind: what the last layer makes
of a token after its attention is read by the head alone, and that only where a token is sampled.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlsys_orca.model.blocks import Attention
from mlsys_orca.model.layers import LayerNorm, Linear, RMSNorm
from torch import nn

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
    is_partial: bool = False  # a part of the sum, without the bias; a `Reduce` makes the target of all ranks' parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Attend:
    """Operator that keeps one layer's new keys and values and attends to all of its own, request by request."""

    source: str  # queries, keys and values, head after head
    target: str
    attention: Attention
    rotary: int | None  # which of the decoder's rotaries turns the heads
    only_sampled: bool = False  # attends for the sampled rows alone; the others' keys and values are kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Normalise:
    """``target (+)= norm(source)``, where a norm follows a product instead of going before one."""

    source: str
    target: str
    norm: RMSNorm | LayerNorm
    column: int = 0  # the first of those that are normalised, in both registers
    accumulates: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherRows:
    """Operator that leaves only the sampled rows in ``register``, one after another."""

    register: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduce:
    """``target (+)= sum of the ranks' partial products + bias``: the ranks of a stage meet here."""

    target: str
    linear: Linear  # the partial product before it, for its bias
    accumulates: bool = False


Operator = Gemm | Attend | Normalise | GatherRows | Reduce


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
    if isinstance(operator, Attend):
        rows = "sampled rows of " if operator.only_sampled else ""
        return f"{operator.target} = attention {operator.attention.index} ({rows}{source})"
    arrow = "+=" if operator.accumulates else "="
    if operator.norm is not None:
        source = f"{_norm_name(operator.norm)}({source})"
    if isinstance(operator, Normalise):
        return f"{operator.target} {arrow} {source}" + (f" from column {operator.column}" if operator.column else "")
    product = f"[{operator.linear.out_features}, {operator.linear.in_features}] x {source}"
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
