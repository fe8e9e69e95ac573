"""Lower a decoder's modules to a plan: one small function per kind of layer, MLP and head.

The modules stay what a model is; here is only how each is written in the plan's operators. What has no operator raises
:class:`LoweringError` with its name, and the model keeps its torch path.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import singledispatch

from mlsys_core.errors import MlsysError
from mlsys_orca.backends.native.experts import form_of, lower_experts
from mlsys_orca.backends.native.latents import lower_latents
from mlsys_orca.backends.native.plan import (
    LOGITS,
    STATES,
    Attend,
    DecoderPlan,
    Gemm,
    Normalise,
    Operator,
    Reduce,
    leaving_rows_behind,
)
from mlsys_orca.backends.native.recurrences import lower_gated_attention, lower_recurrence
from mlsys_orca.model.blocks import (
    MLP,
    Attention,
    Cast,
    Decoder,
    GatedMLP,
    ParallelLayer,
    PostNormLayer,
    PreNormLayer,
    RotatedBy,
    SandwichLayer,
    WideNorms,
)
from mlsys_orca.model.experts import MixtureOfExperts, SharedExpert
from mlsys_orca.model.latent import LatentAttention
from mlsys_orca.model.layers import LayerNorm, Linear, RMSNorm, Rotaries, Rotary, StackedLinear
from mlsys_orca.model.recurrent import GatedAttention, MixerLayer, Recurrence
from mlsys_orca.model.slices import num_slices
from torch import nn

MAX_HEAD_DIM = 1024  # attention.h's own


class LoweringError(MlsysError):
    """A decoder has a part that the native program has no operator for."""

    def __init__(self, part: str) -> None:
        super().__init__(f"there is no native operator for {part}")


def lower(decoder: Decoder, *, slices: int | None = None, num_ranks: int = 1, has_head: bool = True) -> DecoderPlan:
    """Return the plan of ``decoder``, which is not changed.

    Args:
        decoder: A whole one, or a part of one.
        slices: Slices of the sums that ranks may share; None: those of a whole decoder.
        num_ranks: Ranks that share them.
        has_head: False: the states leave the last layer, and there are no logits.

    Raises:
        LoweringError: some part of it has no operator.
    """
    plan = Lowering(decoder, num_slices(decoder.config) if slices is None else slices, num_ranks)
    for layer in decoder.layers:
        lower_layer(layer, plan)
    widths = {STATES: decoder.config.hidden_size}
    if not has_head:
        return DecoderPlan(widths | plan.widths | {LOGITS: 1}, tuple(plan.operators))
    _lower_head(decoder, plan)
    widths |= plan.widths
    widths[LOGITS] = widths.pop(LOGITS)  # last
    return DecoderPlan(widths, tuple(leaving_rows_behind(plan.operators)))


class Lowering:
    """The plan so far; registers come to be when something is written to them, as wide as the widest of it."""

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

    def refusal(self, part: str) -> LoweringError:
        """Return the error for a part without an operator."""
        return LoweringError(part)

    def alike(self, products: Iterable[nn.Module], owners: str) -> tuple[Linear, ...]:
        """Return the products of ``owners`` ("experts") as one operator takes them: linears of one form.

        Raises:
            LoweringError: one is no linear, or unlike the others.
        """
        linears: list[Linear] = []
        for product in products:
            if not isinstance(product, Linear) or isinstance(product, StackedLinear):
                raise self.refusal(f"a product of {owners} by {type(product).__name__}")
            linears.append(product)
        if len({form_of(linear) for linear in linears}) > 1:
            raise self.refusal(f"{owners} whose weights differ in size or form")
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


@singledispatch
def lower_layer(layer: nn.Module, plan: Lowering) -> None:  # noqa: ARG001 - its registered forms write to it
    """Write one layer, from ``states`` to ``states``."""
    raise LoweringError(f"a layer by {type(layer).__name__}")


@lower_layer.register
def _(layer: PreNormLayer, plan: Lowering) -> None:
    _attention(layer.attention, plan, STATES, norm=layer.attention_norm)
    lower_mlp(layer.mlp, plan, STATES, norm=layer.mlp_norm)


@lower_layer.register
def _(layer: MixerLayer, plan: Lowering) -> None:
    _attention(layer.mixer, plan, STATES, norm=layer.norm)


@lower_layer.register
def _(layer: ParallelLayer, plan: Lowering) -> None:
    attention, rotary = plan.rotated(layer.attention)
    plan.gemm(STATES, attention.qkv, "qkv", norm=layer.attention_norm)
    plan.attend(attention, "qkv", "attended", rotary=rotary)
    # The MLP's first product reads the states before attention's sum reaches them.
    _inner(layer.mlp, plan, norm=layer.mlp_norm)
    plan.sum_of_ranks("attended", attention.output, STATES)
    plan.sum_of_ranks("inner", _down(layer.mlp), STATES)


@lower_layer.register
def _(layer: PostNormLayer, plan: Lowering) -> None:
    _attention(layer.attention, plan, STATES)
    plan.normalise(STATES, layer.attention_norm, STATES)
    lower_mlp(layer.mlp, plan, STATES)
    plan.normalise(STATES, layer.mlp_norm, STATES)


@lower_layer.register
def _(layer: SandwichLayer, plan: Lowering) -> None:
    _attention(layer.attention, plan, "branch", norm=layer.attention_norm)
    plan.normalise("branch", layer.attention_out_norm, STATES, accumulates=True)
    lower_mlp(layer.mlp, plan, "branch", norm=layer.mlp_norm)
    plan.normalise("branch", layer.mlp_out_norm, STATES, accumulates=True)


def _attention(layer_attention: nn.Module, plan: Lowering, target: str, *, norm: nn.Module | None = None) -> None:
    if isinstance(layer_attention, LatentAttention):
        lower_latents(layer_attention, plan, target, norm=norm)
        return
    if isinstance(layer_attention, Recurrence):
        lower_recurrence(layer_attention, plan, target, norm=norm)
        return
    if isinstance(layer_attention, GatedAttention):
        lower_gated_attention(layer_attention, plan, target, norm=norm)
        return
    attention, rotary = plan.rotated(layer_attention)
    plan.gemm(STATES, attention.qkv, "qkv", norm=norm)
    plan.attend(attention, "qkv", "attended", rotary=rotary)
    plan.sum_of_ranks("attended", attention.output, target)


def lower_mlp(mlp: nn.Module, plan: Lowering, target: str, *, norm: nn.Module | None = None) -> None:
    """Write an MLP that reads ``states``; it adds to ``states``, or fills another register."""
    if isinstance(mlp, MixtureOfExperts | SharedExpert):
        lower_experts(mlp, plan, target, norm=norm)
        return
    _inner(mlp, plan, norm=norm)
    plan.sum_of_ranks("inner", _down(mlp), target)


def _inner(mlp: nn.Module, plan: Lowering, *, norm: nn.Module | None) -> None:
    if isinstance(mlp, GatedMLP):
        if mlp.limits is not None:
            raise LoweringError("clamped gates outside experts")
        plan.gemm(STATES, mlp.gate_up, "inner", norm=norm, activation=mlp.activation_name, is_gated=True)
    elif isinstance(mlp, MLP):
        plan.gemm(STATES, mlp.up, "inner", norm=norm, activation=mlp.activation_name)
    else:
        raise LoweringError(f"an MLP by {type(mlp).__name__}")


def _down(mlp: nn.Module) -> nn.Module:
    down: nn.Module = mlp.down  # type: ignore[assignment]
    return down


def _scaled(norm: nn.Module, factor: float) -> nn.Module:
    """Return ``norm`` whose results are ``factor`` times as large."""
    if factor == 1:
        return norm
    if not isinstance(norm, RMSNorm | LayerNorm) or norm.weight is None:
        raise LoweringError(f"logits scaled by {factor} after a {type(norm).__name__}")
    if isinstance(norm, RMSNorm):
        return RMSNorm(norm.weight * factor, eps=norm.eps, dtype=norm.dtype)
    shift = None if norm.bias is None else norm.bias * factor
    return LayerNorm(norm.weight * factor, shift, hidden_size=norm.hidden_size, eps=norm.eps, dtype=norm.dtype)


def _lower_head(decoder: Decoder, plan: Lowering) -> None:
    norm = _scaled(decoder.norm, decoder.config.logit_scale)
    if isinstance(decoder.head, nn.Sequential):
        project, head = decoder.head
        plan.gemm(STATES, project, "projected", norm=norm)
        plan.gemm("projected", head, LOGITS)
    else:
        plan.gemm(STATES, decoder.head, LOGITS, norm=norm)
