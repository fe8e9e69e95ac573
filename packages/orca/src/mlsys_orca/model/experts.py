"""Mixture of experts: a router chooses a few of many MLPs for each token (Shazeer et al., 2017; Mixtral, 2024).

Takes the place of a layer's MLP. The flattened batch is what makes it worth having: all requests' tokens that chose an
expert pass it in one matrix product.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from mlsys_orca.model.blocks import GatedMLP
from mlsys_orca.model.config import ModelConfig, refuse
from mlsys_orca.model.config_readers import GgufFields
from mlsys_orca.model.layers import Linear
from mlsys_orca.model.operator_reader import OperatorReader
from mlsys_orca.model.weights.quantized import concatenate_rows
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Rule by which a router's scores choose experts and weigh them."""

    num_chosen: int  # experts of a token
    # softmax over the chosen experts' scores, or over all of them; or each score's sigmoid
    scoring: Literal["softmax_of_chosen", "softmax", "sigmoid"] = "softmax_of_chosen"
    sums_to_one: bool = False  # weights are divided by their sum, which a softmax of the chosen has as one
    scale: float = 1.0  # multiplies the weights
    preference: Tensor | None = field(default=None, compare=False)  # fp32 [experts] added where experts are compared
    num_groups: int = 1  # of neighbouring experts
    num_chosen_groups: int = 1  # whose experts may be chosen; the others' may not
    group_score: Literal["largest", "two_largest"] = "largest"  # of its experts, summed: what groups are compared by

    def __call__(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Choose by ``scores`` fp32 [num_tokens, experts] -> weights and experts, each [num_tokens, num_chosen]."""
        own = scores
        if self.scoring != "softmax_of_chosen":
            own = scores.sigmoid() if self.scoring == "sigmoid" else scores.softmax(dim=-1)
        compared = own if self.preference is None else own + self.preference
        if self.num_chosen_groups < self.num_groups:
            compared = self._in_chosen_groups(compared)
        chosen = compared.topk(self.num_chosen, dim=-1).indices
        weights = own.gather(1, chosen)
        if self.scoring == "softmax_of_chosen":
            weights = weights.softmax(dim=-1)
        if self.sums_to_one:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return weights * self.scale, chosen

    def _in_chosen_groups(self, compared: Tensor) -> Tensor:
        groups = compared.view(len(compared), self.num_groups, -1)
        count = min(2, groups.shape[2]) if self.group_score == "two_largest" else 1
        best = groups.topk(count, dim=-1).values.sum(-1).topk(self.num_chosen_groups, dim=-1).indices
        is_out = torch.ones(groups.shape[:2], dtype=torch.bool, device=groups.device).scatter_(1, best, False)
        return groups.masked_fill(is_out[..., None], -torch.inf).view(compared.shape)


class MixtureOfExperts(nn.Module):
    """Each token passes the experts that its router's scores choose, and gets their weighted sum.

    Args:
        router: hidden_size -> number of experts.
        experts: Each [rows, hidden_size] -> the same shape.
        choice: Turns scores into experts and weights.
    """

    def __init__(self, router: Linear, experts: Iterable[nn.Module], *, choice: Choice) -> None:
        super().__init__()
        self.router = router
        self.experts = nn.ModuleList(experts)
        self.choice = choice

    def forward(self, x: Tensor) -> Tensor:
        """Pass each token of ``x`` [num_tokens, hidden_size] through its experts -> fp32 of the same shape."""
        weights, chosen = self.choice(self.router(x).float())
        by_expert = chosen.flatten().argsort(stable=True)  # the token of entry i is i // num_chosen
        counts = torch.bincount(chosen.flatten(), minlength=len(self.experts)).tolist()
        pieces = torch.split(x[by_expert // self.choice.num_chosen], counts)
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
        router: hidden_size -> 1; None: the shared one counts in full (DeepSeek-V2, 2024).
    """

    def __init__(self, experts: MixtureOfExperts, shared: nn.Module, router: Linear | None = None) -> None:
        super().__init__()
        self.experts, self.shared, self.router = experts, shared, router

    def forward(self, x: Tensor) -> Tensor:
        """Pass each token of ``x`` [num_tokens, hidden_size] through its experts and the shared one -> fp32."""
        shared: Tensor = self.shared(x).float()
        if self.router is not None:
            shared = self.router(x).float().sigmoid() * shared
        out: Tensor = self.experts(x) + shared
        return out


def shared_size(fields: GgufFields, default: int | None = None) -> int | None:
    """Return the features inside the experts that all tokens pass, taken together."""
    fields.read.add("expert_shared_count")  # one as wide as all
    size: int | None = fields.get("expert_shared_feed_forward_length", default)
    return size


def refuse_dense_layers(raw: Mapping[str, Any]) -> None:
    """Refuse a ``config.json`` that states layers without experts beside those with."""
    refuse(bool(raw.get("mlp_only_layers")), "layers without experts beside those with (mlp_only_layers)")
    refuse(raw.get("decoder_sparse_step", 1) != 1, "layers without experts beside those with (decoder_sparse_step)")


def read_experts(
    config: ModelConfig, read: OperatorReader, index: int, *, choice: Choice | None = None
) -> MixtureOfExperts:
    """Read the router and experts of layer ``index``; ``choice``: None: the softmax of the chosen ones' scores."""
    number, hidden, inner, at = config.num_experts, config.hidden_size, config.intermediate_size, (index,)
    if read.layout == "gguf":
        gates, ups = (read.stack(role, number, inner, hidden, at=at) for role in ("gates", "ups"))
        products = [Linear(concatenate_rows(pair)) for pair in zip(gates, ups, strict=True)]
        downs = [Linear(down) for down in read.stack("downs", number, hidden, inner, at=at)]
    elif read.has("products", at=at, part=""):  # all experts in one tensor
        products, downs = (
            [Linear(matrix) for matrix in read.as_kept(role, read.unsuffixed(role, shape, at=at))]
            for role, shape in (("products", (number, 2 * inner, hidden)), ("downs", (number, hidden, inner)))
        )
    else:
        where = [(index, expert) for expert in range(number)]
        products = [read.linear({"gate": inner, "up": inner}, hidden, at=at) for at in where]
        downs = [read.linear({"down": hidden}, inner, at=at) for at in where]
    experts = (GatedMLP(*pair, activation=config.activation) for pair in zip(products, downs, strict=True))
    return MixtureOfExperts(
        read.linear({"router": number}, hidden, at=(index,)),
        experts,
        choice=choice or choice_of(config),
    )


def choice_of(config: ModelConfig, preference: Tensor | None = None) -> Choice:
    """Return the choice that ``config`` states; ``preference``: fp32 [experts], where it says that there is one."""
    stated, chosen = config.expert_choice, config.num_chosen_experts
    if stated is None:
        return Choice(num_chosen=chosen, scoring="softmax_of_chosen" if config.experts_sum_to_one else "softmax")
    return Choice(
        num_chosen=chosen,
        preference=preference,
        **{name: getattr(stated, name) for name in ("scoring", "sums_to_one", "scale")},
        **{name: getattr(stated, name) for name in ("num_groups", "num_chosen_groups", "group_score")},
    )


def read_gated(config: ModelConfig, read: OperatorReader, index: int, role: str, inner: int | None) -> GatedMLP:
    """Read a gated MLP of ``inner`` features whose roles begin with ``role``: one beside experts, or in their place."""
    assert inner is not None
    hidden, at = config.hidden_size, (index,)
    product = read.linear({f"{role}.gate": inner, f"{role}.up": inner}, hidden, at=at)
    return GatedMLP(product, read.linear({f"{role}.down": hidden}, inner, at=at), activation=config.activation)
