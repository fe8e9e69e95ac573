"""Members of a meta-estimator: what it asks of them, and what it answers in turn.

Read by :mod:`mlsys_windtunnel.parse.expand`, which makes operators of the members, and by
:mod:`mlsys_windtunnel.convert.combine`, which makes one module of their answers: both see the same composition. A
meta-estimator (or an option of one) that is not known here has no composition, and stays one operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mlsys_windtunnel.parse.functions import why_not_undone
from mlsys_windtunnel.parse.graph import METHODS, FittedSize
from mlsys_windtunnel.parse.names import known_name

ANSWERS = ("predict", "predict_proba", "decision_function")


@dataclass(frozen=True, slots=True)
class Member:
    """A fitted estimator within a meta-estimator."""

    name: str  # where it stands in the meta-estimator
    estimator: Any
    methods: tuple[str, ...]  # the answers that are asked of it, in the order of METHODS
    columns: tuple[int, ...] | None = None  # what it reads of the meta-estimator's input; None: all


@dataclass(frozen=True, slots=True)
class Composition:
    """A meta-estimator as members and a join of their answers."""

    members: tuple[Member, ...]
    answers: tuple[str, ...]  # methods of the meta-estimator that the join gives
    size: FittedSize = field(default_factory=FittedSize)  # of the join alone
    drops_names: bool = False  # the members are given an array, whatever the meta-estimator is given
    stacked: tuple[Member, ...] = ()  # their answers, one each, are what the only member reads
    passes: frozenset[str] = frozenset()  # answers that are the only member's own
    transforms: bool = False  # the members' answers side by side are what its ``transform`` gives
    is_deep: bool = False  # or rather one behind another, ``[members, rows, k]``
    is_chain: bool = False  # each member reads the answers of those before it too


def composition_of(estimator: Any) -> Composition | None:
    """Return the composition of a fitted meta-estimator; None if it is none, or an option is not covered."""
    rule = _RULES.get(known_name(type(estimator)))
    return None if rule is None else rule(estimator)


def within(estimator: Any) -> Any | None:
    """Return the fitted estimator that another hands all it is asked to; None if it is none of that kind."""
    best = vars(estimator).get("best_estimator_")  # a parameter search predicts with its best
    if best is not None:
        return best
    attribute = _WRAPPERS.get(known_name(type(estimator)))
    return None if attribute is None else vars(estimator).get(attribute)


def outermost(estimator: Any) -> Any:
    """Return the estimator that the input of a pipeline or a search reaches as it is."""
    from sklearn.pipeline import Pipeline

    if isinstance(estimator, Pipeline):
        first = next((step for _, step in estimator.steps if not passes(step)), None)
        return estimator if first is None else outermost(first)
    inner = within(estimator)
    return estimator if inner is None else outermost(inner)


def passes(step: Any) -> bool:
    """Return whether a step hands on what it is given, and looks at nothing; samplers do nothing but in a fit."""
    if step is None or isinstance(step, str) or hasattr(step, "fit_resample"):
        return True
    return is_function(step) and step.func is None


def is_function(estimator: Any) -> bool:
    """Return whether a function that looks at nothing before it computes."""
    return known_name(type(estimator)) == "sklearn.preprocessing.FunctionTransformer" and not estimator.validate


def as_fitted(estimator: Any) -> Any:
    """Return what tells whether an estimator is fitted: itself, or the estimator within a fixed threshold."""
    is_fixed = known_name(type(estimator)) == "sklearn.model_selection.FixedThresholdClassifier"
    return estimator.estimator if is_fixed and "estimator_" not in vars(estimator) else estimator


def ordered(methods: Iterable[str]) -> tuple[str, ...]:
    """Return the methods without repetition, in the order of METHODS."""
    wanted = set(methods)
    return tuple(method for method in METHODS if method in wanted)


def offered(estimator: Any, methods: Sequence[str] = ANSWERS) -> tuple[str, ...]:
    """Return those of the methods that a fitted estimator has."""
    return tuple(method for method in methods if hasattr(estimator, method))


def labels_of(estimator: Any) -> Any:
    """Return ``classes_`` of a classifier of one output, else None."""
    classes = getattr(estimator, "classes_", None)
    return classes if isinstance(classes, np.ndarray) and classes.ndim == 1 else None


def has_one_output(estimator: Any) -> bool:
    """Return whether a predictor's ``predict`` gives one value for each row, as far as it tells."""
    if isinstance(getattr(estimator, "classes_", None), list) or getattr(estimator, "multilabel_", False):
        return False
    return not hasattr(estimator, "classes_") or labels_of(estimator) is not None


def labels_are_indices(estimator: Any) -> bool:
    """Return whether a classifier's labels are 0, 1, 2 and so on: their own indices in ``classes_``."""
    classes = labels_of(estimator)
    return classes is not None and classes.dtype.kind in "iuf" and bool((classes == np.arange(len(classes))).all())


def is_tree(estimator: Any) -> bool:
    """Return whether this is one of scikit-learn's trees: ensembles of these alone have a tensor form of their own."""
    return known_name(type(estimator)).startswith("sklearn.tree.") and hasattr(estimator, "tree_")


def is_constant(estimator: Any) -> bool:
    """Return whether this is the stand-in that one-vs-rest and its kin fit where only one class was seen."""
    return known_name(type(estimator)) == "sklearn.multiclass._ConstantPredictor"


def score_method(estimator: Any) -> str:
    """Return what one-vs-rest and its kin compare: decision values, else probabilities; a regressor's own values."""
    from sklearn.base import is_regressor

    if is_regressor(estimator):
        return "predict"
    return "decision_function" if hasattr(estimator, "decision_function") else "predict_proba"


def _numbered(estimators: Iterable[Any], methods: Callable[[Any], Iterable[str]]) -> tuple[Member, ...]:
    return tuple(
        Member(str(number), estimator, ordered(methods(estimator))) for number, estimator in enumerate(estimators)
    )


def _alike(estimators: Iterable[Any], methods: Iterable[str]) -> tuple[Member, ...]:
    wanted = ordered(methods)
    return tuple(Member(str(number), estimator, wanted) for number, estimator in enumerate(estimators))


def _named(estimator: Any) -> list[tuple[str, Any]]:
    """Return members of voting and stacking that were not dropped."""
    names = [name for name, part in estimator.estimators if not isinstance(part, str) or part != "drop"]
    return list(zip(names, estimator.estimators_, strict=True))


def _voting_classifier(estimator: Any) -> Composition | None:
    members = _named(estimator)
    if estimator.voting == "hard":  # votes are for labels, which members that were fitted before may have of their own
        if not all(labels_are_indices(part) for _, part in members):
            return None
        voters = tuple(Member(name, part, ("predict",)) for name, part in members)
        return Composition(voters, ("predict",), transforms=True)
    classes = [labels_of(part) for _, part in members]
    if any(labels is None or len(labels) != len(estimator.classes_) for labels in classes):
        return None
    return Composition(
        tuple(Member(name, part, ("predict_proba",)) for name, part in members),
        ("predict", "predict_proba"),
        transforms=True,
        is_deep=not estimator.flatten_transform,
    )


def _voting_regressor(estimator: Any) -> Composition:
    members = tuple(Member(name, part, ("predict",)) for name, part in _named(estimator))
    return Composition(members, ("predict",), transforms=True)


def _calibrated(estimator: Any) -> Composition | None:
    from mlsys_windtunnel.parse.fitted_size import fitted_size

    pairs = estimator.calibrated_classifiers_
    if any(labels_of(pair.estimator) is None for pair in pairs):
        return None
    members = tuple(
        Member(f"fold{number}", pair.estimator, (score_method(pair.estimator),)) for number, pair in enumerate(pairs)
    )
    size = sum((fitted_size(calibrator) for pair in pairs for calibrator in pair.calibrators), FittedSize())
    return Composition(members, ("predict", "predict_proba"), size)


def _bagging(estimator: Any) -> Composition | None:
    if all(is_tree(part) for part in estimator.estimators_):
        return None
    answers: tuple[str, ...] = ("predict",)
    if hasattr(estimator, "classes_"):
        labels = [labels_of(part) for part in estimator.estimators_]
        if any(classes is None for classes in labels):
            return None
        answers = ("predict", "predict_proba", "predict_log_proba")
        num_classes = {len(classes) for classes in labels}
        if hasattr(estimator, "decision_function") and num_classes == {len(estimator.classes_)}:
            answers += ("decision_function",)

    def methods(part: Any) -> list[str]:
        wanted = ["predict_proba" if "predict_proba" in answers and hasattr(part, "predict_proba") else "predict"]
        return [*wanted, *(method for method in answers if method == "decision_function")]

    everything = list(range(estimator.n_features_in_))
    members = tuple(
        Member(
            str(number), part, ordered(methods(part)), None if list(picked) == everything else tuple(map(int, picked))
        )
        for number, (part, picked) in enumerate(zip(estimator.estimators_, estimator.estimators_features_, strict=True))
    )
    return Composition(members, answers, drops_names=True)


def _one_vs_rest(estimator: Any) -> Composition | None:
    if estimator.label_binarizer_.sparse_input_ and estimator.multilabel_:  # answers a sparse table
        return None
    extra = [
        method
        for method in ("predict_proba", "decision_function")
        if all(hasattr(part, method) for part in estimator.estimators_)
    ]
    members = _numbered(_fitted(estimator), lambda part: [score_method(part), *extra])
    return Composition(members, ("predict", *extra)) if members else None


def _one_vs_one(estimator: Any) -> Composition | None:
    if estimator.pairwise_indices_ is not None:
        return None
    members = _numbered(_fitted(estimator), lambda part: ["predict", score_method(part)])
    return Composition(members, ("predict", "decision_function"), drops_names=True) if members else None


def _output_code(estimator: Any) -> Composition | None:
    members = _numbered(_fitted(estimator), lambda part: [score_method(part)])
    size = FittedSize(num_parameters=estimator.code_book_.size)
    return Composition(members, ("predict",), size) if members else None


def _fitted(estimator: Any) -> list[Any]:
    return [part for part in estimator.estimators_ if not is_constant(part)]


def _multi_output_classifier(estimator: Any) -> Composition | None:
    if any(labels_of(part) is None for part in estimator.estimators_):
        return None
    answers = ["predict", *offered(estimator, ["predict_proba"])]
    return Composition(_alike(estimator.estimators_, answers), tuple(answers))


def _multi_output_regressor(estimator: Any) -> Composition:
    return Composition(_alike(estimator.estimators_, ["predict"]), ("predict",))


def _ada_boost_classifier(estimator: Any) -> Composition | None:
    if len(estimator.classes_) == 1 or all(is_tree(part) for part in estimator.estimators_):
        return None
    size = FittedSize(num_parameters=len(estimator.estimators_))
    members = _alike(estimator.estimators_, ["predict"])
    return Composition(members, (*ANSWERS, "predict_log_proba"), size, drops_names=True)


def _ada_boost_regressor(estimator: Any) -> Composition | None:
    if all(is_tree(part) for part in estimator.estimators_):
        return None
    size = FittedSize(num_parameters=len(estimator.estimators_))
    members = _alike(estimator.estimators_, ["predict"])
    return Composition(members, ("predict",), size, drops_names=True)


def _threshold(estimator: Any) -> Composition | None:
    part = getattr(estimator, "estimator_", estimator.estimator)  # a fixed one may hold a fitted one as it is
    labels = labels_of(part)
    if labels is None or len(labels) != 2:
        return None
    scores = offered(part, ("predict_proba", "predict_log_proba", "decision_function"))
    own = tuple(method for method in scores if hasattr(estimator, method))
    size = FittedSize(num_parameters=1)
    return Composition((Member("estimator", part, scores),), ("predict", *own), size, passes=frozenset(own))


def _stacking(estimator: Any) -> Composition | None:
    """Compose a stack: it answers as its final estimator does, with the labels of the whole."""
    final = estimator.final_estimator_
    stacked = tuple(
        Member(name, part, (_stacked_answer(part, method),))
        for (name, part), method in zip(_named(estimator), estimator.stack_method_, strict=True)
    )
    is_classifier = hasattr(estimator, "classes_")
    if is_classifier and (labels_of(estimator) is None or not labels_are_indices(final)):
        return None
    if any("" in member.methods for member in stacked):
        return None
    answers = offered(final) if is_classifier else ("predict",)
    member = Member("final_estimator", final, ordered(answers))
    return Composition((member,), answers, stacked=stacked, passes=frozenset(answers))


def _stacked_answer(estimator: Any, method: str) -> str:
    """Return the answer of a member that is a feature of the final estimator; "" if it is no table of numbers."""
    if not has_one_output(estimator):
        return ""
    classes = labels_of(estimator)
    if method != "predict" or classes is None or labels_are_indices(estimator):
        return method
    return "labels" if classes.dtype.kind in "biuf" else ""


def _classifier_chain(estimator: Any) -> Composition | None:
    labels = [labels_of(part) for part in estimator.estimators_]
    if any(classes is None or classes.dtype.kind not in "biuf" for classes in labels):
        return None
    is_binary = all(len(classes) == 2 for classes in labels)
    answers = ("predict", *(offered(estimator, ("predict_proba", "decision_function")) if is_binary else ()))
    if "predict_proba" in answers:
        answers += ("predict_log_proba",)
    method = "labels" if estimator.chain_method_ == "predict" else estimator.chain_method_
    if method != "labels" and not is_binary:
        return None
    asked = ["labels", *(answer for answer in answers if answer in ("predict_proba", "decision_function")), method]
    members = _alike(estimator.estimators_, asked)
    return Composition(members, answers, drops_names=True, is_chain=True)


def _transformed_target(estimator: Any) -> Composition | None:
    if why_not_undone(estimator.transformer_) is not None or not hasattr(estimator, "_training_dim"):
        return None
    member = Member("regressor", estimator.regressor_, ("predict",))
    from mlsys_windtunnel.parse.fitted_size import fitted_size

    return Composition((member,), ("predict",), fitted_size(estimator.transformer_))


def _regressor_chain(estimator: Any) -> Composition:
    members = _alike(estimator.estimators_, ["predict"])
    return Composition(members, ("predict",), drops_names=True, is_chain=True)


_WRAPPERS = {
    "sklearn.gaussian_process.GaussianProcessClassifier": "base_estimator_",
    "sklearn.frozen.FrozenEstimator": "estimator",
    "sklearn.semi_supervised.SelfTrainingClassifier": "estimator_",
}
_RULES: dict[str, Callable[[Any], Composition | None]] = {
    "sklearn.calibration.CalibratedClassifierCV": _calibrated,
    "sklearn.compose.TransformedTargetRegressor": _transformed_target,
    "sklearn.ensemble.AdaBoostClassifier": _ada_boost_classifier,
    "sklearn.ensemble.AdaBoostRegressor": _ada_boost_regressor,
    "sklearn.ensemble.BaggingClassifier": _bagging,
    "sklearn.ensemble.BaggingRegressor": _bagging,
    "sklearn.ensemble.StackingClassifier": _stacking,
    "sklearn.ensemble.StackingRegressor": _stacking,
    "sklearn.ensemble.VotingClassifier": _voting_classifier,
    "sklearn.ensemble.VotingRegressor": _voting_regressor,
    "sklearn.model_selection.FixedThresholdClassifier": _threshold,
    "sklearn.model_selection.TunedThresholdClassifierCV": _threshold,
    "sklearn.multiclass.OneVsOneClassifier": _one_vs_one,
    "sklearn.multiclass.OneVsRestClassifier": _one_vs_rest,
    "sklearn.multiclass.OutputCodeClassifier": _output_code,
    "sklearn.multioutput.ClassifierChain": _classifier_chain,
    "sklearn.multioutput.MultiOutputClassifier": _multi_output_classifier,
    "sklearn.multioutput.MultiOutputRegressor": _multi_output_regressor,
    "sklearn.multioutput.RegressorChain": _regressor_chain,
}
