"""Updates of boosted trees in closed form: leaves, and thresholds, that the remembered labels call for.

Four answers are weighed: the pipeline's as it was fitted, that of its leaves corrected, that of leaves fitted anew, and
that of thresholds and leaves fitted anew. Each is judged by rows that it had not learnt from: those of each update
before they were learnt, and folds of the first. The weighted sum is again one ensemble of trees.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from mlsys_windtunnel.backends.soft.soften import tree_inputs
from mlsys_windtunnel.finetune.losses import log_loss, margins
from mlsys_windtunnel.finetune.options import RowLoss
from mlsys_windtunnel.finetune.refit_trees import Refitted, Slopes, refit_trees
from mlsys_windtunnel.finetune.rows import ROWS_PER_CHUNK, Batch
from mlsys_windtunnel.modules.base import Classifier, PredictorModule, Regressor
from mlsys_windtunnel.modules.network import Network
from mlsys_windtunnel.modules.tree.ensemble import Floats, stacked
from mlsys_windtunnel.modules.tree.heads import Coded
from mlsys_windtunnel.modules.tree.trees import Trees, tree_parts

NUM_ANSWERS = 4  # as fitted; leaves corrected; leaves anew; thresholds and leaves anew
CORRECTED = 1  # the answer that weights are drawn towards: best or near it on flights and films alike
NEGLIGIBLE = 1e-6  # weight below which an answer's trees are left out
PRIOR_ROWS = 100.0  # rows that speak for one answer alone


@dataclass(frozen=True, slots=True)
class Boosted:
    """A network whose scores are the sums of one ensemble of boosted trees."""

    network: Network
    trees: Trees
    slope: float  # margins are scores times this

    @classmethod
    def of(cls, network: Network) -> Boosted | None:
        """Return the parts of a network, or None if it is none such."""
        head = network.output
        if not isinstance(head, Classifier | Regressor):
            return None
        body = head.body.trees if isinstance(head.body, Coded) else head.body
        if not isinstance(body, Trees) or sum(isinstance(part, Trees) for part in network.modules()) != 1:
            return None
        is_boosted = body.divisor == 1 and body.leaf_value.shape[1] == 1 and body.ensemble.num_trees > 1
        is_margin = isinstance(head, Regressor) or (head.link in ("logistic", "softmax") and len(head.classes) >= 2)
        if not is_boosted or not is_margin or (isinstance(head, Regressor) and body.num_groups > 1):
            return None
        scores = torch.ones(1, body.num_groups, dtype=torch.float64)
        return cls(network, body, float(margins(head, scores)[0, 0]))

    @property
    def head(self) -> PredictorModule:
        """The last operator."""
        head = self.network.output
        assert isinstance(head, PredictorModule)
        return head

    def clean(self, x: Tensor) -> Floats:
        """Return rows as the trees compare them."""
        parts = []
        for chunk in torch.split(x, ROWS_PER_CHUNK):
            (read,) = tree_inputs(self.network, chunk).values()
            parts.append(self.trees._clean(read).double().numpy())
        return np.concatenate(parts)


@dataclass(frozen=True, slots=True)
class Task:
    """The loss that answers are judged by, on the scale of a log-likelihood."""

    variance: float | None  # of a regressor's errors; None: a classifier
    num_classes: int

    @classmethod
    def of(cls, boosted: Boosted, rows: Batch, fitted: Tensor) -> Task:
        """Return the loss for a network; ``fitted``: its margins of the rows."""
        if boosted.head.classes:
            return cls(None, len(boosted.head.classes))
        errors = (rows.target.reshape(len(rows), -1) - fitted).square().mean(dim=1)
        variance = float((errors * rows.weight).sum() / rows.weight.sum())
        return cls(max(variance, 1e-12), 0)

    @property
    def unit(self) -> float:
        """Mean squared error, or log loss, of one unit of :meth:`loss`."""
        return 1.0 if self.variance is None else 2 * self.variance

    @property
    def loss(self) -> RowLoss:
        """Losses of rows from margins and targets."""
        if self.variance is None:
            return log_loss

        def squared(margin: Tensor, target: Tensor) -> Tensor:
            return (margin - target.reshape(margin.shape)).square().mean(dim=1) / self.unit

        return squared

    def base(self, rows: Batch) -> Floats:
        """Return the margins that suit all rows best together, ``[outputs]``."""
        total = rows.weight.sum()
        if self.variance is not None:
            return np.array([float((rows.target.reshape(-1) * rows.weight).sum() / total)])
        counts = torch.bincount(rows.target, rows.weight, self.num_classes).numpy() + 0.5
        logs: Floats = np.log(counts / counts.sum())
        return logs[1:] - logs[:1] if self.num_classes == 2 else logs

    def slopes(self, rows: Batch) -> Slopes:
        """Return the derivatives of the rows' weighted losses by margins."""
        weight = rows.weight.numpy()[:, None]
        if self.variance is not None:
            target, scale = rows.target.numpy().reshape(-1, 1), weight / self.variance
            return lambda margin: (scale * (margin - target), np.broadcast_to(scale, margin.shape))
        hot = functional.one_hot(rows.target, self.num_classes).double().numpy()
        is_binary = self.num_classes == 2

        def of_classes(margin: Floats) -> tuple[Floats, Floats]:
            if is_binary:
                share, truth = torch.from_numpy(margin).sigmoid().numpy(), hot[:, 1:]
            else:
                share, truth = torch.from_numpy(margin).softmax(dim=1).numpy(), hot
            return weight * (share - truth), weight * share * (1 - share)

        return of_classes


def foretold(boosted: Boosted, known: Batch | None, new: Batch, *, folds: int, seed: int) -> Tensor:
    """Return the answers' margins of rows that they have not learnt from, ``[rows, answers, outputs]``.

    Args:
        boosted: The network as it was fitted.
        known: Rows that were learnt before; None: there are none, and folds of the new rows are learnt in turn.
        new: Rows to answer.
        folds: Number of folds.
        seed: Seed of the folds.
    """
    clean = boosted.clean(new.x)
    if known is not None:
        return _margins(boosted, _answers(boosted, known), new.x, clean)
    result = torch.zeros(len(new), NUM_ANSWERS, boosted.trees.num_groups, dtype=torch.float64)
    order = torch.randperm(len(new), generator=torch.Generator().manual_seed(seed))
    parts = torch.tensor_split(order, min(folds, len(new)))
    for number, held in enumerate(parts):
        kept = torch.cat([part for index, part in enumerate(parts) if index != number] or [held])
        result[held] = _margins(boosted, _answers(boosted, new[kept]), new.x[held], clean[held.numpy()])
    return result


def weigh(boosted: Boosted, rows: Batch, margin: Tensor) -> Blend:
    """Weigh the answers by their margins of rows that they had not learnt from."""
    task = Task.of(boosted, rows, margin[:, 0])
    found = blend(margin, rows.target, rows.weight, task.loss, towards=CORRECTED)
    return Blend(found.weights, found.shift, found.gain * task.unit, found.gain_se * task.unit)


def blended(boosted: Boosted, rows: Batch, weights: Blend) -> Network:
    """Return a network with the weighted sum of the answers, learnt from all rows."""
    ensemble, slope = boosted.trees.ensemble, boosted.slope
    first, *others = weights.weights
    answers = _answers(boosted, rows)
    *same, (last, moved) = zip(others, answers, strict=True)
    value = first * ensemble.leaf_value + sum(share * each.leaf_value for share, each in same) / slope
    base = weights.shift + sum(share * each.base for share, each in zip(others, answers, strict=True))
    bias = first * boosted.trees.bias_values + base / slope
    parts = [ensemble.with_numbers(ensemble.threshold, value)]
    if last > NEGLIGIBLE:
        parts.append(ensemble.with_numbers(moved.threshold, last * moved.leaf_value / slope))
    network = copy.deepcopy(boosted.network)
    network.origin = None
    trees = Trees(stacked(parts), bias=bias, num_groups=boosted.trees.num_groups)
    for owner, name, _ in tree_parts(network):
        setattr(owner, name, trees)
    return network


def _answers(boosted: Boosted, rows: Batch) -> tuple[Refitted, ...]:
    """Return the trees with leaves corrected, with leaves anew, and with thresholds and leaves anew, in margins."""
    ensemble, clean = boosted.trees.ensemble, boosted.clean(rows.x)
    with torch.no_grad():
        fitted = boosted.network(rows.x) * boosted.slope
    task = Task.of(boosted, rows, fitted)
    base, slopes = task.base(rows), task.slopes(rows)
    fitted_base, leaf_value = boosted.trees.bias_values * boosted.slope, ensemble.leaf_value * boosted.slope
    return (
        refit_trees(ensemble, clean, slopes, fitted_base, leaf_value=leaf_value),
        refit_trees(ensemble, clean, slopes, base),
        refit_trees(ensemble, clean, slopes, base, moves_thresholds=True),
    )


def _margins(boosted: Boosted, answers: tuple[Refitted, ...], x: Tensor, clean: Floats) -> Tensor:
    with torch.no_grad():
        fitted = boosted.network(x) * boosted.slope
    anew = [each.margins(boosted.trees.ensemble, clean, boosted.trees.num_groups) for each in answers]
    return torch.stack([fitted, *map(torch.from_numpy, anew)], dim=1)


@dataclass(frozen=True, slots=True)
class Blend:
    """Weights of answers."""

    weights: npt.NDArray[np.float64]  # [answers], 0 or more
    shift: npt.NDArray[np.float64]  # [outputs]: added to the weighted margins
    gain: float  # fall of the mean loss below the first answer's
    gain_se: float  # its standard error over the rows


def blend(margins: Tensor, target: Tensor, weight: Tensor, loss: RowLoss, *, towards: int = 0) -> Blend:
    """Find weights that the rows' loss is lowest at, drawn towards one answer alone.

    Args:
        margins: ``[rows, answers, outputs]`` float64, of rows that the answers had not learnt from.
        target: As the loss takes it.
        weight: ``[rows]``.
        loss: Margins ``[rows, outputs]`` and targets to losses ``[rows]``.
        towards: Index of the answer that few rows leave most of the weight to.
    """
    from scipy.optimize import minimize  # type: ignore[import-untyped]

    num_answers, num_outputs = margins.shape[1:]
    shares = weight / weight.sum()
    strength = PRIOR_ROWS / (PRIOR_ROWS + float(weight.sum()))
    alone = torch.zeros(num_answers, dtype=torch.float64)
    alone[towards] = 1.0
    scale = float(margins[:, 0].std(dim=0, correction=0).mean()) or 1.0
    before = loss(margins[:, 0], target)

    def together(values: Tensor) -> Tensor:
        return torch.einsum("rao,a->ro", margins, values[:num_answers]) + values[num_answers:]

    def objective(values: npt.NDArray[np.float64]) -> tuple[float, npt.NDArray[np.float64]]:
        parameters = torch.tensor(values, requires_grad=True)
        distance = (parameters[:num_answers] - alone).square().sum() + parameters[num_answers:].square().sum()
        value = (loss(together(parameters), target) * shares).sum() + strength * scale**2 * distance / 8
        (gradient,) = torch.autograd.grad(value, parameters)
        return value.item(), gradient.numpy()

    start = np.append(alone.numpy(), np.zeros(num_outputs))
    bounds = [(0.0, None)] * num_answers + [(None, None)] * num_outputs
    found = minimize(objective, start, jac=True, method="L-BFGS-B", bounds=bounds).x
    gains = before - loss(together(torch.from_numpy(found)), target)
    mean = float((gains * shares).sum())
    error = float(((gains - mean).square() * shares.square()).sum().sqrt())
    return Blend(found[:num_answers], found[num_answers:], mean, error)
