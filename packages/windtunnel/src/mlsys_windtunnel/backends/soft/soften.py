"""From an exact network to a soft one: each :class:`Trees` within becomes a :class:`SoftTrees`, the rest stays."""

from __future__ import annotations

import copy
import math

import torch
from mlsys_windtunnel.backends.soft.options import SoftOptions
from mlsys_windtunnel.backends.soft.plan import ColumnStatistics
from mlsys_windtunnel.backends.soft.trees import SoftTrees
from mlsys_windtunnel.modules.columns.columns import CategoryEmbedding
from mlsys_windtunnel.modules.linear.linear import Affine, FactorizationMachine, IdFactorization
from mlsys_windtunnel.modules.network import Network
from mlsys_windtunnel.modules.tree.trees import Trees, tree_parts
from torch import Tensor, nn

MOST_ROWS = 100_000  # of the sample that statistics are taken of


def soften(network: Network, x: Tensor, options: SoftOptions, *, seed: int = 0) -> Network:
    """Make a trainable copy of an exact network; parameters outside of the options' scope require no gradients.

    Args:
        network: Exact; left as it is.
        x: Training rows, ``[rows, width]`` as the network reads them, for standardisation and thresholds.
        options: See :class:`SoftOptions`. With ``source``, leaf values are scaled and shifted so that each ensemble's
            soft answers fit its exact ones best (least squares).
        seed: Seed of the random start.
    """
    x = x[sample_rows(len(x), MOST_ROWS)]
    reads = tree_inputs(network, x)
    soft = copy.deepcopy(network)
    vars(soft).pop("_direct", None)
    for owner, name, trees in tree_parts(soft):
        path = next(path for path, part in soft.named_modules() if part is trees)
        smooth = SoftTrees(trees, ColumnStatistics.of(reads[path].numpy(force=True)), options)
        if options.init == "source":
            _calibrate(smooth, trees, reads[path][sample_rows(len(x), 4_096)])
        setattr(owner, name, smooth)
    for part in soft.modules():
        if isinstance(part, Network | SoftTrees):
            continue
        if options.scope == "trees" and not _is_within_trees(soft, part):
            for parameter in part.parameters(recurse=False):
                parameter.requires_grad_(False)
    if options.init == "random":
        randomise(soft, seed)
    return soft


def sample_rows(num_rows: int, most: int) -> slice:
    """Return a slice that takes every so many rows, ``most`` at most."""
    return slice(None, None, max(1, math.ceil(num_rows / most)))


def tree_inputs(network: Network, x: Tensor) -> dict[str, Tensor]:
    """Return the table that each :class:`Trees` in the network reads for these rows, by the trees' name."""
    reads: dict[str, Tensor] = {}
    parts = [(path, part) for path, part in network.named_modules() if isinstance(part, Trees)]
    handles = []
    for path, part in parts:  # what calls a method of the trees passes hooks by, but not what cleans their inputs

        def keep(_: nn.Module, inputs: tuple[Tensor, ...], path: str = path) -> None:
            reads[path] = inputs[0].detach()

        def clean(x: Tensor, path: str = path, part: Trees = part) -> Tensor:
            reads[path] = x.detach()
            return type(part)._clean(part, x)

        handles.append(part.register_forward_pre_hook(keep))
        vars(part)["_clean"] = clean
    try:
        with torch.no_grad():
            network(x)
    finally:
        for handle in handles:
            handle.remove()
        for _, part in parts:
            del vars(part)["_clean"]
    return reads


def _is_within_trees(network: Network, part: nn.Module) -> bool:
    return any(
        part is inner for trees in network.modules() if isinstance(trees, SoftTrees) for inner in trees.modules()
    )


def _calibrate(smooth: SoftTrees, trees: Trees, x: Tensor) -> None:
    """Scale and shift each output to fit the exact one."""
    with torch.no_grad():
        expected, got = trees(x).double(), smooth(x).double()
        centred = got - got.mean(0)
        slope = (centred * (expected - expected.mean(0))).sum(0) / centred.square().sum(0).clamp(min=1e-12)
        slope = torch.where(slope > 0, slope, 1.0)
        for group in smooth._groups:
            group.leaf.mul_((slope if group.output is None else slope[group.output]).float())
        smooth.bias.copy_(smooth.bias * slope + expected.mean(0) - slope * got.mean(0))


def randomise(network: Network, seed: int) -> None:
    """Draw parameters of trees, embeddings, linear models and factorisations anew, as a cold start; scalers stay."""
    generator = torch.Generator().manual_seed(seed)

    def draw(parameter: Tensor, deviation: float) -> None:
        if parameter.requires_grad:
            with torch.no_grad():
                values = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                parameter.copy_(values * deviation)

    for part in network.modules():
        if isinstance(part, SoftTrees):
            part.randomise(generator)
        elif isinstance(part, CategoryEmbedding | IdFactorization):
            for table in part.tables:
                draw(table, 0.3)
        elif isinstance(part, Affine):
            draw(part.weight, 1 / math.sqrt(part.weight.shape[1]))
            draw(part.bias, 0.0)
        elif isinstance(part, FactorizationMachine):
            draw(part.factors, 0.01)
