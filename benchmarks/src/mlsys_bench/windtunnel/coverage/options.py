"""Option sets of estimators, drawn from what each library itself says that a parameter takes.

scikit-learn and imbalanced-learn declare the values of every parameter (``_parameter_constraints``); for the boosters,
feature-engine and category_encoders the sets are listed. A set counts only if the source can be fitted with it.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from numbers import Integral, Real
from typing import Any

import numpy as np

from mlsys_bench.windtunnel.coverage.cases import Case

SETS = 5  # kept of each estimator
_DRAWS = 40  # tried, since many do not go together
_LEFT = {"random_state", "n_jobs", "verbose", "warm_start", "assume_finite", "max_cpu_time", "cache_size"}
_LEFT |= {"copy", "copy_X", "copy_x", "max_iter", "n_iter", "max_no_improvement", "eps", "tol", "store_cv_results"}
_WHOLE = (0, 1, 2, 3, 5, 12)
_REAL = (0.0, 1e-3, 0.1, 0.3, 0.5, 0.9, 1.0, 1.5, 2.0, 3.0, 10.0)
_SMALL = {"n_estimators": 4, "max_iter": 60, "n_init": 1, "n_alphas": 4, "n_splits": 2, "cv": 2, "Cs": 2}
_FEW = {"n_estimators": 4, "n_jobs": 1}
_LGBM: Mapping[str, Any] = _FEW | {"min_child_samples": 2, "verbose": -1}
_CAT: Mapping[str, Any] = {"iterations": 4, "verbose": False, "allow_writing_files": False, "thread_count": 1}
# Of libraries that do not declare what a parameter takes: (module, class, options of all sets, the sets).
_LISTED: tuple[tuple[str, str, Mapping[str, Any], tuple[Mapping[str, Any], ...]], ...] = (
    (
        "lightgbm",
        "LGBMClassifier",
        _LGBM,
        (
            {"boosting_type": "dart"},
            {"linear_tree": True},
            {"class_weight": "balanced", "max_depth": 2},
            {"extra_trees": True, "num_leaves": 4},
            {"boosting_type": "rf", "bagging_freq": 1, "bagging_fraction": 0.6},
        ),
    ),
    (
        "lightgbm",
        "LGBMRegressor",
        _LGBM,
        (
            {"objective": "poisson"},
            {"objective": "quantile", "alpha": 0.8},
            {"objective": "tweedie", "linear_tree": False},
            {"objective": "huber", "boosting_type": "dart"},
            {"reg_sqrt": True, "zero_as_missing": True},
        ),
    ),
    (
        "xgboost",
        "XGBClassifier",
        _FEW,
        (
            {"booster": "dart", "rate_drop": 0.3},
            {"booster": "gblinear"},
            {"grow_policy": "lossguide", "max_leaves": 4},
            {"num_parallel_tree": 2, "subsample": 0.7},
            {"objective": "multi:softmax", "max_delta_step": 1},
        ),
    ),
    (
        "xgboost",
        "XGBRegressor",
        _FEW,
        (
            {"objective": "count:poisson"},
            {"objective": "reg:quantileerror", "quantile_alpha": 0.7},
            {"objective": "reg:tweedie", "booster": "dart"},
            {"objective": "reg:absoluteerror", "tree_method": "exact"},
            {"base_score": 0.3, "missing": 0.2},
        ),
    ),
    (
        "catboost",
        "CatBoostClassifier",
        _CAT,
        (
            {"grow_policy": "Lossguide"},
            {"grow_policy": "Depthwise", "nan_mode": "Max"},
            {"loss_function": "MultiClassOneVsAll"},
            {"boosting_type": "Ordered", "auto_class_weights": "Balanced"},
            {"border_count": 8, "leaf_estimation_method": "Gradient"},
        ),
    ),
    (
        "catboost",
        "CatBoostRegressor",
        _CAT,
        (
            {"loss_function": "Poisson"},
            {"loss_function": "Quantile:alpha=0.8"},
            {"loss_function": "Tweedie:variance_power=1.5"},
            {"loss_function": "MAE", "grow_policy": "Lossguide"},
            {"loss_function": "RMSEWithUncertainty"},
        ),
    ),
    (
        "category_encoders",
        "OrdinalEncoder",
        {"cols": ["city", "kind"]},
        ({}, {"handle_unknown": "return_nan"}, {"handle_missing": "return_nan"}, {"drop_invariant": True}),
    ),
    ("category_encoders", "TargetEncoder", {}, ({}, {"smoothing": 3}, {"min_samples_leaf": 5}, {"cols": ["city"]})),
    ("category_encoders", "BinaryEncoder", {}, ({}, {"base": 2, "handle_unknown": "indicator"}, {"cols": ["kind"]})),
    ("category_encoders", "CountEncoder", {}, ({}, {"normalize": True}, {"min_group_size": 30}, {"cols": ["city"]})),
    ("category_encoders", "HashingEncoder", {"max_process": 1}, ({}, {"n_components": 4}, {"hash_method": "sha1"})),
    ("category_encoders", "WOEEncoder", {}, ({}, {"regularization": 2.0}, {"cols": ["kind"]})),
    ("feature_engine.imputation", "MeanMedianImputer", {}, ({}, {"imputation_method": "mean"}, {"variables": ["age"]})),
    ("feature_engine.imputation", "ArbitraryNumberImputer", {}, ({}, {"arbitrary_number": -1})),
    ("feature_engine.encoding", "RareLabelEncoder", {"n_categories": 1}, ({}, {"tol": 0.3}, {"max_n_categories": 2})),
    ("feature_engine.encoding", "OneHotEncoder", {}, ({}, {"drop_last": True}, {"top_categories": 2})),
    ("feature_engine.encoding", "MeanEncoder", {}, ({}, {"smoothing": 2.0}, {"unseen": "encode"})),
    ("feature_engine.outliers", "Winsorizer", {"variables": ["fare"]}, ({}, {"tail": "both"}, {"fold": 2.0})),
    ("feature_engine.discretisation", "EqualWidthDiscretiser", {"variables": ["fare"]}, ({}, {"bins": 4})),
    ("feature_engine.transformation", "LogTransformer", {"variables": ["fare"]}, ({}, {"base": "10"})),
)


def option_sets(kind: type, most: int = _DRAWS) -> Iterator[dict[str, Any]]:
    """Yield sets of one to three options of a class that declares its parameters, always the same ones.

    Args:
        kind: Class with ``_parameter_constraints``.
        most: Sets drawn; those that were drawn before are left out.
    """
    values = {name: found for name, each in _constraints(kind).items() if (found := _values(each))}
    names = sorted(set(values) - _LEFT)
    rng = np.random.default_rng(zlib.crc32(kind.__name__.encode()))
    seen: set[str] = set()
    for draw in range(most if names else 0):
        chosen = rng.permutation(len(names))[: 1 + draw % 3]
        chosen_values = {
            names[index]: values[names[index]][int(rng.integers(len(values[names[index]])))] for index in chosen
        }
        if (label := repr(sorted(chosen_values.items()))) not in seen:
            seen.add(label)
            yield chosen_values


def cases(*, sets: int = SETS, every: int = 1, first: int = 0) -> Iterator[Case]:
    """Yield fitted estimators: every class of each library that is installed with up to ``sets`` option sets.

    Args:
        sets: Option sets of a class.
        every: Take each ``every``-th class.
        first: Index of the first class taken.
    """
    for family, kind, base, drawn in islice(_classes(), first, None, every):
        suited: list[int] = []  # tables that a set of this class was fitted on: others are tried until there is one
        fitted = (_fitted(family, kind, {**base, **options}, options, suited) for options in drawn)
        yield from islice((case for case in fitted if case is not None), sets)


def _classes() -> Iterator[tuple[str, Any, Mapping[str, Any], Iterator[Mapping[str, Any]]]]:
    """Yield a family, a maker of estimators, the options of all sets, and the sets."""
    from sklearn.utils import all_estimators
    from sklearn.utils._test_common.instance_generator import _construct_instances

    found = [("scikit-learn", kind) for _, kind in all_estimators()]
    if importlib.util.find_spec("imblearn"):
        balanced = importlib.import_module("imblearn.ensemble")
        found += [("imbalanced-learn", getattr(balanced, name)) for name in sorted(balanced.__all__)]
    for family, kind in found:
        try:
            instance = next(iter(_construct_instances(kind)))
        except Exception:  # noqa: BLE001  a class that scikit-learn's own tests skip
            continue
        yield family, kind, _small(instance), option_sets(kind)
    for module, name, base, sets in _LISTED:
        if importlib.util.find_spec(module.partition(".")[0]):
            yield module.partition(".")[0], getattr(importlib.import_module(module), name), base, iter(sets)


def _small(instance: Any) -> dict[str, Any]:
    """Return an instance's own options, with fewer members and steps than the defaults where it has such options."""
    options: dict[str, Any] = dict(instance.get_params(deep=False))
    return options | {name: value for name, value in _SMALL.items() if isinstance(options.get(name), int)}


def _fitted(
    family: str, kind: Any, options: Mapping[str, Any], shown: Mapping[str, Any], suited: list[int]
) -> Case | None:
    """Return the estimator fitted on the first table that it takes and answers on; None where there is none."""
    from sklearn.base import clone

    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            made = kind(**options)
            if "random_state" in made.get_params(deep=False):
                made.set_params(random_state=0)
        except Exception:  # noqa: BLE001  third-party code
            return None
        for index, (x, y) in enumerate(_tables(family, made)):
            if suited and index not in suited and not _is_square(x):
                continue
            try:
                source = clone(made).fit(x, y)
                methods = [name for name in ("predict", "transform") if hasattr(source, name)]
                for method in methods:
                    getattr(source, method)(x)
            except Exception:  # noqa: BLE001  third-party code: the next table may suit it
                continue
            if methods:
                suited.append(index)
                label = ", ".join(f"{name}={value!r}" for name, value in sorted(shown.items()))
                return Case(f"options, {family}", f"{kind.__name__}({label})", source, x, y)
            return None
    return None


def _tables(family: str, estimator: Any) -> Sequence[tuple[Any, Any]]:
    """Return tables and targets on which an estimator may be fitted, best first."""
    from sklearn import datasets
    from sklearn.utils import get_tags

    from mlsys_bench.windtunnel.coverage.cases import mixed_table

    frame, stays, _ = mixed_table()
    if family in ("category_encoders", "feature_engine"):
        is_stay = (stays == "stay").astype(int)
        return [(frame.fillna({"age": 40.0}), is_stay), (frame, is_stay), (frame[["age", "fare"]], is_stay)]
    iris, flower = datasets.load_iris(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(iris))[:60]
    iris, flower = iris[order], flower[order]
    two = np.stack([flower > 0, flower > 1], axis=1).astype(int)
    words = [f"{city} {kind}" for city, kind in zip(frame.city[:60], frame.kind[:60], strict=True)]
    tables: list[tuple[Any, Any]] = [(iris, flower), (iris, (flower > 0).astype(int)), (iris, iris[:, :2])]
    tables += [(np.trunc(iris), flower), (iris[:, 0], flower), (iris, two), (iris[:24] @ iris[:24].T, flower[:24])]
    tables += [(words, flower), ([dict(enumerate(map(str, row))) for row in np.trunc(iris)], flower)]
    is_regressor = get_tags(estimator).estimator_type == "regressor"
    return [(iris, flower + 0.5), *tables] if is_regressor else tables


def _is_square(x: Any) -> bool:
    """Return whether a table may be one of distances or kernel values, which some options ask for."""
    return getattr(x, "ndim", 1) == 2 and x.shape[0] == x.shape[1]


def _constraints(kind: type) -> Mapping[str, Any]:
    found = getattr(kind, "_parameter_constraints", {})
    return found if isinstance(found, Mapping) else {}


def _values(constraints: Any) -> list[Any]:
    """Return some of the values that a parameter's constraints let through; no functions, arrays or estimators."""
    if not isinstance(constraints, list):
        return []
    found: list[Any] = []
    for each in constraints:
        kind = type(each).__name__
        if kind == "StrOptions":
            found += sorted(each.options - each.deprecated)
        elif kind == "Options":
            found += sorted((each.options - each.deprecated), key=repr)
        elif each is None or (kind == "str" and each == "boolean"):
            found += [None] if each is None else [False, True]
        elif kind == "Interval" and each.type in (Integral, Real):
            found += [value for value in (_WHOLE if each.type is Integral else _REAL) if value in each]
        elif kind == "Interval":
            found += [value for value in _REAL if value in each]
    return found
