"""Refits of boosted trees beside the pipeline's own: each draws rows and columns anew, and their mean varies less.

The source keeps half of the weight, the members share the other half. A weighted sum of ensembles is one ensemble, so
the result is saved, exported, served and trained like any other; an answer costs as many times the trees.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
from mlsys_core.errors import InvalidInputError
from sklearn.base import clone
from sklearn.pipeline import Pipeline, make_pipeline

from mlsys_windtunnel.convert.translation import translate
from mlsys_windtunnel.finetune.residual import EXACT, Residual
from mlsys_windtunnel.finetune.sources import weight_for
from mlsys_windtunnel.module import WindTunnelModule
from mlsys_windtunnel.modules.network import Network
from mlsys_windtunnel.modules.tree.codes import Coded
from mlsys_windtunnel.modules.tree.ensemble import Floats, stacked
from mlsys_windtunnel.modules.tree.trees import Trees

SOURCE_SHARE = 0.5  # of the weight
DRAWN = 0.8  # share of rows and columns that a member's trees see, where the source's see all
_SHARES = ("subsample", "colsample_bytree", "max_features", "rsm")  # options of boosters that say so
_SEEDS = ("random_state", "random_seed")


def check_members(source: Any, members: int) -> None:
    """Look at a number of members before anything is fitted.

    Raises:
        InvalidInputError: it is no whole number of 0 or more, or the pipeline does not end in boosted trees.
    """
    if not isinstance(members, int) or members < 0:
        raise InvalidInputError(f"members is {members!r}; it must be a whole number, 0 or more")
    if not members:
        return
    last = _last(source)
    options = last.get_params(deep=False) if hasattr(last, "get_params") else {}
    if not any(name in options for name in _SEEDS) or not any(name in options for name in _SHARES):
        raise _unfit(last)


def with_members(module: WindTunnelModule, source: Any, x: Any, y: Any, weight: Any, *, members: int, seed: int) -> Any:
    """Return a module whose exact trees are half the source's and half refits'.

    Args:
        module: Translation of ``source``, fine-tuned or not, that holds its exact trees.
        source: The fitted pipeline.
        x: Raw rows of its fit.
        y: Their targets.
        weight: Their weights, or None.
        members: Number of refits.
        seed: Seed of the first; the others follow.

    Raises:
        InvalidInputError: the pipeline does not end in boosted trees alone, or in categories that trees encode.
    """
    steps = [step for _, step in source.steps[:-1]] if isinstance(source, Pipeline) else []
    last = _last(source)
    prepared = make_pipeline(*map(clone, steps)).fit_transform(x, y) if steps else x
    own = _trees_of(translate(last).network, last)
    parts, biases = [own.ensemble], [_bias(own)]
    for number in range(members):
        member = clone(last).set_params(**_drawn(last, seed + number))
        member.fit(prepared, y, **weight_for(member, weight))
        trees = _trees_of(translate(member).network, last)
        parts.append(trees.ensemble)
        biases.append(_bias(trees))
    shares = [SOURCE_SHARE, *[(1 - SOURCE_SHARE) / members] * members]
    scaled = [
        part.with_numbers(part.threshold, share * part.leaf_value) for share, part in zip(shares, parts, strict=True)
    ]
    bias = sum(share * each for share, each in zip(shares, biases, strict=True))
    together = Trees(stacked(scaled), bias=bias, num_groups=own.num_groups)
    network = copy.deepcopy(module.network)
    network.origin = None
    prefix = EXACT if isinstance(network.output, Residual) else ""
    if not _replace(network, prefix, together):
        raise InvalidInputError("members stand beside the source's exact trees, which init='residual' keeps: use that")
    return WindTunnelModule(module.frontend, network).eval()


def _last(source: Any) -> Any:
    while isinstance(source, Pipeline):
        source = source.steps[-1][1]
    return source


def _drawn(last: Any, seed: int) -> dict[str, Any]:
    """Return the options of a member: another seed, and rows and columns drawn where the source takes all."""
    options = last.get_params(deep=False)
    changed: dict[str, Any] = {name: seed for name in _SEEDS if name in options}
    changed |= {name: DRAWN for name in _SHARES if name in options and options[name] in (None, 1, 1.0)}
    if options.get("subsample_freq") == 0:
        changed["subsample_freq"] = 1
    return changed


def _trees_of(network: Network, last: Any) -> Trees:
    """Return the only trees of a booster's translation."""
    found = [part for part in network.modules() if isinstance(part, Trees)]
    is_coded = any(isinstance(part, Coded) for part in network.modules())
    if len(found) != 1 or is_coded or found[0].divisor != 1 or len(network.operators) != 1:
        raise _unfit(last)
    return found[0]


def _unfit(last: Any) -> InvalidInputError:
    return InvalidInputError(
        f"members are refits of boosted trees over numbers, with a seed; {type(last).__name__} as it is fitted here is "
        "none such: leave members at 0, or encode categories in a step before it"
    )


def _bias(trees: Trees) -> Floats:
    zeros = np.zeros(trees.num_groups)
    return zeros if trees.bias is None else zeros + trees.bias.double().numpy(force=True)


def _replace(network: Network, prefix: str, together: Trees) -> bool:
    """Put trees in place of those of the operators under a prefix; return whether there were any."""
    is_replaced = False
    for wire, operator in zip(network.wires, network.operators, strict=True):
        if not wire.name.startswith(prefix):
            continue
        for owner in list(operator.modules()):
            for name, part in owner.named_children():
                if type(part) is Trees:
                    setattr(owner, name, together)
                    is_replaced = True
    return is_replaced
