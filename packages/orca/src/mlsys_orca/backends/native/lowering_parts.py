"""Lower the parts that few models have: latent attention, experts, recurrent layers, gated attention.

:mod:`.lowering` imports this with the first of them; its parts and their weights are those of :mod:`mlsys_orca.model`.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlsys_orca.backends.native.plan import STATES, Combine, Convolve, Gate, Grouped, Reduce, Route, Scan
from mlsys_orca.backends.native.plan_writer import LoweringError, PlanWriter
from mlsys_orca.model.blocks import GatedMLP
from mlsys_orca.model.experts import MixtureOfExperts, SharedExpert
from mlsys_orca.model.latent import LatentAttention
from mlsys_orca.model.layers import Linear
from mlsys_orca.model.recurrent import GatedAttention, MixerLayer, Recurrence
from torch import Tensor, nn, stack

ENTRIES, RESULTS, SHARED = "entries", "results", "shared"  # registers of experts
PROJECTED, CONVOLVED, SCANNED, GATED = "projected", "convolved", "scanned", "let_through"  # of recurrent layers


def lower_mixer(layer: nn.Module, plan: PlanWriter) -> None:
    """Write a layer that is one recurrent part alone, from ``states`` to ``states``.

    Raises:
        LoweringError: it is another layer.
    """
    if not isinstance(layer, MixerLayer):
        raise LoweringError(f"a layer by {type(layer).__name__}")
    lower_attention(layer.mixer, plan, STATES, norm=layer.norm)


def lower_attention(part: nn.Module, plan: PlanWriter, target: str, *, norm: nn.Module | None) -> None:
    """Write what a layer has in attention's place, which reads ``states``.

    It adds to ``states``, or fills another register.

    Raises:
        LoweringError: it has no operator.
    """
    if isinstance(part, LatentAttention):
        lower_latents(part, plan, target, norm=norm)
    elif isinstance(part, Recurrence):
        lower_recurrence(part, plan, target, norm=norm)
    elif isinstance(part, GatedAttention):
        lower_gated_attention(part, plan, target, norm=norm)
    else:
        raise LoweringError(f"attention by {type(part).__name__}")


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


def lower_experts(mlp: nn.Module, plan: PlanWriter, target: str, *, norm: nn.Module | None) -> None:
    """Write experts that read ``states``; they add to ``states``, or fill another register.

    Raises:
        LoweringError: they are no experts, or one is no gated MLP, or unlike the others.
    """
    if not isinstance(mlp, MixtureOfExperts | SharedExpert):
        raise LoweringError(f"an MLP by {type(mlp).__name__}")
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
