"""LightGBM's models, read from their text form, which the library keeps stable and prints to the last bit.

A tree compares doubles by ``<=``. What counts as missing is written beside each split: nothing (NaN is read as 0),
zero (and NaN), or NaN. Categories are integers; those that a split's bitset does not hold go right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from mlsys_core.errors import InvalidInputError

from mlsys_windtunnel.convert.linear import class_labels
from mlsys_windtunnel.convert.registry import Converted, Converters, Unsupported
from mlsys_windtunnel.convert.trees_lookup import MixedLookup
from mlsys_windtunnel.modules.base import OperatorModule, Regressor
from mlsys_windtunnel.modules.tree.ensemble import Tree, TreeEnsemble, bitset_codes, join_trees
from mlsys_windtunnel.modules.tree.heads import LeafIndicators, LinearLeaves, Mapped, Output, RawScores, TreeClassifier
from mlsys_windtunnel.modules.tree.trees import Trees

CONVERTERS = Converters()

_CATEGORICAL, _DEFAULT_LEFT = 1, 2  # bits of decision_type; the two after them say what is missing
_MISSING_NONE, _MISSING_ZERO = 0, 1

# What a prediction is of the raw score, by objective; those that are not here answer the raw score.
_OUTPUTS: dict[str, Output] = {
    "poisson": "exp",
    "gamma": "exp",
    "tweedie": "exp",
    "binary": "logistic",
    "cross_entropy": "logistic",
    "cross_entropy_lambda": "log1p-exp",
    "multiclass": "softmax",
    "multiclassova": "logistic",
}


_STOPS_EARLY = Unsupported("pred_early_stop=True, which leaves trees out by their sum so far; set it to False")


@dataclass(frozen=True, slots=True)
class LinearModels:
    """Linear models of leaves (``linear_tree``), in the order of leaves."""

    constants: list[float]
    features: list[list[int]]
    coefficients: list[list[float]]


@dataclass(frozen=True, slots=True)
class Model:
    """A model's text, read."""

    objective: tuple[str, ...]  # its name and options, ("binary", "sigmoid:1"); empty for one of the user's own
    ensemble: TreeEnsemble
    num_groups: int  # trees an iteration
    is_averaged: bool  # a random forest
    categorical: tuple[int, ...]  # features given as categories, whether they are split on or not
    linear: LinearModels | None = None  # of the leaves

    @property
    def name(self) -> str:
        """The objective's name; empty for one of the user's own."""
        return self.objective[0] if self.objective else ""

    def body(self) -> OperatorModule:
        """Return a module of the raw scores, ``[rows, groups]``."""
        trees = Trees(self.ensemble, num_groups=self.num_groups)
        linear = self.linear
        if linear is None:
            return trees
        return LinearLeaves(
            trees, constants=linear.constants, features=linear.features, coefficients=linear.coefficients
        )

    def scores(self) -> OperatorModule:
        """Return a module of what a user's objective is answered with: raw scores, a forest's mean."""
        return Mapped(self.body(), "identity", slope=self.slope) if self.is_averaged else self.body()

    @property
    def slope(self) -> float:
        """Factor of raw scores: the objective's "sigmoid", and a forest's mean (raw scores are sums)."""
        sigmoid = next((option.partition(":")[2] for option in self.objective if option.startswith("sigmoid:")), "1")
        return float(sigmoid) / (self.ensemble.num_trees // self.num_groups if self.is_averaged else 1)


@CONVERTERS.of("lightgbm.sklearn", "LGBMRanker", "LGBMRegressor")
def lgbm_regressor(estimator: Any) -> Converted | Unsupported:
    """Convert regressors and rankers: one value a row; of several groups of trees, as many."""
    model = read_model(estimator.booster_)
    output = _OUTPUTS.get(model.name, "identity")
    if "sqrt" in model.objective:
        output = "signed-square"
    ranks = model.name in ("lambdarank", "rank_xendcg")
    if ranks and estimator.get_params().get("pred_early_stop"):
        return _STOPS_EARLY
    return _converted(
        Regressor(Mapped(model.body(), output, slope=model.slope), ranks=ranks), model, estimator.booster_
    )


@CONVERTERS.of("lightgbm.basic", "Booster")
def lightgbm_booster(estimator: Any) -> Converted | Unsupported:
    """Convert a booster of its library's own: probabilities of classes, values, or raw scores of a user's objective."""
    return lgbm_regressor(estimator)


@CONVERTERS.of("lightgbm.sklearn", "LGBMClassifier")
def lgbm_classifier(estimator: Any) -> Converted | Unsupported:
    """Convert classifiers; with an objective of the user's own they answer raw scores."""
    if estimator.get_params().get("pred_early_stop"):
        return _STOPS_EARLY
    model = read_model(estimator.booster_)
    answers = [method for method in ("predict", "predict_proba", "decision_function") if hasattr(estimator, method)]
    if callable(estimator._objective):
        return _converted(RawScores(model.scores(), answers=answers), model, estimator.booster_)
    if model.name not in ("binary", "cross_entropy", "multiclass", "multiclassova"):
        return Unsupported(
            f"objective={model.name!r} of a classifier; fit it with binary, cross_entropy, multiclass or multiclassova"
        )
    head = TreeClassifier(
        model.body(),
        classes=class_labels(estimator.classes_),
        link="softmax" if model.name == "multiclass" else "logistic",
        answers=answers,
        slope=model.slope,
        is_normalised=model.name != "multiclassova",
        decides="likeliest",
    )
    return _converted(head, model, estimator.booster_)


@CONVERTERS.of(
    "mlsys_windtunnel.estimators.leaves", "LeafEncoder", is_trainable=False, note="trainable once the trees are soft"
)
def leaf_encoder(estimator: Any) -> Converted | Unsupported:
    """Convert to leaves as features (our own estimator)."""
    model = read_model(estimator.estimator_.booster_)
    if model.linear is not None:
        return Unsupported("linear_tree=True: leaves with models of their own are no indicators; fit with False")
    return _converted(LeafIndicators(Trees(model.ensemble)), model, estimator.estimator_.booster_)


def read_model(booster: Any) -> Model:
    """Read a booster up to its best iteration.

    Raises:
        InvalidInputError: trees disagree about what is missing in a feature.
    """
    text, _, parameters = booster.model_to_string().partition("\nend of trees")
    header, *blocks = map(_fields, text.split("\n\nTree="))
    zero_is_missing: dict[int, bool] = {}
    trees = [_tree(block, zero_is_missing) for block in blocks]
    return Model(
        objective=tuple(header.get("objective", "").split()),
        ensemble=join_trees(
            trees,
            num_features=int(header["max_feature_idx"]) + 1,
            zero_is_missing=[feature for feature, is_missing in zero_is_missing.items() if is_missing],
        ),
        num_groups=int(header["num_tree_per_iteration"]),
        is_averaged="average_output" in header,
        categorical=_categorical_features(parameters),
        linear=_linear_models(blocks),
    )


def _linear_models(blocks: Sequence[dict[str, str]]) -> LinearModels | None:
    """Return the models of all leaves; None where no tree has any."""
    if all(block.get("is_linear", "0") == "0" for block in blocks):
        return None
    models = LinearModels([], [], [])
    for block in blocks:
        if block.get("is_linear", "0") == "0":
            constants, counts = block["leaf_value"].split(), [0] * int(block["num_leaves"])
        else:
            constants, counts = block["leaf_const"].split(), list(map(int, block["num_features"].split()))
        features, coefficients = block.get("leaf_features", "").split(), block.get("leaf_coeff", "").split()
        ends = np.cumsum([0, *counts])
        models.constants.extend(map(float, constants))
        for start, end in pairwise(ends):
            models.features.append(list(map(int, features[start:end])))
            models.coefficients.append(list(map(float, coefficients[start:end])))
    return models


def _fields(section: str) -> dict[str, str]:
    """Parse lines ``key=value``; a word alone is a key."""
    return {key: value for key, _, value in (line.partition("=") for line in section.splitlines())}


def _categorical_features(parameters: str) -> tuple[int, ...]:
    listed = next((line for line in parameters.splitlines() if line.startswith("[categorical_feature:")), "[:]")
    return tuple(map(int, listed[listed.index(":") + 1 : -1].replace(",", " ").split()))


def _tree(block: dict[str, str], zero_is_missing: dict[int, bool]) -> Tree:
    """Make one tree; note in ``zero_is_missing`` which features' zeros are missing."""

    def numbers(key: str, dtype: npt.DTypeLike = np.int64) -> npt.NDArray[Any]:
        return np.array(block.get(key, "").split(), np.float64).astype(dtype)

    decision, feature, threshold = numbers("decision_type"), numbers("split_feature"), numbers("threshold", np.float64)
    is_categorical = decision & _CATEGORICAL > 0
    missing = decision >> 2 & 3
    for split in np.flatnonzero(~is_categorical):
        is_zero = bool(missing[split] == _MISSING_ZERO)
        if zero_is_missing.setdefault(int(feature[split]), is_zero) != is_zero:
            raise InvalidInputError(
                f"feature {feature[split]} of the LightGBM model has zeros that are missing in some splits only; "
                "train all iterations with the same zero_as_missing"
            )
    default_left = np.where(missing == _MISSING_NONE, threshold >= 0, decision & _DEFAULT_LEFT > 0)
    bounds, words = numbers("cat_boundaries"), numbers("cat_threshold")
    return Tree(
        feature=feature,
        threshold=threshold,
        left=numbers("left_child"),
        right=numbers("right_child"),
        missing_left=default_left & ~is_categorical,
        leaf_value=numbers("leaf_value", np.float64)[:, None],
        root=0 if len(feature) else ~0,
        left_categories={
            int(split): bitset_codes(words[bounds[index] : bounds[index + 1]])
            for split, index in zip(np.flatnonzero(is_categorical), threshold[is_categorical].astype(int), strict=True)
        },
    )


def _converted(module: OperatorModule, model: Model, booster: Any) -> Converted:
    """Return the converted module, with a look-up if the model was fitted on pandas categories.

    Their codes are what the trees compare.
    """
    lists = booster.pandas_categorical or []
    if not lists:
        return Converted(module)
    if len(lists) != len(model.categorical):
        raise InvalidInputError(
            f"the LightGBM model was fitted on {len(lists)} columns of pandas categories, of which it treats "
            f"{len(model.categorical)} as such, and does not keep which: give ordered categories as numbers, and "
            "leave categorical_feature at 'auto'"
        )
    num_features = model.ensemble.num_features
    categories = {
        column: np.array(values) if len(set(map(type, values))) == 1 else np.array(values, object)
        for column, values in zip(model.categorical, lists, strict=True)
    }
    return Converted(module, MixedLookup(categories, range(num_features)), num_codes=num_features)
