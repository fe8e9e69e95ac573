"""Lower experts: a router's scores, entries of the tokens that chose each, and their weighted sums.

Between :mod:`.lowering`, which has the other MLPs, and the plan. An expert's products are as wide as one MLP's; all
experts' are one operator.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlsys_orca.backends.native.plan import STATES, Combine, Grouped, Reduce, Route
from mlsys_orca.backends.native.plan_writer import LoweringError, PlanWriter
from mlsys_orca.model.blocks import GatedMLP
from mlsys_orca.model.experts import MixtureOfExperts, SharedExpert
from mlsys_orca.model.layers import Linear
from torch import Tensor, nn, stack

ENTRIES, RESULTS, SHARED = "entries", "results", "shared"


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
