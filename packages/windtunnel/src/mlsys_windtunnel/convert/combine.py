"""Joins of meta-estimators: how the answers of the members, which are operators of their own, become one."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from mlsys_core.errors import InvalidInputError
from torch import nn

from mlsys_windtunnel.convert.isotonic import isotonic
from mlsys_windtunnel.convert.linear import class_labels
from mlsys_windtunnel.convert.registry import Converters
from mlsys_windtunnel.modules.base import OperatorModule, Regressor
from mlsys_windtunnel.modules.columns.columns import Concatenate
from mlsys_windtunnel.modules.combine.calibrate import Calibrated, PerClass, PlattSigmoid, Temperature
from mlsys_windtunnel.modules.combine.combine import (
    Ballot,
    BoostedVote,
    Layout,
    Passed,
    Threshold,
    Vote,
    WeightedMean,
    WeightedMedian,
)
from mlsys_windtunnel.modules.combine.multiclass import BinaryMembers, Chain, OneVsOne, OneVsRest, OutputCode, Outputs
from mlsys_windtunnel.parse.members import Composition, Member, composition_of
from mlsys_windtunnel.parse.questions import is_constant, labels_are_indices, labels_of

COMBINERS = Converters()


def _composition(estimator: Any) -> Composition:
    composition = composition_of(estimator)
    assert composition is not None, "the graph has a join only where there is a composition"
    return composition


def _layout(member: Member) -> Layout:
    labels = labels_of(member.estimator)
    return Layout(member.methods, 0 if labels is None else len(labels))


def _ballots(composition: Composition, classes: npt.NDArray[Any]) -> list[Ballot]:
    """Return the members' ballots, whose labels are among ``classes``."""
    return [
        Ballot(
            _layout(member),
            class_indices=np.searchsorted(classes, member.estimator.classes_).tolist(),
            num_classes=len(classes),
        )
        for member in composition.members
    ]


@COMBINERS.of("sklearn.ensemble", "VotingClassifier")
def voting_classifier(estimator: Any) -> OperatorModule:
    """Join members by vote: soft by the mean of probabilities, column by column; hard by the mode of labels."""
    composition, labels = _composition(estimator), class_labels(estimator.classes_)
    everything = range(len(labels))
    ballots = [Ballot(_layout(part), class_indices=everything, num_classes=len(labels)) for part in composition.members]
    return Vote(ballots, weights=_weights(estimator), classes=labels, answers=composition.answers)


@COMBINERS.of("sklearn.ensemble", "VotingRegressor")
def voting_regressor(estimator: Any) -> OperatorModule:
    """Join members by their weighted mean."""
    return Regressor(WeightedMean(_weights(estimator)))


def _weights(estimator: Any) -> list[float]:
    weights = estimator._weights_not_none
    return [1.0] * len(estimator.estimators_) if weights is None else [float(weight) for weight in weights]


@COMBINERS.of("sklearn.ensemble", "BaggingClassifier")
def bagging_classifier(estimator: Any) -> OperatorModule:
    """Join members by the mean of probabilities, or of votes where a member has none; one may know fewer classes."""
    composition = _composition(estimator)
    indices = np.arange(len(estimator.classes_))  # the members were fitted on these
    return Vote(
        _ballots(composition, indices),
        weights=np.ones(len(composition.members)),
        classes=class_labels(estimator.classes_),
        answers=composition.answers,
    )


@COMBINERS.of("sklearn.ensemble", "BaggingRegressor")
def bagging_regressor(estimator: Any) -> OperatorModule:
    """Join members by their mean."""
    return Regressor(WeightedMean(np.ones(len(estimator.estimators_))))


@COMBINERS.of("sklearn.ensemble", "AdaBoostClassifier")
def ada_boost_classifier(estimator: Any) -> OperatorModule:
    """Join members by weighted votes; they were fitted on the labels themselves."""
    composition = _composition(estimator)
    return BoostedVote(
        _ballots(composition, estimator.classes_),
        weights=estimator.estimator_weights_[: len(composition.members)],
        classes=class_labels(estimator.classes_),
        answers=composition.answers,
    )


@COMBINERS.of("sklearn.ensemble", "AdaBoostRegressor")
def ada_boost_regressor(estimator: Any) -> OperatorModule:
    """Join members by their weighted median."""
    return Regressor(WeightedMedian(estimator.estimator_weights_[: len(estimator.estimators_)]))


@COMBINERS.of("sklearn.ensemble", "StackingClassifier")
def stacking_classifier(estimator: Any) -> OperatorModule:
    """Pass on the final estimator's answers; it was fitted on indices of labels."""
    composition = _composition(estimator)
    return Passed(
        _layout(composition.members[0]), classes=class_labels(estimator.classes_), answers=composition.answers
    )


@COMBINERS.of("sklearn.model_selection", "FixedThresholdClassifier", "TunedThresholdClassifierCV")
def threshold_classifier(estimator: Any) -> OperatorModule:
    """Derive the label from a threshold, fixed or tuned, on the member's probabilities or decision values."""
    composition = _composition(estimator)
    layout, classes = _layout(composition.members[0]), np.asarray(estimator.classes_)
    wanted = [estimator.response_method] if estimator.response_method != "auto" else ["predict_proba"]
    method = next((name for name in wanted if name in layout.methods), "decision_function")
    if hasattr(estimator, "best_threshold_"):
        threshold, positive_label = float(estimator.best_threshold_), estimator._curve_scorer._get_pos_label()
    else:
        default = 0.5 if method == "predict_proba" else 0.0
        threshold = default if isinstance(estimator.threshold, str) else float(estimator.threshold)
        positive_label = estimator.pos_label
    positive = 1 if positive_label is None else int(np.flatnonzero(classes == positive_label)[0])
    return Threshold(
        layout,
        method="predict_proba" if method == "predict_proba" else "decision_function",
        threshold=threshold,
        positive=positive,
        pair=(1 - positive, positive),
        classes=class_labels(classes),
        answers=composition.answers,
    )


@COMBINERS.of("sklearn.calibration", "CalibratedClassifierCV")
def calibrated_classifier(estimator: Any) -> OperatorModule:
    """Join members by the mean of their scores, calibrated class by class or by a temperature."""
    composition, classes = _composition(estimator), estimator.classes_
    calibrations: list[nn.Module] = []
    for member, pair in zip(composition.members, estimator.calibrated_classifiers_, strict=True):
        layout = _layout(member)
        if pair.method == "temperature":
            if not labels_are_indices(estimator) and not isinstance(classes[0], str):
                raise InvalidInputError(
                    f"CalibratedClassifierCV(method='temperature') was fitted on the labels {classes.tolist()[:5]}: "
                    "scikit-learn takes labels for indices 0, 1, ... and reads past its array with others, so this "
                    "temperature means nothing; fit on LabelEncoder().fit_transform(y)"
                )
            calibrations.append(Temperature(layout, float(pair.calibrators[0].beta_)))
            continue
        indices = np.searchsorted(classes, member.estimator.classes_)
        num_columns = 1 if len(indices) <= 2 else len(indices)
        indices = indices[:num_columns] + 1 if len(classes) == 2 else indices[:num_columns]
        calibrators = [_calibrator(part, pair.method) for part in pair.calibrators]
        used = min(len(calibrators), num_columns)
        calibrations.append(
            PerClass(layout, calibrators[:used], class_indices=indices[:used].tolist(), num_classes=len(classes))
        )
    return Calibrated(calibrations, classes=class_labels(classes), answers=composition.answers)


def _calibrator(calibrator: Any, method: str) -> nn.Module:
    return isotonic(calibrator) if method == "isotonic" else PlattSigmoid(float(calibrator.a_), float(calibrator.b_))


def _binary_members(estimator: Any, composition: Composition) -> BinaryMembers:
    layouts = iter(composition.members)
    return BinaryMembers(
        [float(part.y_[0]) if is_constant(part) else _layout(next(layouts)) for part in estimator.estimators_]
    )


def _binary_threshold(estimator: Any) -> float:
    """Return the threshold that scikit-learn compares scores with: 0 for decision values, one half for all else."""
    from sklearn.base import is_classifier

    first = estimator.estimators_[0]
    return 0.0 if hasattr(first, "decision_function") and is_classifier(first) else 0.5


@COMBINERS.of("sklearn.multiclass", "OneVsRestClassifier")
def one_vs_rest(estimator: Any) -> OperatorModule:
    """Join members one-vs-rest: classes, or several labels at once where the target is a table of labels."""
    composition = _composition(estimator)
    return OneVsRest(
        _binary_members(estimator, composition),
        threshold=_binary_threshold(estimator),
        classes=() if estimator.multilabel_ else class_labels(estimator.classes_),
        answers=composition.answers,
    )


@COMBINERS.of("sklearn.multiclass", "OneVsOneClassifier")
def one_vs_one(estimator: Any) -> OperatorModule:
    """Join members by votes between pairs."""
    composition = _composition(estimator)
    return OneVsOne(
        _binary_members(estimator, composition),
        threshold=_binary_threshold(estimator),
        classes=class_labels(estimator.classes_),
        answers=composition.answers,
    )


@COMBINERS.of("sklearn.multiclass", "OutputCodeClassifier")
def output_code(estimator: Any) -> OperatorModule:
    """Join members by the nearest code word."""
    composition = _composition(estimator)
    return OutputCode(
        _binary_members(estimator, composition),
        code_book=estimator.code_book_,
        classes=class_labels(estimator.classes_),
        answers=composition.answers,
    )


@COMBINERS.of("sklearn.multioutput", "MultiOutputClassifier")
def multi_output_classifier(estimator: Any) -> OperatorModule:
    """Join members side by side."""
    composition = _composition(estimator)
    outputs = [class_labels(member.estimator.classes_) for member in composition.members]
    return Outputs([_layout(member) for member in composition.members], outputs=outputs, answers=composition.answers)


@COMBINERS.of("sklearn.multioutput", "MultiOutputRegressor", "RegressorChain")
def values_side_by_side(_estimator: Any) -> OperatorModule:
    """Join regressors of several targets, chained or not."""
    return Regressor(Concatenate(), is_flat=False)


@COMBINERS.of("sklearn.multioutput", "ClassifierChain")
def classifier_chain(estimator: Any) -> OperatorModule:
    """Join members of a chain; their tables come in the order of targets."""
    composition = _composition(estimator)
    in_chain = [_layout(member) for member in composition.members]
    indices = {int(output): index for index, output in enumerate(estimator.order_)}
    return Chain([in_chain[indices[output]] for output in range(len(in_chain))], answers=composition.answers)
