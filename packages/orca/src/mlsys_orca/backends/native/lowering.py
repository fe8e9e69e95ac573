"""Lower a decoder's modules to a plan: one small function per kind of layer, MLP and head.

The modules stay what a model is; here is only how each is written in the plan's operators. What has no operator raises
:class:`~.plan_writer.LoweringError` with its name, and the model keeps its torch path.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import singledispatch

from mlsys_orca.backends.native.plan import (
    LOGITS,
    STATES,
    Combine,
    Convolve,
    DecoderPlan,
    Gate,
    Grouped,
    Reduce,
    Route,
    Scan,
    leaving_rows_behind,
)
from mlsys_orca.backends.native.plan_writer import LoweringError, PlanWriter
from mlsys_orca.model.blocks import (
    MLP,
    Decoder,
    GatedMLP,
    ParallelLayer,
    PostNormLayer,
    PreNormLayer,
    SandwichLayer,
)
from mlsys_orca.model.experts import MixtureOfExperts, SharedExpert
from mlsys_orca.model.latent import LatentAttention
from mlsys_orca.model.layers import LayerNorm, Linear, RMSNorm
from mlsys_orca.model.recurrent import GatedAttention, MixerLayer, Recurrence
from mlsys_orca.model.slices import num_slices
from torch import Tensor, nn, stack

ENTRIES, RESULTS, SHARED = "entries", "results", "shared"  # registers of experts
PROJECTED, CONVOLVED, SCANNED, GATED = "projected", "convolved", "scanned", "let_through"  # of recurrent layers


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
def lower_layer(layer: nn.Module, plan: PlanWriter) -> None:  # noqa: ARG001 - its registered forms write to it
    """Write one layer, from ``states`` to ``states``."""
    raise LoweringError(f"a layer by {type(layer).__name__}")


@lower_layer.register
def _(layer: PreNormLayer, plan: PlanWriter) -> None:
    _attention(layer.attention, plan, STATES, norm=layer.attention_norm)
    lower_mlp(layer.mlp, plan, STATES, norm=layer.mlp_norm)


@lower_layer.register
def _(layer: MixerLayer, plan: PlanWriter) -> None:
    _attention(layer.mixer, plan, STATES, norm=layer.norm)


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
def _(layer: PostNormLayer, plan: PlanWriter) -> None:
    _attention(layer.attention, plan, STATES)
    plan.normalise(STATES, layer.attention_norm, STATES)
    lower_mlp(layer.mlp, plan, STATES)
    plan.normalise(STATES, layer.mlp_norm, STATES)


@lower_layer.register
def _(layer: SandwichLayer, plan: PlanWriter) -> None:
    _attention(layer.attention, plan, "branch", norm=layer.attention_norm)
    plan.normalise("branch", layer.attention_out_norm, STATES, accumulates=True)
    lower_mlp(layer.mlp, plan, "branch", norm=layer.mlp_norm)
    plan.normalise("branch", layer.mlp_out_norm, STATES, accumulates=True)


def _attention(layer_attention: nn.Module, plan: PlanWriter, target: str, *, norm: nn.Module | None = None) -> None:
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


def lower_mlp(mlp: nn.Module, plan: PlanWriter, target: str, *, norm: nn.Module | None = None) -> None:
    """Write an MLP that reads ``states``; it adds to ``states``, or fills another register."""
    if isinstance(mlp, MixtureOfExperts | SharedExpert):
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
    if not isinstance(norm, RMSNorm | LayerNorm) or norm.weight is None:
        raise LoweringError(f"logits scaled by {factor} after a {type(norm).__name__}")
    if isinstance(norm, RMSNorm):
        return RMSNorm(norm.weight * factor, eps=norm.eps, dtype=norm.dtype)
    shift = None if norm.bias is None else norm.bias * factor
    return LayerNorm(norm.weight * factor, shift, hidden_size=norm.hidden_size, eps=norm.eps, dtype=norm.dtype)


def _lower_head(decoder: Decoder, plan: PlanWriter) -> None:
    norm = _scaled(decoder.norm, decoder.config.logit_scale)
    if isinstance(decoder.head, nn.Sequential):
        project, head = decoder.head
        plan.gemm(STATES, project, "projected", norm=norm)
        plan.gemm("projected", head, LOGITS)
    else:
        plan.gemm(STATES, decoder.head, LOGITS, norm=norm)


def lower_latents(attention: LatentAttention, plan: PlanWriter, target: str, *, norm: nn.Module | None) -> None:
    """Write latent attention that reads ``states``; it adds to ``states``, or fills another register.

    Raises:
        LoweringError: products of heads differ in form, or ranks share them.
    """
    if plan.num_ranks > 1:
        raise LoweringError("latent attention that ranks share")
    core, turned = attention.core, attention.rotary_dim
    heads, width = core.num_heads, core.head_dim
    plan.write("qkv", (heads + 1) * width)
    source, source_norm = STATES, norm
    if attention.query_down is not None:
        source, source_norm = "query_latent", attention.query_norm
        plan.gemm(STATES, attention.query_down, source, norm=norm)
    plan.gemm(source, attention.query_plain, "queries", norm=source_norm)
    rotary = plan.alike(attention.query_rotary, "heads")
    ups = plan.alike(attention.key_up, "heads")
    values = plan.alike(attention.value_up, "heads")
    plan.operators.append(
        Grouped(
            source=source,
            target="qkv",
            linears=rotary,
            rows_of="parts",
            norm=plan.norm(source_norm),
            target_step=width,
        )
    )
    plan.operators.append(
        Grouped(
            source="queries",
            target="qkv",
            linears=ups,
            rows_of="parts",
            source_step=ups[0].in_features,
            column=turned,
            target_step=width,
        )
    )
    plan.gemm(STATES, attention.key_rotary, "qkv", norm=norm, column=heads * width)
    plan.gemm(STATES, attention.latent, "latent", norm=norm)
    plan.normalise("latent", attention.latent_norm, "qkv", target_column=heads * width + turned)
    plan.attend(core, "qkv", "attended", rotary=plan.rotary, value_column=heads * width)
    plan.write("values", heads * values[0].out_features)
    plan.operators.append(
        Grouped(
            source="attended",
            target="values",
            linears=values,
            rows_of="parts",
            source_column=turned,
            source_step=width,
            target_step=values[0].out_features,
        )
    )
    plan.sum_of_ranks("values", core.output, target)


def lower_experts(
    mlp: MixtureOfExperts | SharedExpert, plan: PlanWriter, target: str, *, norm: nn.Module | None
) -> None:
    """Write experts that read ``states``; they add to ``states``, or fill another register.

    Raises:
        LoweringError: an expert is no gated MLP, or unlike the others.
    """
    experts = mlp.experts if isinstance(mlp, SharedExpert) else mlp
    mlps = [each for each in experts.experts if isinstance(each, GatedMLP)]
    if len(mlps) != len(experts.experts):
        raise LoweringError("experts other than gated MLPs")
    first, chosen, routing = mlps[0], experts.choice.num_chosen, plan.new_routing()
    gates = plan.alike((each.gate_up for each in mlps), "experts")
    downs = plan.alike((each.down for each in mlps), "experts")
    plan.gemm(STATES, experts.router, "scores", norm=norm)
    plan.operators.append(Route(source="scores", routing=routing, choice=experts.choice))
    plan.write(ENTRIES, chosen * downs[0].in_features)
    plan.operators.append(
        Grouped(
            source=STATES,
            target=ENTRIES,
            linears=gates,
            rows_of="tokens",
            routing=routing,
            norm=plan.norm(norm),
            activation=first.activation_name,
            is_gated=True,
            limits=first.limits,
        )
    )
    gate = None
    if isinstance(mlp, SharedExpert):
        # Both read the states before any sum reaches them.
        if mlp.router is not None:
            gate = "shared_gate"
            plan.gemm(STATES, mlp.router, gate, norm=norm)
        plan.gated_mlp(mlp.shared, SHARED, norm=norm)
    plan.write(RESULTS, chosen * downs[0].out_features)
    plan.operators.append(
        Grouped(
            source=ENTRIES,
            target=RESULTS,
            linears=downs,
            rows_of="entries",
            routing=routing,
            num_slices=plan.num_slices,
            is_partial=plan.num_ranks > 1,
        )
    )
    if plan.num_ranks > 1:
        plan.operators.append(Reduce(target=RESULTS, linear=None, accumulates=False))
    if target != STATES:
        plan.write(target, downs[0].out_features)
    plan.operators.append(
        Combine(
            source=RESULTS,
            target=target,
            routing=routing,
            accumulates=target == STATES,
            biases=_biases(downs),
            shared=SHARED if isinstance(mlp, SharedExpert) else None,
            gate=gate,
        )
    )


def _biases(linears: Sequence[Linear]) -> Tensor | None:
    biases = [linear.bias for linear in linears if linear.bias is not None]
    return stack(biases).float() if biases else None


def lower_recurrence(mixer: Recurrence, plan: PlanWriter, target: str, *, norm: nn.Module | None) -> None:
    """Write a recurrent layer's part that reads ``states``; it adds to ``states``, or fills another register.

    Raises:
        LoweringError: ranks share it.
    """
    if plan.num_ranks > 1:
        raise LoweringError("a recurrent layer that ranks share")
    part = mixer.part
    plan.gemm(STATES, mixer.input, PROJECTED, norm=norm)
    plan.write(CONVOLVED, part.num_channels)
    plan.operators.append(Convolve(source=PROJECTED, target=CONVOLVED, recurrence=mixer))
    plan.write(SCANNED, part.num_values)
    plan.operators.append(Scan(source=CONVOLVED, steps=PROJECTED, target=SCANNED, recurrence=mixer))
    plan.write(GATED, part.num_values)
    plan.operators.append(
        Gate(
            source=SCANNED,
            gate=PROJECTED,
            target=GATED,
            column=part.num_channels,
            size=part.num_values,
            norm=mixer.norm,
        )
    )
    plan.sum_of_ranks(GATED, mixer.output, target)


def lower_gated_attention(gated: GatedAttention, plan: PlanWriter, target: str, *, norm: nn.Module | None) -> None:
    """Write attention whose results pass gates; it adds to ``states``, or fills another register.

    Raises:
        LoweringError: ranks share it, or the attention has no operator.
    """
    if plan.num_ranks > 1:
        raise LoweringError("gated attention that ranks share")
    attention = gated.attention
    width = attention.num_heads * attention.head_dim
    plan.gemm(STATES, attention.qkv, "qkv", norm=norm)
    plan.attend(attention, "qkv", "attended", rotary=plan.rotary)
    plan.operators.append(
        Gate(
            source="attended",
            gate="qkv",
            target="attended",
            column=attention.num_all * attention.head_dim,
            size=width,
        )
    )
    plan.sum_of_ranks("attended", attention.output, target)
