"""Members of each kind, fitted: refits of boosted trees, a linear model, perceptrons.

scikit-learn fits linear models and perceptrons on scaled columns. The scaling is folded into their first layer and the
target's into the last, so they read the columns of the trees and answer their scores: log-odds, logarithms of
unnormalised probabilities, or numbers.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from mlsys_core.errors import InvalidInputError
from scipy.sparse import csr_array, issparse  # type: ignore[import-untyped]
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import Pipeline
from sklearn.utils.validation import has_fit_parameter
from torch import Tensor

from mlsys_windtunnel.convert.translation import translate
from mlsys_windtunnel.modules.base import PredictorModule
from mlsys_windtunnel.modules.combine.combine import Beside
from mlsys_windtunnel.modules.linear.neural import Layers
from mlsys_windtunnel.modules.network import Network
from mlsys_windtunnel.modules.tree.ensemble import Floats
from mlsys_windtunnel.modules.tree.heads import Coded, Mapped
from mlsys_windtunnel.modules.tree.trees import Trees

NETWORKS = 3
_LINEAR_C, _RIDGE = 0.3, 3.0
_PERCEPTRON = {
    "hidden_layer_sizes": (64, 64),
    "alpha": 1e-3,
    "learning_rate_init": 2e-3,
    "early_stopping": True,
    "max_iter": 60,
    "n_iter_no_change": 8,
}


@dataclass(frozen=True, slots=True)
class Scaling:
    """Columns as networks are fitted on them; those of only zeros and ones stay as they are."""

    fill: Floats  # in place of NaN
    low: Floats  # what is below counts as this
    high: Floats
    shift: Floats  # subtracted; 0 of sparse tables
    scale: Floats  # divides

    @classmethod
    def of(cls, table: Any) -> Scaling:
        """Find the scaling of training rows, dense or sparse; NaN and infinities are left out."""
        if issparse(table):
            table = csr_array(table)
            low, high = (
                np.asarray(side.todense(), np.float64).ravel() for side in (table.min(axis=0), table.max(axis=0))
            )
            spread = np.sqrt(np.asarray(table.power(2).mean(axis=0)).ravel())  # about 0, since nothing is subtracted
            fill = shift = np.zeros(len(low))
        else:
            table = floats(table)
            table = np.where(np.isinf(table), np.nan, table)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # a column of NaN alone
                low, high, fill, spread = (
                    np.nan_to_num(measure(table, axis=0)) for measure in (np.nanmin, np.nanmax, np.nanmean, np.nanstd)
                )
            shift = fill
        is_flag = ((low == 0) & (high == 1)) | (spread == 0)
        return cls(fill, low, high, np.where(is_flag, 0.0, shift), np.where(is_flag, 1.0, spread))

    def apply(self, table: Any) -> Any:
        """Return scaled rows, ``[rows, columns]``, sparse where the table is."""
        if issparse(table):
            return csr_array(csr_array(table).multiply(1 / self.scale))
        values = floats(table)
        return (np.where(np.isnan(values), self.fill, values).clip(self.low, self.high) - self.shift) / self.scale

    def layers(self, weights: Sequence[Floats], biases: Sequence[Floats], *, shift: float, scale: float) -> Layers:
        """Return layers over columns as they are, whose answers are ``shift + scale *`` those of the fitted ones."""
        weights, biases = list(weights), list(biases)
        first = weights[0] / self.scale[:, None]
        biases[0] = biases[0] - self.shift @ first
        weights[0] = first
        weights[-1], biases[-1] = scale * weights[-1], shift + scale * biases[-1]
        return Layers(weights, biases, hidden="relu")

    def beside(self, trees: Trees, networks: Sequence[Layers]) -> Beside:
        """Return the trees with the networks beside them."""
        return Beside(trees, networks, fill=self.fill, low=self.low, high=self.high)


def floats(table: Any) -> Floats:
    """Return rows of a dense table or frame as numbers, NaN where there is none."""
    if hasattr(table, "iloc"):
        table = table.to_numpy(np.float64, na_value=np.nan)
    return np.ascontiguousarray(table, np.float64)


def fit_linear(scaling: Scaling, table: Any, y: Any, weight: Any, seed: int, *, is_classifier: bool) -> Layers:
    """Fit a logistic or a ridge regression."""
    rows = scaling.apply(table)
    if is_classifier:
        model: Any = LogisticRegression(C=_LINEAR_C, max_iter=300, random_state=seed)
    else:
        model = Ridge(_RIDGE)
    _fit(model, rows, y, weight)
    return scaling.layers([np.atleast_2d(model.coef_).T], [np.atleast_1d(model.intercept_)], shift=0.0, scale=1.0)


def fit_perceptron(scaling: Scaling, table: Any, y: Any, weight: Any, seed: int, *, is_classifier: bool) -> Layers:
    """Fit two hidden layers of 64, which stop when a tenth of the rows shows no gain."""
    rows = scaling.apply(table)
    if is_classifier:
        model = _fit(MLPClassifier(**_PERCEPTRON, random_state=seed), rows, y, weight)
        return scaling.layers(model.coefs_, model.intercepts_, shift=0.0, scale=1.0)
    mean, spread = float(np.mean(y)), float(np.std(y)) or 1.0
    model = _fit(MLPRegressor(**_PERCEPTRON, random_state=seed), rows, (y - mean) / spread, weight)
    return scaling.layers(model.coefs_, model.intercepts_, shift=mean, scale=spread)


def scores_of(scaling: Scaling, layers: Layers, table: Tensor) -> Tensor:
    """Return the layers' scores ``[rows, outputs]`` of columns as they are, within the bounds of the training rows."""
    fill, low, high = (torch.from_numpy(each) for each in (scaling.fill, scaling.low, scaling.high))
    with torch.no_grad():
        result: Tensor = layers(torch.where(table.isnan(), fill, table).clamp(low, high))
    return result


def _fit(model: Any, rows: Any, y: Any, weight: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return model.fit(rows, y, **weight_for(model, weight))


def refuse_ranker(source: Any) -> None:
    """Raise InvalidInputError for a pipeline that ends in a ranker."""
    while isinstance(source, Pipeline):
        source = source.steps[-1][1]
    if (name := type(source).__name__).endswith("Ranker"):
        raise InvalidInputError(
            f"{name} ranks rows within queries, which an estimator's fit is not told: fit it, and translate it"
        )


def weight_for(source: Any, weight: Any) -> dict[str, Any]:
    """Return the argument that tells ``fit`` of the pipeline the weights; nothing where it takes none."""
    if weight is None:
        return {}
    prefix, last = "", source
    while isinstance(last, Pipeline):
        name, last = last.steps[-1]
        prefix += f"{name}__"
    return {f"{prefix}sample_weight": weight} if has_fit_parameter(last, "sample_weight") else {}


DRAWN = 0.8  # share of rows and columns that a refit's trees see, where the source's see all
# Weight of each kind where rows held out say nothing
PRIOR = {"source": 0.5, "drawn": 0.25, "random": 0.25, "linear": 0.0, "perceptrons": 0.0}
_SHARES = ("subsample", "colsample_bytree", "max_features", "rsm")  # options of boosters that say so
_SEEDS = ("random_state", "random_seed")

Part = Trees | Layers


def check_members(source: Any, members: int) -> None:
    """Look at a number of members before anything is fitted.

    Raises:
        InvalidInputError: it is no whole number of 0 or more, or the pipeline does not end in boosted trees.
    """
    if not isinstance(members, int) or members < 0:
        raise InvalidInputError(f"members is {members!r}; it must be a whole number, 0 or more")
    if not members:
        return
    last = last_of(source)
    options = last.get_params(deep=False) if hasattr(last, "get_params") else {}
    if not any(name in options for name in _SEEDS) or not any(name in options for name in _SHARES):
        raise _unfit(last)


@dataclass(frozen=True, slots=True)
class Maker:
    """Fits members of a kind on prepared columns."""

    last: Any
    members: int
    seed: int
    is_classifier: bool
    has_networks: bool  # members that are no trees

    def count(self, kind: str) -> int:
        """Return how many of a kind stand beside the source."""
        of_random = self.members // 2 if type(self.last).__module__.startswith("lightgbm") else 0
        counts = {"source": 1, "drawn": self.members - of_random, "random": of_random}
        if self.has_networks:
            counts |= {"linear": 1, "perceptrons": min(self.members, NETWORKS)}
        return counts.get(kind, 0)

    def fit(self, kind: str, count: int, prepared: Any, y: Any, weight: Any, scaling: Scaling) -> list[Part]:
        """Return fitted members."""
        if kind in ("linear", "perceptrons"):
            fit = fit_linear if kind == "linear" else fit_perceptron
            options = {"is_classifier": self.is_classifier}
            return [
                fit(scaling, prepared, y, weight, (self.seed + number) % 2**32, **options) for number in range(count)
            ]
        parts: list[Part] = []
        for number in range(count):
            seed = self.seed + number + (self.members if kind == "random" else 0)
            changed = {} if kind == "source" else drawn_options(self.last, seed)
            member = clone(self.last).set_params(**changed, **({"extra_trees": True} if kind == "random" else {}))
            member.fit(prepared, y, **weight_for(member, weight))
            parts.append(trees_of(translate(member).network, self.last))
        return parts


def answers_plain_scores(head: PredictorModule) -> bool:
    """Return whether sums of leaves are log-odds, logarithms of probabilities or numbers, as networks answer them."""
    body = getattr(head, "body", None)
    if type(body) is Mapped and body.output == "identity" and body.slope == 1:
        body = body.body
    return type(body) is Trees and getattr(head, "slope", 1.0) == 1


def last_of(source: Any) -> Any:
    """Return the last step, of pipelines within pipelines too."""
    while isinstance(source, Pipeline):
        source = source.steps[-1][1]
    return source


def drawn_options(last: Any, seed: int) -> dict[str, Any]:
    """Return the options of a refit: another seed, and rows and columns drawn where the source takes all."""
    options = last.get_params(deep=False)
    changed: dict[str, Any] = {name: seed for name in _SEEDS if name in options}
    changed |= {name: DRAWN for name in _SHARES if name in options and options[name] in (None, 1, 1.0)}
    if options.get("subsample_freq") == 0:
        changed["subsample_freq"] = 1
    return changed


def trees_of(network: Network, last: Any) -> Trees:
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
