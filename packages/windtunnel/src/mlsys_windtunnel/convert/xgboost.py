"""XGBoost's models, read from their JSON form.

A tree compares float32 by ``<`` and sends missing values where its split says. The split of a category names those that
go right. XGBoost sums in float32, so its own answers round at about 1e-7 of the largest partial sum.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from mlsys_core.errors import InvalidInputError

from mlsys_windtunnel.convert.linear import class_labels
from mlsys_windtunnel.convert.registry import Converted, Converters
from mlsys_windtunnel.convert.trees_lookup import MixedLookup
from mlsys_windtunnel.modules.base import PredictorModule, Regressor
from mlsys_windtunnel.modules.tree.ensemble import Tree, join_trees
from mlsys_windtunnel.modules.tree.heads import Mapped, Output, TreeClassifier
from mlsys_windtunnel.modules.tree.trees import Trees

CONVERTERS = Converters()

# What a prediction is of the margin, by objective; others are declined.
_OUTPUTS: dict[str, Output] = {
    "binary:logistic": "logistic",
    "reg:logistic": "logistic",
    "count:poisson": "exp",
    "reg:gamma": "exp",
    "reg:tweedie": "exp",
    "reg:absoluteerror": "identity",
    "reg:pseudohubererror": "identity",
    "reg:quantileerror": "identity",
    "reg:squarederror": "identity",
    "reg:squaredlogerror": "identity",
    "rank:map": "identity",
    "rank:ndcg": "identity",
    "rank:pairwise": "identity",
}


@CONVERTERS.of("xgboost.sklearn", "XGBRanker", "XGBRFRegressor", "XGBRegressor")
def xgb_regressor(estimator: Any) -> Converted | None:
    """Convert regressors and rankers, of one or several targets in trees of their own."""
    model = _read(estimator)
    output = _OUTPUTS.get(_objective(model))
    trees = None if output is None else _trees(model, output)
    if trees is None or output is None or not _misses_nan_only(estimator):
        return None
    return _converted(Regressor(Mapped(trees, output)), model)


@CONVERTERS.of("xgboost.sklearn", "XGBClassifier", "XGBRFClassifier")
def xgb_classifier(estimator: Any) -> Converted | None:
    """Convert the objectives binary:logistic, multi:softmax and multi:softprob; decline several targets."""
    model = _read(estimator)
    objective = _objective(model)
    output: Output = "logistic" if objective == "binary:logistic" else "identity"
    trees = _trees(model, output) if objective in ("binary:logistic", "multi:softmax", "multi:softprob") else None
    if trees is None or not _misses_nan_only(estimator) or int(model["learner_model_param"].get("num_target", 1)) > 1:
        return None
    head = TreeClassifier(
        trees,
        classes=class_labels(np.asarray(estimator.classes_)),
        link="logistic" if output == "logistic" else "softmax",
        answers=("predict", "predict_proba"),
        decides="likeliest",
    )
    return _converted(head, model)


def _read(estimator: Any) -> Any:
    return json.loads(estimator.get_booster().save_raw("json"))["learner"]


def _objective(model: Any) -> str:
    return str(model["objective"]["name"])


def _misses_nan_only(estimator: Any) -> bool:
    return isinstance(estimator.missing, float) and math.isnan(estimator.missing)


def _trees(model: Any, output: Output) -> Trees | None:
    """Return the trees of margins; None for a linear booster and for trees with several values a leaf."""
    booster = model["gradient_booster"]
    weights: list[float] = booster.get("weight_drop", [])  # of dart
    content = booster.get("gbtree", booster).get("model")
    if (
        not content
        or "trees" not in content
        or any(tree["tree_param"]["size_leaf_vector"] not in ("0", "1") for tree in content["trees"])
    ):
        return None
    parameters = model["learner_model_param"]
    num_groups = max(1, int(parameters["num_class"]), int(parameters.get("num_target", 1)))
    used = len(content["trees"])
    if (best := model["attributes"].get("best_iteration")) is not None:  # early stopping: the later ones are not asked
        used = content["iteration_indptr"][int(best) + 1]
    groups: list[list[Tree]] = [[] for _ in range(num_groups)]
    for index, group in enumerate(content["tree_info"][:used]):
        groups[group].append(_tree(content["trees"][index], weights[index] if weights else 1.0))
    in_turn = [tree for round_ in zip(*groups, strict=True) for tree in round_]
    ensemble = join_trees(in_turn, num_features=int(parameters["num_feature"]), rounds_to_float32=True)
    bias = np.broadcast_to(_margin(json.loads(parameters["base_score"]), output), num_groups)
    return Trees(ensemble, bias=bias, num_groups=num_groups)


def _margin(base_score: float | Sequence[float], output: Output) -> npt.NDArray[np.float64]:
    """Return the margin that all rows start from; the source keeps it as a prediction."""
    prediction = np.asarray(base_score, np.float32).astype(np.float64)
    if output == "logistic":
        margin: npt.NDArray[np.float64] = -np.log(1 / prediction - 1)
        return margin
    return np.log(prediction) if output == "exp" else prediction


def _tree(tree: Any, weight: float) -> Tree:
    def floats(key: str) -> npt.NDArray[np.float64]:
        return np.array(tree[key], np.float32).astype(np.float64)  # what is written in decimals is a float32

    left, right = np.array(tree["left_children"]), np.array(tree["right_children"])
    missing_left = np.array(tree["default_left"], bool)
    categories = {
        int(node): np.array(tree["categories"][start : start + size], np.int64)
        for node, start, size in zip(
            tree["categories_nodes"], tree["categories_segments"], tree["categories_sizes"], strict=True
        )
    }
    swapped = np.isin(
        np.arange(len(left)), list(categories)
    )  # a set holds what goes right; here it holds what goes left
    left, right = np.where(swapped, right, left), np.where(swapped, left, right)
    return Tree.of_nodes(
        is_leaf=left == -1,
        feature=tree["split_indices"],
        threshold=np.nextafter(floats("split_conditions").astype(np.float32), np.float32(-np.inf)),  # "<" as "<="
        left=left,
        right=right,
        missing_left=missing_left ^ swapped,
        value=floats("split_conditions") * weight,
        left_categories=categories,
    )


def _converted(module: PredictorModule, model: Any) -> Converted:
    """Return the converted module, with a look-up if the model keeps categories, as it does of data frames."""
    model_trees = model["gradient_booster"].get("gbtree", model["gradient_booster"])["model"]
    categories = {
        column: values
        for column, kept in enumerate(model_trees.get("cats", {}).get("enc", []))
        if len(values := _categories(kept))
    }
    if not categories:
        return Converted(module)
    num_features = int(model["learner_model_param"]["num_feature"])
    return Converted(module, MixedLookup(categories, range(num_features)), num_codes=num_features)


def _categories(kept: Any) -> npt.NDArray[Any]:
    """Return categories: numbers, or text kept as bytes with offsets."""
    if "offsets" not in kept:
        return np.array(kept["values"])
    data = np.array(kept["values"], np.int64).astype(np.uint8).tobytes()
    if not data.isascii():  # offsets count characters and cut bytes, as of XGBoost 3.2
        raise InvalidInputError(
            "the XGBoost model has categories of text beyond ASCII, which it does not keep whole; "
            "give categories as numbers or ASCII text"
        )
    bounds = zip(kept["offsets"], kept["offsets"][1:], strict=False)
    return np.array([data[start:end].decode() for start, end in bounds], object)
