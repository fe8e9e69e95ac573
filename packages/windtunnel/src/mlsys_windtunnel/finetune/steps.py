"""The optimiser: AdamW, with a step size that suits what each parameter multiplies.

Adam moves each number by about the learning rate, whatever its unit. So a linear model's weight moves by the rate over
the standard deviation of its feature, a scaler's numbers by the rate times themselves, and an embedding's by a higher
rate; soft trees read standardised columns and need none of this.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from mlsys_windtunnel.backends.soft.trees import SoftGroupParameters, SoftTrees
from mlsys_windtunnel.modules.columns.columns import CategoryEmbedding
from mlsys_windtunnel.modules.linear.linear import Affine, FactorizationMachine, IdFactorization
from mlsys_windtunnel.modules.network import Network

SMALLEST_DEVIATION = 1e-12


class Optimizer:
    """AdamW over the trained parameters of a network.

    Args:
        network: Network to train.
        x: Rows ``[rows, width]``, for the deviations of what linear models read.
        lr: The highest rate.
        embedding_rate: Factor of the rate for embeddings.
        weight_decay: Weight decay of AdamW.
        leaf_decay: Likewise, of leaf values; None: ``weight_decay``.
    """

    def __init__(
        self,
        network: Network,
        x: Tensor,
        *,
        lr: float,
        embedding_rate: float,
        weight_decay: float,
        leaf_decay: float | None = None,
    ) -> None:
        units = step_units(network, x)
        embeddings = {id(table) for table in embedding_tables(network)}
        leaves = set() if leaf_decay is None else {id(values) for values in leaf_values(network)}
        self.parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
        self._scaled = [(parameter, units[id(parameter)]) for parameter in self.parameters if id(parameter) in units]
        self._rates: list[float] = []
        groups = []
        others = {id(parameter) for parameter in self.parameters} - embeddings - leaves
        for group, times, decay in (
            (others, 1, weight_decay),
            (embeddings, embedding_rate, weight_decay),
            (leaves, 1, leaf_decay),
        ):
            chosen = [parameter for parameter in self.parameters if id(parameter) in group]
            if chosen:
                groups.append({"params": chosen, "weight_decay": decay})
                self._rates.append(lr * times)
        is_fused = all(parameter.device.type in ("cpu", "cuda") for parameter in self.parameters)
        self.adamw = torch.optim.AdamW(groups, lr=lr, weight_decay=weight_decay, fused=is_fused)

    def step(self, rate: float) -> None:
        """Take one step at ``rate`` times the highest rates; gradients are cleared."""
        for group, highest in zip(self.adamw.param_groups, self._rates, strict=True):
            group["lr"] = highest * rate
        before = [parameter.detach().clone() for parameter, _ in self._scaled]
        self.adamw.step()
        with torch.no_grad():
            for (parameter, unit), old in zip(self._scaled, before, strict=True):
                parameter.copy_(old + unit * (parameter - old))
        self.adamw.zero_grad(set_to_none=True)


def embedding_tables(network: Network) -> Iterator[Tensor]:
    """Yield tables that codes select rows of."""
    for part in network.modules():
        if isinstance(part, CategoryEmbedding | IdFactorization):
            yield from part.tables


def leaf_values(network: Network) -> Iterator[Tensor]:
    """Yield leaf values of soft trees, ``[trees, leaves, outputs]`` each."""
    for part in network.modules():
        if isinstance(part, SoftGroupParameters):
            yield part.leaf


def step_units(network: Network, x: Tensor) -> dict[int, Tensor]:
    """Return factors of parameters' steps, by id of the parameter; one that is not there steps as it is."""
    inputs = _inputs_of_linear_parts(network, x)
    units: dict[int, Tensor] = {}
    for path, part in network.named_modules():
        if isinstance(part, Affine | FactorizationMachine) and path in inputs:
            of_feature = 1 / inputs[path].std(dim=0, correction=0).clamp(min=SMALLEST_DEVIATION)
            of_feature = of_feature.nan_to_num(1.0).clamp(max=1.0)
            if isinstance(part, Affine):
                units[id(part.weight)] = of_feature.to(part.weight.dtype)
                units[id(part.bias)] = torch.ones_like(part.bias)
            else:
                units[id(part.factors)] = of_feature.unsqueeze(1).to(part.factors.dtype)
        elif isinstance(part, CategoryEmbedding):
            for table in part.tables:
                units[id(table)] = table.detach().std(dim=0, correction=0).clamp(min=1.0)
    known = {id(parameter) for part in network.modules() for parameter in _of_own_unit(part)}
    for parameter in network.parameters():
        if id(parameter) not in units and id(parameter) not in known:
            size = parameter.detach().abs()
            mean = size[size > 0].mean() if (size > 0).any() else torch.ones_like(size.sum())
            units[id(parameter)] = torch.where(size > 0, size, mean).clamp(max=1.0)
    return units


def _of_own_unit(part: nn.Module) -> Iterator[Tensor]:
    if isinstance(part, SoftTrees):
        yield from part.parameters()
    elif isinstance(part, IdFactorization):
        yield from part.tables


def _inputs_of_linear_parts(network: Network, x: Tensor) -> dict[str, Tensor]:
    inputs: dict[str, Tensor] = {}
    handles = []
    for path, part in network.named_modules():
        if isinstance(part, Affine | FactorizationMachine):

            def keep(_: nn.Module, read: tuple[Tensor, ...], path: str = path) -> None:
                inputs[path] = read[0].detach()

            handles.append(part.register_forward_pre_hook(keep))
    try:
        with torch.no_grad():
            network(x)
    finally:
        for handle in handles:
            handle.remove()
    return inputs
