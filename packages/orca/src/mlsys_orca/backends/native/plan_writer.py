"""Writer of a decoder's plan: operators and registers, with the checks that each kind of layer shares.

Between :mod:`.lowering`, which says what a layer is made of, and :mod:`.plan`.
"""

from __future__ import annotations

from collections.abc import Iterable

from mlsys_core.errors import MlsysError
from mlsys_orca.backends.native.plan import STATES, Attend, Gemm, Normalise, Operator, Reduce
from mlsys_orca.model.blocks import Attention, Cast, Decoder, GatedMLP, RotatedBy, WideNorms
from mlsys_orca.model.layers import LayerNorm, Linear, RMSNorm, Rotaries, Rotary, StackedLinear
from mlsys_orca.model.weights.quantized import QuantizedMatrix
from torch import nn

MAX_HEAD_DIM = 1024  # attention.h's own


class LoweringError(MlsysError):
    """A decoder has a part that the native program has no operator for."""

    def __init__(self, part: str) -> None:
        super().__init__(f"there is no native operator for {part}")


class PlanWriter:
    """The plan so far; registers come to be when something is written to them.

    Args:
        decoder: Whose plan it is.
        slices: Slices of the sums that ranks may share.
        num_ranks: Ranks that share them.

    Raises:
        LoweringError: positions turn its heads in a way that has no operator.
    """

    def __init__(self, decoder: Decoder, slices: int, num_ranks: int) -> None:
        if decoder.rotary is not None and type(decoder.rotary) not in (Rotary, Rotaries):
            raise LoweringError(f"rotary positions by {type(decoder.rotary).__name__}")
        self.rotary = None if decoder.rotary is None else 0
        self.num_slices, self.num_ranks = slices // num_ranks, num_ranks
        self.widths: dict[str, int] = {}
        self.operators: list[Operator] = []
        self._num_routings = 0

    def gemm(
        self,
        source: str,
        linear: nn.Module,
        target: str,
        *,
        norm: nn.Module | None = None,
        activation: str | None = None,
        is_gated: bool = False,
        accumulates: bool = False,
        num_slices: int = 1,
        is_partial: bool = False,
        column: int | None = None,
    ) -> None:
        """Write the product of ``norm(source)`` by ``linear``; see :class:`.plan.Gemm`."""
        linear = _linear(linear)
        if column is None:
            self.write(target, linear.out_features // 2 if is_gated else linear.out_features)
        column, parts = column or 0, [linear]
        if isinstance(linear, StackedLinear):  # of matrices that have kernels of their own
            if is_gated or is_partial:
                raise LoweringError("gates or parts of sums by several matrices")
            parts = [_linear(part) for part in linear.parts]
        for part in parts:
            self.operators.append(
                Gemm(
                    source=source,
                    target=target,
                    linear=part,
                    norm=self.norm(norm),
                    activation=activation,
                    is_gated=is_gated,
                    accumulates=accumulates,
                    num_slices=num_slices,
                    column=column,
                    is_partial=is_partial,
                )
            )
            column += part.out_features

    def gated_mlp(self, mlp: nn.Module, target: str, *, norm: nn.Module | None) -> None:
        """Write an MLP beside experts, whole on this rank, into a register of its own."""
        if not isinstance(mlp, GatedMLP) or self.num_ranks > 1:
            raise LoweringError("a shared expert other than a gated MLP, or one that ranks share")
        self.gemm(STATES, mlp.gate_up, "shared_inner", norm=norm, activation=mlp.activation_name, is_gated=True)
        self.gemm("shared_inner", mlp.down, target)

    def new_routing(self) -> int:
        """Return the number of one more choice of experts."""
        self._num_routings += 1
        return self._num_routings - 1

    def alike(self, products: Iterable[nn.Module], owners: str) -> tuple[Linear, ...]:
        """Return the products of ``owners`` ("experts") as one operator takes them: linears of one form.

        Raises:
            LoweringError: one is no linear, or unlike the others.
        """
        linears: list[Linear] = []
        for product in products:
            if not isinstance(product, Linear) or isinstance(product, StackedLinear):
                raise LoweringError(f"a product of {owners} by {type(product).__name__}")
            linears.append(product)
        if len({_form_of(linear) for linear in linears}) > 1:
            raise LoweringError(f"{owners} whose weights differ in size or form")
        return tuple(linears)

    def norm(self, norm: nn.Module | None) -> RMSNorm | LayerNorm | None:
        """Return ``norm`` as products take it: what only casts is none."""
        return None if norm is None or isinstance(norm, Cast) else _norm(norm)

    def sum_of_ranks(self, source: str, linear: nn.Module, target: str) -> None:
        """Write a product whose input features may lie on several ranks; it adds to ``states``, or fills a register."""
        accumulates = target == STATES
        if self.num_ranks == 1:
            self.gemm(source, linear, target, accumulates=accumulates, num_slices=self.num_slices)
            return
        self.gemm(source, linear, target, num_slices=self.num_slices, is_partial=True)
        self.operators.append(Reduce(target=target, linear=_linear(linear), accumulates=accumulates))

    def attend(
        self,
        attention: Attention,
        source: str,
        target: str,
        *,
        rotary: int | None,
        value_column: int | None = None,
    ) -> None:
        """Write the attention of a layer over the cache."""
        if type(attention) is not Attention:
            raise LoweringError(f"attention by {type(attention).__name__}")
        if not attention.options.is_causal or attention.options.bias is not None:
            raise LoweringError("attention that is not causal, or that has a bias")
        if attention.head_dim > MAX_HEAD_DIM:
            raise LoweringError(f"heads of {attention.head_dim} features")
        norm = attention.qk_norm
        if isinstance(norm, WideNorms):
            if self.num_ranks > 1:
                raise LoweringError("norms over all heads, which ranks share")
            self.normalise(source, norm.query, source)
            self.normalise(source, norm.key, source, column=norm.query.weight.numel())
        elif norm is not None and not (isinstance(norm, RMSNorm | LayerNorm) and norm.weight is not None):
            raise LoweringError(f"queries and keys normalised by {type(norm).__name__}")
        self.write(target, attention.num_heads * attention.head_dim)
        self.operators.append(
            Attend(source=source, target=target, attention=attention, rotary=rotary, value_column=value_column)
        )

    def rotated(self, attention: nn.Module) -> tuple[Attention, int | None]:
        """Return the attention itself, and the number of the rotary that turns its heads."""
        if isinstance(attention, RotatedBy):
            return attention.attention, attention.which
        if not isinstance(attention, Attention):
            raise LoweringError(f"attention by {type(attention).__name__}")
        return attention, self.rotary

    def normalise(
        self,
        source: str,
        norm: nn.Module,
        target: str,
        *,
        column: int = 0,
        accumulates: bool = False,
        target_column: int | None = None,
    ) -> None:
        """Write a norm of ``source``, as wide as its weight."""
        self.operators.append(
            Normalise(
                source=source,
                target=target,
                norm=_norm(norm),
                column=column,
                accumulates=accumulates,
                target_column=target_column,
            )
        )

    def write(self, register: str, width: int) -> None:
        """Give ``register`` its width, which has to be the same wherever it is written."""
        if register == STATES:
            return
        if self.widths.setdefault(register, width) != width:
            raise LoweringError(f"two widths of {register}, {self.widths[register]} and {width}")


def _linear(linear: nn.Module) -> Linear:
    if not isinstance(linear, Linear):
        raise LoweringError(f"a product by {type(linear).__name__}")
    return linear


def _norm(norm: nn.Module) -> RMSNorm | LayerNorm:
    if not isinstance(norm, RMSNorm | LayerNorm):
        raise LoweringError(f"a norm by {type(norm).__name__}")
    return norm


def _form_of(linear: Linear) -> tuple[object, ...]:
    """Return what products of one operator have in common."""
    weight = linear.weight
    if not isinstance(weight, QuantizedMatrix):
        return (linear.in_features, linear.out_features, weight.dtype, linear.bias is None)
    of_codes = (weight.codes.dtype, weight.scales.dtype, weight.offsets is None, weight.group_size, weight.block_size)
    return (linear.in_features, linear.out_features, *of_codes, linear.bias is None)
