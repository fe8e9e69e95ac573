"""Lower a decoder's modules to a plan: one small function per kind of layer, MLP and head.

The modules stay what a model is; here is only how each is written in the plan's operators. What has no operator raises
:class:`~.plan_writer.LoweringError` with its name, and the model keeps its torch path. Parts that few models have are
in :mod:`.lowering_parts`, which is imported with the first of them.
"""

from __future__ import annotations

from functools import singledispatch

from mlsys_orca.backends.native.plan import LOGITS, STATES, DecoderPlan, leaving_rows_behind
from mlsys_orca.backends.native.plan_writer import LoweringError, PlanWriter
from mlsys_orca.model.blocks import (
    MLP,
    Attention,
    Decoder,
    GatedMLP,
    ParallelLayer,
    PreNormLayer,
    RotatedBy,
    SandwichLayer,
)
from mlsys_orca.model.layers import LayerNorm, RMSNorm
from mlsys_orca.model.slices import num_slices
from torch import nn


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
    plan = PlanWriter(decoder, num_slices(decoder.config) if slices is None else slices, num_ranks)
    for layer in decoder.layers:
        lower_layer(layer, plan)
    widths = {STATES: decoder.config.hidden_size}
    if not has_head:
        return DecoderPlan(widths | plan.widths | {LOGITS: 1}, tuple(plan.operators))
    _lower_head(decoder, plan)
    widths |= plan.widths
    widths[LOGITS] = widths.pop(LOGITS)  # last
    return DecoderPlan(widths, tuple(leaving_rows_behind(plan.operators)))


@singledispatch
def lower_layer(layer: nn.Module, plan: PlanWriter) -> None:
    """Write one layer, from ``states`` to ``states``."""
    from mlsys_orca.backends.native.lowering_parts import lower_mixer

    lower_mixer(layer, plan)


@lower_layer.register
def _(layer: PreNormLayer, plan: PlanWriter) -> None:
    _attention(layer.attention, plan, STATES, norm=layer.attention_norm)
    lower_mlp(layer.mlp, plan, STATES, norm=layer.mlp_norm)


@lower_layer.register
def _(layer: ParallelLayer, plan: PlanWriter) -> None:
    attention, rotary = plan.rotated(layer.attention)
    plan.gemm(STATES, attention.qkv, "qkv", norm=layer.attention_norm)
    plan.attend(attention, "qkv", "attended", rotary=rotary)
    # The MLP's first product reads the states before attention's sum reaches them.
    _inner(layer.mlp, plan, norm=layer.mlp_norm)
    plan.sum_of_ranks("attended", attention.output, STATES)
    plan.sum_of_ranks("inner", _down(layer.mlp), STATES)


@lower_layer.register
def _(layer: SandwichLayer, plan: PlanWriter) -> None:
    _attention(layer.attention, plan, "branch", norm=layer.attention_norm)
    plan.normalise("branch", layer.attention_out_norm, STATES, accumulates=True)
    lower_mlp(layer.mlp, plan, "branch", norm=layer.mlp_norm)
    plan.normalise("branch", layer.mlp_out_norm, STATES, accumulates=True)


def _attention(layer_attention: nn.Module, plan: PlanWriter, target: str, *, norm: nn.Module | None = None) -> None:
    if not isinstance(layer_attention, Attention | RotatedBy):
        from mlsys_orca.backends.native.lowering_parts import lower_attention

        lower_attention(layer_attention, plan, target, norm=norm)
        return
    attention, rotary = plan.rotated(layer_attention)
    plan.gemm(STATES, attention.qkv, "qkv", norm=norm)
    plan.attend(attention, "qkv", "attended", rotary=rotary)
    plan.sum_of_ranks("attended", attention.output, target)


def lower_mlp(mlp: nn.Module, plan: PlanWriter, target: str, *, norm: nn.Module | None = None) -> None:
    """Write an MLP that reads ``states``; it adds to ``states``, or fills another register."""
    if not isinstance(mlp, MLP | GatedMLP):
        from mlsys_orca.backends.native.lowering_parts import lower_experts

        lower_experts(mlp, plan, target, norm=norm)
        return
    _inner(mlp, plan, norm=norm)
    plan.sum_of_ranks("inner", _down(mlp), target)


def _inner(mlp: nn.Module, plan: PlanWriter, *, norm: nn.Module | None) -> None:
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
    if not isinstance(norm, RMSNorm | LayerNorm):
        raise LoweringError(f"logits scaled by {factor} after a {type(norm).__name__}")
    if isinstance(norm, RMSNorm):
        return RMSNorm(norm.weight * factor, eps=norm.eps, dtype=norm.dtype)
    shift = None if norm.bias is None else norm.bias * factor
    return LayerNorm(norm.weight * factor, shift, eps=norm.eps, dtype=norm.dtype)


def _lower_head(decoder: Decoder, plan: PlanWriter) -> None:
    norm = _scaled(decoder.norm, decoder.config.logit_scale)
    plan.gemm(STATES, decoder.head, LOGITS, norm=norm)
