"""Lower latent attention: products of heads by themselves around an attention of many queries to one key.

Between :mod:`.lowering` and the plan. A head of the cache has the rotary features first, then the latent; its values
are the same features before they turn.
"""

from __future__ import annotations

from mlsys_orca.backends.native.plan import STATES, Grouped
from mlsys_orca.backends.native.plan_writer import LoweringError, PlanWriter
from mlsys_orca.model.latent import LatentAttention
from torch import nn


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
