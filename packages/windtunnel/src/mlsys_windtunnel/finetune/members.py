"""Members beside a pipeline's boosted trees: refits of them, a linear model and perceptrons, weighed by unseen rows.

Refits draw rows and columns anew, half of them with random thresholds where the library has those, and their mean
varies less; a linear model and perceptrons err elsewhere. Each kind's weight is found by the answers to rows that were
held out of its fit, together with the source's. Where the sum is not surely better there, nothing is added. All trees
become one ensemble, and the rest stands within the same operator: files and servers need no new code.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from mlsys_core.errors import InvalidInputError
from scipy.optimize import minimize  # type: ignore[import-untyped]
from scipy.sparse import issparse  # type: ignore[import-untyped]
from sklearn.base import clone
from sklearn.model_selection import KFold, StratifiedKFold
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.utils import _safe_indexing
from torch import Tensor, nn

from mlsys_windtunnel.convert.translation import translate
from mlsys_windtunnel.finetune.choose import FEWEST_ROWS, Split, say, splits_of
from mlsys_windtunnel.finetune.losses import is_classifier, margins, row_loss
from mlsys_windtunnel.finetune.makers import (
    PRIOR,
    Maker,
    Part,
    Scaling,
    answers_plain_scores,
    floats,
    last_of,
    scores_of,
    trees_of,
)
from mlsys_windtunnel.finetune.options import RowLoss, TrainingOptions
from mlsys_windtunnel.finetune.residual import EXACT, Residual
from mlsys_windtunnel.module import WindTunnelModule
from mlsys_windtunnel.modules.base import PredictorModule
from mlsys_windtunnel.modules.linear.linear import Affine
from mlsys_windtunnel.modules.linear.neural import Layers
from mlsys_windtunnel.modules.network import Network
from mlsys_windtunnel.modules.tree.ensemble import Floats, stacked
from mlsys_windtunnel.modules.tree.trees import Trees, tree_parts

FOLDS = 5
FEW = 2  # refits of a kind that are fitted on each split, in place of all
_BLOCK_ROWS = 4096
PULL = 0.005  # loss that a squared distance of 1 from the prior costs, as a share of the loss of guessing


@dataclass(frozen=True, slots=True)
class Joined:
    """A module with members, and what they gain."""

    module: WindTunnelModule  # what was given, where nothing is surely gained
    shares: dict[str, float]  # weight of each kind of member, "source" first
    gain: float  # in the loss of rows held out of the fits; NaN without any
    gain_se: float


def with_members(
    module: WindTunnelModule,
    source: Any,
    x: Any,
    y: Any,
    weight: Any,
    *,
    members: int,
    cv: Any,
    groups: Any,
    options: TrainingOptions,
) -> Joined:
    """Fit members and put them beside the exact trees of a module, where rows held out show that they gain.

    Args:
        module: Translation of ``source``, fine-tuned or not, that holds its exact trees.
        source: The fitted pipeline.
        x: Raw rows of its fit.
        y: Their targets.
        weight: Their weights, or None.
        members: Number of refits, and of perceptrons up to three.
        cv: Splits to weigh members by, as in the estimators; None: five folds by chance.
        groups: ``[rows]``, for splitters that read them.
        options: ``random_state`` is the seed of the first refit, the others follow; the weights make ``loss`` least,
            which must be below the source's by ``min_gain_se`` standard errors.

    Raises:
        InvalidInputError: the pipeline does not end in boosted trees alone, or in categories that trees encode.
    """
    steps = [step for _, step in source.steps[:-1]] if isinstance(source, Pipeline) else []
    last = last_of(source)
    translated = translate(last).network
    own, head = trees_of(translated, last), translated.output
    assert isinstance(head, PredictorModule)
    maker = Maker(last, members, options.random_state, is_classifier(head), has_networks=answers_plain_scores(head))
    kinds = [kind for kind in PRIOR if maker.count(kind)]
    if cv is None:
        cv = (StratifiedKFold if maker.is_classifier else KFold)(FOLDS, shuffle=True, random_state=maker.seed)
    facts: dict[str, Any] = {"seed": maker.seed, "is_classifier": maker.is_classifier}
    splits = splits_of(x, y, cv=cv, groups=groups, fraction=0.0, **facts) if len(y) >= FEWEST_ROWS else []
    found = _weighed(maker, kinds, steps, x, y, weight, splits, _loss_of(head, own, options.loss)) if splits else None
    if found is None or not found.gain > options.min_gain_se * found.gain_se:
        gain = (math.nan, math.nan) if found is None else (found.gain, found.gain_se)
        return _told(Joined(module, {"source": 1.0}, *gain), options)
    shares = dict(zip(kinds, map(float, found.weights), strict=True))
    together = _summed(maker, own, shares, _prepared(steps, x, y), y, weight)
    network = copy.deepcopy(module.network)
    network.origin = None
    prefix = EXACT if isinstance(network.output, Residual) else ""
    if not _replace(network, prefix, together):
        raise InvalidInputError("members stand beside the source's exact trees, which init='residual' keeps: use that")
    return _told(Joined(WindTunnelModule(module.frontend, network).eval(), shares, found.gain, found.gain_se), options)


def _summed(maker: Maker, own: Trees, shares: dict[str, float], prepared: Any, y: Any, weight: Any) -> nn.Module:
    """Fit all members that weigh something on all rows; return one ensemble of their trees, networks beside it."""
    scaling = Scaling.of(prepared)
    parts: list[tuple[float, Part]] = [(shares["source"], own)]
    for kind, share in shares.items():
        if kind != "source" and share:
            fitted = maker.fit(kind, maker.count(kind), prepared, y, weight, scaling)
            parts += [(share / len(fitted), part) for part in fitted]
    trees = [(share, part) for share, part in parts if isinstance(part, Trees)]
    scaled = [
        part.ensemble.with_numbers(part.ensemble.threshold, share * part.ensemble.leaf_value) for share, part in trees
    ]
    bias = sum(share * part.bias_values for share, part in trees)
    together = Trees(stacked(scaled), bias=bias, num_groups=own.num_groups)
    networks = [_scaled(part, share) for share, part in parts if isinstance(part, Layers)]
    return scaling.beside(together, networks) if networks else together


def _told(joined: Joined, options: TrainingOptions) -> Joined:
    """Say on the error stream what members weigh, where progress is shown."""
    shares = ", ".join(f"{kind} {share:.2f}" for kind, share in joined.shares.items())
    is_alone = joined.shares.keys() == {"source"}
    found = f"loss {joined.gain:.5f} lower (standard error {joined.gain_se:.5f}) on rows held out"
    found = "too few rows to hold any out" if math.isnan(joined.gain) else found
    say(options, f"members: {f'nothing surely gained, none added: {found}' if is_alone else f'{shares}: {found}'}")
    return joined


def _weighed(
    maker: Maker,
    kinds: Sequence[str],
    steps: Sequence[Any],
    x: Any,
    y: Any,
    weight: Any,
    splits: Sequence[Split],
    losses: Callable[[Tensor, Tensor], Tensor],
) -> Weights:
    """Fit a few of each kind on the rows of each split, and weigh them by those held out."""
    codes = np.unique(y, return_inverse=True)[1] if maker.is_classifier else np.asarray(y, np.float64)
    scores, targets, weights = [], [], []
    for kept, held in splits:
        columns = make_pipeline(*map(clone, steps)) if steps else None
        kept_x, kept_y, held_x = _safe_indexing(x, kept), _safe_indexing(y, kept), _safe_indexing(x, held)
        kept_weight = None if weight is None else np.asarray(weight)[kept]
        fitted = kept_x if columns is None else columns.fit_transform(kept_x, kept_y)
        judged = held_x if columns is None else columns.transform(held_x)
        scaling = Scaling.of(fitted)
        of_split = []
        for kind in kinds:
            parts = maker.fit(kind, min(FEW, maker.count(kind)), fitted, kept_y, kept_weight, scaling)
            of_split.append(torch.stack([_scores(part, judged, scaling) for part in parts]).mean(dim=0))
        scores.append(torch.stack(of_split))
        targets.append(codes[held])
        weights.append(np.ones(len(held)) if weight is None else np.asarray(weight, np.float64)[held])
    target, row_weights = torch.from_numpy(np.concatenate(targets)), torch.from_numpy(np.concatenate(weights))
    prior = np.array([PRIOR[kind] for kind in kinds])
    guess = _guess(target, row_weights, is_classifier=maker.is_classifier)
    answers = torch.cat(scores, dim=1)
    return weigh(answers, lambda sums: losses(sums, target), prior / prior.sum(), row_weights=row_weights, guess=guess)


def _guess(target: Tensor, weights: Tensor, *, is_classifier: bool) -> float:
    """Return the entropy of classes or the variance of numbers."""
    share = weights / weights.sum()
    if is_classifier:
        counts = torch.zeros(int(target.max()) + 1, dtype=torch.float64).index_add(0, target, share)
        counts = counts[counts > 0]
        return float(-(counts * counts.log()).sum()) or 1.0
    return float(((target - (share * target).sum()).square() * share).sum()) or 1.0


def _loss_of(head: PredictorModule, own: Trees, loss: str | RowLoss) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the loss of each row from sums of leaves and targets."""
    tail = copy.deepcopy(head)
    for path, part in head.named_modules():
        if part is own:
            owner, _, name = path.rpartition(".")
            setattr(tail.get_submodule(owner), name, nn.Identity())
    tail.requires_grad_(False)
    of_rows = row_loss(loss, head)
    return lambda sums, target: of_rows(margins(tail, tail(sums)), target)


def _prepared(steps: Sequence[Any], x: Any, y: Any) -> Any:
    return make_pipeline(*map(clone, steps)).fit_transform(x, y) if steps else x


def _scores(part: Part, table: Any, scaling: Scaling) -> Tensor:
    """Return the scores of columns, ``[rows, outputs]`` float64."""
    blocks = []
    for start in range(0, table.shape[0], _BLOCK_ROWS):
        rows = table[start : start + _BLOCK_ROWS]
        block = torch.from_numpy(rows.toarray().astype(np.float64) if issparse(rows) else floats(rows))
        with torch.no_grad():
            blocks.append(scores_of(scaling, part, block) if isinstance(part, Layers) else part(block))
    return torch.cat(blocks).double()


def _scaled(layers: Layers, share: float) -> Layers:
    last = layers.layers[-1]
    assert isinstance(last, Affine)
    with torch.no_grad():
        last.weight.mul_(share)
        last.bias.mul_(share)
    return layers


def _replace(network: Network, prefix: str, together: nn.Module) -> bool:
    """Put trees in place of those of the operators under a prefix; return whether there were any."""
    is_replaced = False
    for wire, operator in zip(network.wires, network.operators, strict=True):
        if not wire.name.startswith(prefix):
            continue
        for owner, name, _ in tree_parts(operator):
            setattr(owner, name, together)
            is_replaced = True
    return is_replaced


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of the members, and what they gain on the rows."""

    weights: Floats  # [members], 0 or more, sum 1
    gain: float  # mean loss of the first member less that of the sum, over all rows
    gain_se: float


def weigh(
    scores: Tensor, losses: Callable[[Tensor], Tensor], prior: Floats, *, row_weights: Tensor, guess: float
) -> Weights:
    """Find the weights of least loss on a simplex.

    Args:
        scores: Of each member, the first the source, ``[members, rows, outputs]``.
        losses: Loss of each row, ``[rows]``, from scores ``[rows, outputs]``.
        prior: Weights where the rows say nothing, ``[members]``.
        row_weights: ``[rows]``.
        guess: Mean loss of one answer to all rows: the unit of losses.
    """

    def mean(values: Tensor) -> Tensor:
        return (values * row_weights).sum() / row_weights.sum()

    def objective(weights: Floats) -> tuple[float, Floats]:
        parts = torch.tensor(weights, dtype=torch.float64, requires_grad=True)
        distance = (parts - torch.from_numpy(prior)).square().sum()
        loss = mean(losses(torch.einsum("m,mro->ro", parts, scores))) / guess + PULL * distance
        loss.backward()  # type: ignore[no-untyped-call]
        assert parts.grad is not None
        return float(loss.detach()), parts.grad.numpy()

    total = {"type": "eq", "fun": lambda weights: weights.sum() - 1, "jac": np.ones_like}
    options = {"ftol": 1e-10, "maxiter": 200}
    bounds = [(0.0, 1.0)] * len(prior)
    found = minimize(objective, prior, jac=True, bounds=bounds, constraints=total, method="SLSQP", options=options)
    weights = np.clip(found.x, 0, None) if np.isfinite(found.x).all() else prior
    weights = np.where(weights < 1e-3, 0.0, weights)
    weights /= weights.sum()
    with torch.no_grad():
        gains = losses(scores[0]) - losses(torch.einsum("m,mro->ro", torch.from_numpy(weights), scores))
        gain = mean(gains)
        share = row_weights / row_weights.sum()
        error = ((gains - gain).square() * share.square()).sum().sqrt()
    return Weights(weights, float(gain), float(error))
