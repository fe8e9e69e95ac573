"""CatBoost's models, read from their JSON form.

A split sends a number right if it is above a border, both in float32; or a category if it is the one named; or a row by
a statistic of the target over its categories ("CTR"), which is a number too. Trees are oblivious, all splits of a level
alike, unless another ``grow_policy`` was asked for; here all become plain trees.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
from mlsys_windtunnel.convert.linear import class_labels
from mlsys_windtunnel.convert.registry import Converted, Unsupported
from mlsys_windtunnel.modules.base import PredictorModule, Regressor
from mlsys_windtunnel.modules.tree.ensemble import Tree, join_trees
from mlsys_windtunnel.modules.tree.heads import Mapped
from mlsys_windtunnel.modules.tree.trees import Trees

from mlsys_windtunnel_catboost.convert.heads import CatBoostClasses, CatBoostLabels, MeanAndVariance
from mlsys_windtunnel_catboost.convert.lookup import CatBoostLookup, Combination, Statistic

_MOST_SPLITS = 1 << 22  # an oblivious tree of depth d becomes 2**d - 1 splits
_NO_KEY = (1 << 64) - 1  # of an empty slot in a table of statistics
_EXPONENTIAL = ("Poisson", "Tweedie")
_RANKING = ("YetiRank", "PairLogit", "StochasticRank", "LambdaMart", "QueryRMSE", "QuerySoftMax", "QueryCrossEntropy")
_CLASSES = ("CrossEntropy", "Focal", "Logloss", "MultiClass", "MultiClassOneVsAll")
_LABELS = ("MultiLogloss", "MultiCrossEntropy")
_PROBABILISTIC = ("predict", "predict_proba", "predict_log_proba")


@dataclass(frozen=True, slots=True)
class _Condition:
    """Condition that sends a row right: a value above a border, or a code."""

    column: int  # of what the trees read
    border: float = 0.0
    code: int | None = None
    missing_left: bool = True


class _UnknownPartError(Exception):
    """The model has a part that is not known here; the message names it."""


def catboost_classifier(estimator: Any) -> Converted | Unsupported:
    """Convert a classifier of two classes or more, or of several labels."""
    try:
        model = _Model(estimator)
        trees = model.trees()
    except _UnknownPartError as unknown:
        return Unsupported(str(unknown))
    if model.loss in _LABELS:
        return model.converted(CatBoostLabels(trees))
    if model.loss not in _CLASSES:
        return Unsupported(
            f"the loss {model.loss}; fit it with Logloss, CrossEntropy, MultiClass or MultiClassOneVsAll"
        )
    head = CatBoostClasses(
        trees,
        classes=class_labels(np.asarray(estimator.classes_)),
        link="softmax" if model.loss == "MultiClass" else "logistic",
        answers=_PROBABILISTIC,
        is_normalised=model.loss != "MultiClassOneVsAll",
    )
    head.cut = model.cut
    return model.converted(head)


def catboost_regressor(estimator: Any) -> Converted | Unsupported:
    """Convert a regressor of one value or several; exponential for counts, and a variance beside the mean if fitted."""
    try:
        model = _Model(estimator)
        trees = model.trees()
    except _UnknownPartError as unknown:
        return Unsupported(str(unknown))
    if model.loss == "RMSEWithUncertainty":
        return model.converted(Regressor(MeanAndVariance(trees)))
    return model.converted(Regressor(Mapped(trees, "exp" if model.loss in _EXPONENTIAL else "identity")))


def catboost_values(estimator: Any) -> Converted | Unsupported:
    """Convert raw values: rankers, and the class that all others extend."""
    try:
        model = _Model(estimator)
        return model.converted(Regressor(model.trees(), ranks=model.loss.startswith(_RANKING)))
    except _UnknownPartError as unknown:
        return Unsupported(str(unknown))


class _Model:
    """A model's JSON, read.

    Raises:
        _UnknownPartError: it has features of text or embeddings, or a statistic of an unknown kind.
    """

    def __init__(self, estimator: Any) -> None:
        if estimator.get_text_feature_indices() or estimator.get_embedding_feature_indices():
            options = {
                "text_features": estimator.get_text_feature_indices(),
                "embedding_features": estimator.get_embedding_feature_indices(),
            }
            named = ", ".join(f"{name}={columns}" for name, columns in options.items() if columns)
            raise _UnknownPartError(  # CatBoost writes no JSON of such models
                f"features of text or embeddings ({named}), of which CatBoost writes only its own format; encode "
                "them in a step before it, as TfidfVectorizer does, and fit it on the numbers"
            )
        content = _content(estimator)
        info, features = content["model_info"], content["features_info"]
        self.loss = str(info.get("params", {}).get("loss_function", {}).get("type", ""))
        threshold = float(info.get("binclass_probability_threshold", 0.5))
        self.cut = -math.inf if threshold <= 0 else math.inf if threshold >= 1 else -math.log(1 / threshold - 1)
        self._content = content
        self._num_features = int(estimator.n_features_in_)
        self._numbers = {each["feature_index"]: each for each in features["float_features"]}
        self._categories = {each["feature_index"]: each for each in features.get("categorical_features", [])}
        self._lookup = self._made_lookup(features, estimator) if self._categories else None
        self._ctr_borders = [
            (index, border) for index, ctr in enumerate(features.get("ctrs", [])) for border in ctr["borders"]
        ]
        self._first_ctr = sum(len(each["borders"]) for each in features["float_features"])
        self._first_ctr += sum(len(each.get("values", [])) for each in self._categories.values())

    def trees(self) -> Trees:
        """Return the trees: sums of leaves on top of the value that all rows start from."""
        scale, bias = self._content["scale_and_bias"]
        oblivious = self._content.get("oblivious_trees") or ()
        if sum(1 << len(tree["splits"] or ()) for tree in oblivious) > _MOST_SPLITS:
            raise _UnknownPartError(f"more than {_MOST_SPLITS:,} leaves")
        trees = [self._oblivious(tree, len(bias), scale) for tree in oblivious]
        trees += [self._free(tree, scale) for tree in self._content.get("trees", ())]
        num_features = self._num_features if self._lookup is None else self._lookup.width
        return Trees(join_trees(trees, num_features=num_features, rounds_to_float32=True), bias=bias)

    def converted(self, module: PredictorModule) -> Converted:
        """Return the converted module, with the look-up of categories if there are any."""
        if self._lookup is None:
            return Converted(module)
        return Converted(module, self._lookup, num_codes=self._lookup.width)

    def _oblivious(self, tree: Any, num_outputs: int, scale: float) -> Tree:
        """Make an oblivious tree: splits level by level; bit i of a leaf's index is the answer of split i."""
        levels = [self._condition(split) for split in tree["splits"] or ()]  # null for a tree of one leaf
        depth = len(levels)
        conditions = [condition for level, condition in enumerate(levels) for _ in range(1 << level)]
        answers = [np.arange(1 << level) for level in range(depth)]  # of the splits above, for each split of a level
        left = [_child(level, depth, above) for level, above in enumerate(answers)]
        right = [_child(level, depth, above + (1 << level)) for level, above in enumerate(answers)]
        values = np.array(tree["leaf_values"], np.float64).reshape(1 << depth, num_outputs) * scale
        empty = np.zeros(0, int)
        return _tree(conditions, np.concatenate([empty, *left]), np.concatenate([empty, *right]), values)

    def _free(self, tree: Any, scale: float) -> Tree:
        """Make a tree of nodes in any order; the root is the first split."""
        conditions: list[_Condition] = []
        children: list[list[int]] = []
        values: list[Any] = []
        pending: list[tuple[Any, list[int], int]] = [(tree, [0], 0)]  # nodes, and where their indices are written
        while pending:
            node, parent, side = pending.pop()
            index = parent[side] = len(conditions) if "split" in node else ~len(values)
            if index < 0:
                values.append(np.atleast_1d(np.asarray(node["value"], np.float64)) * scale)
                continue
            conditions.append(self._condition(node["split"]))
            children.append([0, 0])
            pending += [(node["right"], children[-1], 1), (node["left"], children[-1], 0)]
        left, right = np.array(children, int).reshape(-1, 2).T
        return _tree(conditions, left, right, np.stack(values))

    def _condition(self, split: Any) -> _Condition:
        kind = split["split_type"]
        if kind == "FloatFeature":
            feature = self._numbers[split["float_feature_index"]]
            column = feature["flat_feature_index"]
            if self._lookup is not None:
                column = self._lookup.numeric.index(column)
            return _Condition(column, split["border"], missing_left=not _missing_is_above(feature))
        if kind == "OneHotFeature":
            assert self._lookup is not None
            column = self._categories[split["cat_feature_index"]]["flat_feature_index"]
            index = next(index for index, (coded, _) in enumerate(self._lookup.coded) if coded == column)
            code = self._lookup.coded[index][1].index(split["value"])
            return _Condition(len(self._lookup.numeric) + index, code=code, missing_left=False)
        if kind != "OnlineCtr":
            raise _UnknownPartError(f"splits of the kind {kind}")
        assert self._lookup is not None
        index, border = self._ctr_borders[split["split_index"] - self._first_ctr]
        if border != split["border"]:
            raise _UnknownPartError("splits whose order is not known")
        return _Condition(len(self._lookup.numeric) + len(self._lookup.coded) + index, border)

    def _made_lookup(self, features: Any, estimator: Any) -> CatBoostLookup:
        data = self._content.get("ctr_data", {})
        return CatBoostLookup(
            numeric=tuple(each["flat_feature_index"] for each in self._numbers.values() if each["borders"]),
            coded=tuple(
                (each["flat_feature_index"], tuple(each["values"]))
                for each in self._categories.values()
                if each.get("values")
            ),
            statistics=tuple(
                _statistic(ctr, data[ctr["identifier"]], self._combination(ctr)) for ctr in features.get("ctrs", [])
            ),
            names=tuple(map(str, estimator.feature_names_)),
        )

    def _combination(self, ctr: Any) -> Combination:
        def elements(kind: str) -> Iterator[Any]:
            return (each for each in ctr["elements"] if each["combination_element"] == kind)

        def column(element: Any) -> int:
            return int(self._categories[element["cat_feature_index"]]["flat_feature_index"])

        numbers = [(self._numbers[each["float_feature_index"]], each["border"]) for each in elements("float_feature")]
        return Combination(
            categories=tuple(column(each) for each in elements("cat_feature_value")),
            borders=tuple((each["flat_feature_index"], border, _missing_is_above(each)) for each, border in numbers),
            matches=tuple((column(each), int(each["value"])) for each in elements("cat_feature_exact_value")),
        )


def _content(estimator: Any) -> Any:
    """Return the model's JSON, which CatBoost writes to files only."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "model.json"
        estimator.save_model(str(file), format="json")
        return json.loads(file.read_text(encoding="utf-8"))


def _missing_is_above(feature: Any) -> bool:
    return bool(feature["nan_value_treatment"] == "AsTrue")


def _child(level: int, depth: int, answers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the nodes that the answers down to ``level`` lead to: splits of the next level, or leaves."""
    return ~answers if level + 1 == depth else (1 << level + 1) - 1 + answers


def _tree(
    conditions: list[_Condition],
    left: npt.NDArray[np.int64],
    right: npt.NDArray[np.int64],
    leaf_value: npt.NDArray[np.float64],
) -> Tree:
    """Make a tree; a row that a code sends right is sent left here, as sets of categories are."""
    codes = {split: np.array([each.code]) for split, each in enumerate(conditions) if each.code is not None}
    swapped = np.isin(np.arange(len(conditions)), list(codes))
    return Tree(
        feature=np.array([each.column for each in conditions], np.int64),
        threshold=np.array([each.border for each in conditions], np.float32).astype(np.float64),
        left=np.where(swapped, right, left).astype(np.int64),
        right=np.where(swapped, left, right).astype(np.int64),
        missing_left=np.array([each.missing_left for each in conditions], bool),
        leaf_value=leaf_value,
        root=0 if conditions else ~0,
        left_categories=codes,
    )


def _statistic(ctr: Any, data: Any, combination: Combination) -> Statistic:
    """Make a table of float32 values as CatBoost computes them: shares of counts with a prior, moved and scaled."""
    rows = np.array(data["hash_map"], object).reshape(-1, data["hash_stride"])
    rows = rows[[int(key) != _NO_KEY for key in rows[:, 0]]]
    keys = np.array([int(key) for key in rows[:, 0]], np.uint64)
    order = np.argsort(keys, kind="stable")
    counts = rows[order, 1:].astype(np.float64)
    kind, border = ctr["ctr_type"], ctr["target_border_idx"]
    of_none = (0.0, 0.0)
    if kind == "Borders":
        part, whole = counts[:, border + 1 :].sum(axis=1), counts.sum(axis=1)
    elif kind == "Buckets":
        part, whole = counts[:, border], counts.sum(axis=1)
    elif kind in ("BinarizedTargetMeanValue", "FloatTargetMeanValue"):
        part, whole = counts[:, 0], counts[:, 1]
    elif kind in ("Counter", "FeatureFreq"):
        part, whole = counts[:, 0], np.full(len(counts), data["counter_denominator"])
        of_none = (0.0, data["counter_denominator"])
    else:
        raise _UnknownPartError(f"statistics of the kind {kind}")
    part, whole = (np.append(each, none).astype(np.float32) for each, none in zip((part, whole), of_none, strict=True))
    prior, weight = np.float32(ctr["prior_numerator"]), np.float32(ctr["prior_denomerator"])  # CatBoost's spelling
    values = ((part + prior) / (whole + weight) + np.float32(ctr["shift"])) * np.float32(ctr["scale"])
    return Statistic(combination, keys[order], values.astype(np.float64))
