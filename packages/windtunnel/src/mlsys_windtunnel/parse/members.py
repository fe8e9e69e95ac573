"""Members of a meta-estimator: what it asks of them, and what it answers in turn.

Read by :mod:`mlsys_windtunnel.parse.expand`, which makes operators of the members, and by
:mod:`mlsys_windtunnel.convert.combine`, which makes one module of their answers: both see the same composition. A
meta-estimator (or an option of one) that is not known here has no composition, and stays one operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from mlsys_windtunnel.parse.functions import why_not_undone
from mlsys_windtunnel.parse.names import known_name
from mlsys_windtunnel.parse.questions import (
    ANSWERS,
    has_one_output,
    is_constant,
    is_tree,
    labels_are_indices,
    labels_of,
    offered,
    ordered,
    score_method,
)


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
    pairs = estimator.calibrated_classifiers_
    if any(labels_of(pair.estimator) is None for pair in pairs):
        return None
    members = tuple(
        Member(f"fold{number}", pair.estimator, (score_method(pair.estimator),)) for number, pair in enumerate(pairs)
    )
    return Composition(members, ("predict", "predict_proba"))


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
    return Composition(members, ("predict",)) if members else None


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
    members = _alike(estimator.estimators_, ["predict"])
    return Composition(members, (*ANSWERS, "predict_log_proba"), drops_names=True)


def _ada_boost_regressor(estimator: Any) -> Composition | None:
    if all(is_tree(part) for part in estimator.estimators_):
        return None
    members = _alike(estimator.estimators_, ["predict"])
    return Composition(members, ("predict",), drops_names=True)


def _threshold(estimator: Any) -> Composition | None:
    part = getattr(estimator, "estimator_", estimator.estimator)  # a fixed one may hold a fitted one as it is
    labels = labels_of(part)
    if labels is None or len(labels) != 2:
        return None
    scores = offered(part, ("predict_proba", "predict_log_proba", "decision_function"))
    own = tuple(method for method in scores if hasattr(estimator, method))
    return Composition((Member("estimator", part, scores),), ("predict", *own), passes=frozenset(own))


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
    return Composition((Member("regressor", estimator.regressor_, ("predict",)),), ("predict",))


def _regressor_chain(estimator: Any) -> Composition:
    members = _alike(estimator.estimators_, ["predict"])
    return Composition(members, ("predict",), drops_names=True, is_chain=True)


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
