"""Mixture of experts: a router chooses a few of many MLPs for each token (Shazeer et al., 2017; Mixtral, 2024).

Takes the place of a layer's MLP. The flattened batch is what makes it worth having: all requests' tokens that chose an
expert pass it in one matrix product.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from mlsys_orca.model.blocks import GatedMLP
from mlsys_orca.model.config import ModelConfig
from mlsys_orca.model.gguf_config import GgufFields
from mlsys_orca.model.layers import Linear
from mlsys_orca.model.operator_reader import OperatorReader
from mlsys_orca.model.weights.quantized import concatenate_rows
from torch import Tensor, nn

GGUF_EXPERTS = {  # a layer's experts are one tensor
    "router": "blk.{}.ffn_gate_inp",
    "gates": "blk.{}.ffn_gate_exps",
    "ups": "blk.{}.ffn_up_exps",
    "downs": "blk.{}.ffn_down_exps",
}


class MixtureOfExperts(nn.Module):
    """Each token passes the experts that its router scores highest, weighted by the softmax of those scores.

    Args:
        router: hidden_size -> number of experts.
        experts: Each [rows, hidden_size] -> the same shape.
        num_chosen: Experts per token.
        sums_to_one: The softmax is over the chosen experts' scores; False: over all experts'.
    """

    def __init__(
        self, router: Linear, experts: Iterable[nn.Module], *, num_chosen: int, sums_to_one: bool = True
    ) -> None:
        super().__init__()
        self.sums_to_one = sums_to_one
        self.router = router
        self.experts = nn.ModuleList(experts)
        self.num_chosen = num_chosen

    def forward(self, x: Tensor) -> Tensor:
        """Pass each token of ``x`` [num_tokens, hidden_size] through its experts -> fp32 of the same shape."""
        of_all = self.router(x).float()
        scores, chosen = of_all.topk(self.num_chosen, dim=-1)
        if self.sums_to_one:
            weights = scores.softmax(dim=-1)  # the same as to choose after softmax and renormalise
        else:
            weights = of_all.softmax(dim=-1).gather(1, chosen)
        by_expert = chosen.flatten().argsort(stable=True)  # the token of entry i is i // num_chosen
        counts = torch.bincount(chosen.flatten(), minlength=len(self.experts)).tolist()
        pieces = torch.split(x[by_expert // self.num_chosen], counts)
        passed = torch.cat([expert(piece) for expert, piece in zip(self.experts, pieces, strict=True) if len(piece)])
        # Back to each token's own order of experts, so that its sum does not depend on the tokens beside it.
        products = torch.empty_like(passed)
        products[by_expert] = passed
        out: Tensor = (products.view(*chosen.shape, -1) * weights[..., None]).sum(dim=1)
        return out


class SharedExpert(nn.Module):
    """Experts, and one beside them that every token passes, times the sigmoid of its own gate (Qwen2-MoE, 2024).

    Args:
        experts: [rows, hidden_size] -> fp32 of the same shape.
        shared: [rows, hidden_size] -> the same shape.
        router: hidden_size -> 1.
    """

    def __init__(self, experts: MixtureOfExperts, shared: nn.Module, router: Linear) -> None:
        super().__init__()
        self.experts, self.shared, self.router = experts, shared, router

    def forward(self, x: Tensor) -> Tensor:
        """Pass each token of ``x`` [num_tokens, hidden_size] through its experts and the shared one -> fp32."""
        out: Tensor = self.experts(x) + self.router(x).float().sigmoid() * self.shared(x).float()
        return out


def expert_fields(fields: GgufFields) -> dict[str, Any]:
    """Return what a GGUF file says about experts, as fields of :class:`ModelConfig`.

    Raises:
        InvalidInputError: it has experts and does not say how many each token passes.
    """
    if not (num_experts := fields.get("expert_count", 0)):
        return {}
    return {"num_experts": num_experts, "num_chosen_experts": fields.get("expert_used_count")}


def read_experts(
    config: ModelConfig, read: OperatorReader, index: int, *, sums_to_one: bool = True
) -> MixtureOfExperts:
    """Read the router and experts of layer ``index``."""
    number, hidden, inner, at = config.num_experts, config.hidden_size, config.intermediate_size, (index,)
    if read.layout == "gguf":
        gates, ups = (read.stack(role, number, inner, hidden, at=at) for role in ("gates", "ups"))
        products = [Linear(concatenate_rows(pair)) for pair in zip(gates, ups, strict=True)]
        downs = [Linear(down) for down in read.stack("downs", number, hidden, inner, at=at)]
    else:
        where = [(index, expert) for expert in range(number)]
        products = [read.linear({"gate": inner, "up": inner}, hidden, at=at) for at in where]
        downs = [read.linear({"down": hidden}, inner, at=at) for at in where]
    experts = (GatedMLP(*pair, activation=config.activation) for pair in zip(products, downs, strict=True))
    return MixtureOfExperts(
        read.linear({"router": number}, hidden, at=(index,)),
        experts,
        num_chosen=config.num_chosen_experts,
        sums_to_one=sums_to_one,
    )
