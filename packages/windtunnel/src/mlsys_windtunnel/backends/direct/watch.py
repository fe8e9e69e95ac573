"""Checks that a program makes: what the operators' sources refuse, looked for where it costs least.

A sum of weights times numbers is finite only if the numbers are. So a linear model's few scores tell of its whole
input, and of the input of scalers before it; their tables are looked at only when a score is not finite.
"""

from __future__ import annotations

import torch
from mlsys_windtunnel.checks.values import Contract
from mlsys_windtunnel.modules.base import Classifier, PredictorModule, Regressor
from mlsys_windtunnel.modules.columns.columns import Concatenate, Impute, Scale
from mlsys_windtunnel.modules.columns.scale import ElementwiseAffine, Rescale
from mlsys_windtunnel.modules.linear.linear import Affine
from mlsys_windtunnel.modules.network import Network

KEEPS = (Concatenate, ElementwiseAffine, Rescale, Scale)  # of which a number that is not finite makes another

Check = tuple[str, Contract]
ColumnCheck = tuple[slice, Contract]


def checks_of(network: Network) -> tuple[list[Check], list[Check]]:
    """Split the network's checks into those to be made ahead and those that its scores make, as linear ones do."""
    last = network.wires[-1]
    late: list[Check] = []
    ahead: list[Check] = []
    seen: set[str] = set()  # values whose numbers that are not finite show in the scores
    if _tells(network.output) and last.checks and all(contract.is_finite for _, contract in last.checks):
        late = list(last.checks)
        seen.update(last.inputs)
    else:
        ahead += last.checks
    for wire, module in reversed(list(zip(network.wires[:-1], network.operators, strict=False))):
        shows = wire.name in seen
        if shows and type(module) in KEEPS:
            seen.update(wire.inputs)
        keeps_infinity = shows and type(module) is Impute and _keeps_columns(module)
        for name, contract in wire.checks:
            is_late = name in seen and not contract.has_bounds
            if not is_late and not (keeps_infinity and contract.takes_nan and not contract.has_bounds):
                ahead.append((name, contract))
    return ahead, late


def frontier_checks(network: Network) -> list[Check]:
    """Return the network's checks that its input alone allows, for a program that cannot refuse.

    A scaler's input is checked for what reads its output: a number that is not finite stays so.
    """
    wanted = [check for wire in network.wires for check in wire.checks]
    for wire, module in reversed(list(zip(network.wires, network.operators, strict=True))):
        if type(module) in KEEPS:
            of_output = [contract for name, contract in wanted if name == wire.name and not contract.has_bounds]
            wanted += [(name, contract) for contract in of_output for name in wire.inputs]
    names = {name for name, _ in network.frontier}
    return list(dict.fromkeys(check for check in wanted if check[0] in names))


def column_checks(network: Network) -> list[ColumnCheck]:
    """Return :func:`frontier_checks` by columns of the packed table."""
    columns, start = {}, 0
    for name, width in network.frontier:
        columns[name] = slice(start, start + width)
        start += width
    return [(columns[name], contract) for name, contract in frontier_checks(network)]


def _tells(predictor: PredictorModule | torch.nn.Module) -> bool:
    """Return whether scores of numbers that are not all finite are not finite: each column counts for some score."""
    if type(predictor) not in (Classifier, Regressor):
        return False
    body = predictor.body
    return type(body) is Affine and bool((body.weight != 0).any(dim=0).all())


def _keeps_columns(module: Impute) -> bool:
    kept = module.kept
    return len(module.indicated) == 0 and bool((kept == torch.arange(len(kept))).all())
