"""XGBoost's models, read from their JSON form.

A tree compares float32 by ``<`` and sends missing values where its split says. The split of a category names those that
go right. XGBoost sums in float32, so its own answers round at about 1e-7 of the largest partial sum.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from mlsys_core.errors import InvalidInputError

from mlsys_windtunnel.convert.linear import class_labels
from mlsys_windtunnel.convert.registry import Converted, Converters, Unsupported
from mlsys_windtunnel.convert.trees_lookup import KnownLookup
from mlsys_windtunnel.modules.base import OperatorModule, PredictorModule, Regressor
from mlsys_windtunnel.modules.tree.ensemble import Tree, join_trees
from mlsys_windtunnel.modules.tree.heads import LinearBooster, Mapped, MarkedMissing, Output, TreeClassifier
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
    "survival:aft": "exp",
    "survival:cox": "exp",
    "rank:map": "identity",
    "rank:ndcg": "identity",
    "rank:pairwise": "identity",
}


# The same for boosters, whose answers are the objective's own.
_OF_BOOSTERS: dict[str, Output] = {
    **_OUTPUTS,
    "binary:hinge": "positive",
    "binary:logitraw": "identity",
    "multi:softmax": "likeliest",
    "multi:softprob": "softmax",
}
# The link by which ``base_score``, a prediction, becomes a margin.
_LINKS: dict[str, Output] = {**_OUTPUTS, "binary:hinge": "identity", "binary:logitraw": "identity"}


@CONVERTERS.of("xgboost.sklearn", "XGBRanker", "XGBRFRegressor", "XGBRegressor")
def xgb_regressor(estimator: Any) -> Converted | Unsupported:
    """Convert regressors and rankers, of one or several targets."""
    return _values(estimator, _OUTPUTS)


@CONVERTERS.of("xgboost.core", "Booster")
def xgboost_booster(estimator: Any) -> Converted | Unsupported:
    """Convert a booster of its library's own: it answers what its objective makes of margins, by all of its trees."""
    return _values(estimator, _OF_BOOSTERS)


@CONVERTERS.of("xgboost.sklearn", "XGBClassifier", "XGBRFClassifier")
def xgb_classifier(estimator: Any) -> Converted | Unsupported:
    """Convert the objectives binary:logistic, multi:softmax and multi:softprob; decline several targets."""
    model = _read(estimator)
    objective = _objective(model)
    if objective not in ("binary:logistic", "multi:softmax", "multi:softprob"):
        return Unsupported(
            f"objective={objective!r} of a classifier; fit it with binary:logistic, multi:softmax or multi:softprob"
        )
    if int(model["learner_model_param"].get("num_target", 1)) > 1:
        return Unsupported("a classifier of several labels at once; fit MultiOutputClassifier(XGBClassifier(...))")
    output: Output = "logistic" if objective == "binary:logistic" else "identity"
    body = _body(model, estimator, output)
    if isinstance(body, Unsupported):
        return body
    head = TreeClassifier(
        body,
        classes=class_labels(np.asarray(estimator.classes_)),
        link="logistic" if output == "logistic" else "softmax",
        answers=("predict", "predict_proba"),
        decides="likeliest",
    )
    return _converted(head, model)


def _values(estimator: Any, outputs: Mapping[str, Output]) -> Converted | Unsupported:
    """Convert what answers values: margins by the objective's link."""
    model = _read(estimator)
    objective = _objective(model)
    output = outputs.get(objective)
    if output is None:
        return Unsupported(f"objective={objective!r}; it knows {', '.join(sorted(outputs))}")
    body = _body(model, estimator, _LINKS.get(objective, "identity"))
    if isinstance(body, Unsupported):
        return body
    return _converted(Regressor(Mapped(body, output), ranks=objective.startswith("rank:")), model)


def _read(estimator: Any) -> Any:
    return json.loads(estimator.get_booster().save_raw("json"))["learner"]


def _objective(model: Any) -> str:
    return str(model["objective"]["name"])


def _body(model: Any, estimator: Any, link: Output) -> OperatorModule | Unsupported:
    """Return a module of the margins, ``[rows, groups]``."""
    is_booster = not hasattr(estimator, "missing")  # its answers take all trees, an estimator's those up to the best
    booster, marker = model["gradient_booster"], getattr(estimator, "missing", math.nan)
    body: OperatorModule = _linear(model, link) if booster["name"] == "gblinear" else _trees(model, link, is_booster)
    if isinstance(marker, float | int) and math.isnan(marker):
        return body
    if _kept_categories(model):
        return Unsupported(f"missing={marker!r} beside categories; put NaN in its place before the fit")
    return MarkedMissing(body, float(marker))


def _linear(model: Any, link: Output) -> LinearBooster:
    parameters = model["learner_model_param"]
    weights = np.array(model["gradient_booster"]["model"]["weights"], np.float32).astype(np.float64)
    table = weights.reshape(int(parameters["num_feature"]) + 1, -1)  # the last row is the bias
    margin = np.ravel(_margin(json.loads(parameters["base_score"]), link))[0]  # XGBoost 3 adds the first to all groups
    return LinearBooster(table[:-1].T, table[-1] + margin)


def _trees(model: Any, link: Output, is_booster: bool) -> Trees:
    """Return the trees of margins, of one value a leaf or of all targets'."""
    booster = model["gradient_booster"]
    weights: list[float] = booster.get("weight_drop", [])  # of dart
    content = booster.get("gbtree", booster)["model"]
    parameters = model["learner_model_param"]
    num_groups = max(1, int(parameters["num_class"]), int(parameters.get("num_target", 1)))
    used = len(content["trees"])
    best = None if is_booster else model["attributes"].get("best_iteration")
    if best is not None:  # early stopping: the later ones are not asked
        used = content["iteration_indptr"][int(best) + 1]
    trees = [_tree(content["trees"][index], weights[index] if weights else 1.0) for index in range(used)]
    bias = np.broadcast_to(_margin(json.loads(parameters["base_score"]), link), num_groups)
    num_features = int(parameters["num_feature"])
    if trees and trees[0].leaf_value.shape[1] == num_groups:  # of several targets: multi_strategy="multi_output_tree"
        return Trees(join_trees(trees, num_features=num_features, rounds_to_float32=True), bias=bias)
    groups: list[list[Tree]] = [[] for _ in range(num_groups)]
    for tree, group in zip(trees, content["tree_info"], strict=False):
        groups[group].append(tree)
    in_turn = [tree for round_ in zip(*groups, strict=True) for tree in round_]
    ensemble = join_trees(in_turn, num_features=num_features, rounds_to_float32=True)
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
    values = floats("split_conditions")
    width = int(tree["tree_param"]["size_leaf_vector"])
    if width > 1:  # leaves are numbered by their right children
        values = np.zeros((len(left), width))
        values[left == -1] = floats("leaf_weights").reshape(-1, width)[right[left == -1]]
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
        value=values * weight,
        left_categories=categories,
    )


def _kept_categories(model: Any) -> dict[int, npt.NDArray[Any]]:
    """Return the categories that a model keeps by column, as it does of data frames."""
    booster = model["gradient_booster"]
    content = booster.get("gbtree", booster)["model"]
    return {
        column: values
        for column, kept in enumerate(content.get("cats", {}).get("enc", []))
        if len(values := _categories(kept))
    }


def _converted(module: PredictorModule, model: Any) -> Converted:
    """Return the converted module, with a look-up if the model keeps categories."""
    categories = _kept_categories(model)
    if not categories:
        return Converted(module)
    num_features = int(model["learner_model_param"]["num_feature"])
    return Converted(module, KnownLookup(categories, range(num_features)), num_codes=num_features)


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
