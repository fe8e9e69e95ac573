"""Calibrations by hand: each number that the modules hold changes an answer."""

from __future__ import annotations

import math

import pytest
import torch
from mlsys_windtunnel.modules.combine.calibrate import Calibrated, PerClass, PlattSigmoid, Temperature
from mlsys_windtunnel.modules.combine.combine import Layout
from torch import Tensor, nn


def table(*rows: tuple[float, ...]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


class Fixed(nn.Module):
    """Answers what it was given."""

    def __init__(self, answer: Tensor) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, _: Tensor) -> Tensor:
        return self.answer


def test_platts_sigmoid_falls_where_slope_and_intercept_rise() -> None:
    got = PlattSigmoid(-2.0, 0.5)(table((1.0,), (0.0,)))
    expected = [1 / (1 + math.exp(-2.0 * x + 0.5)) for x in (1.0, 0.0)]
    assert got.flatten().tolist() == pytest.approx(expected, abs=1e-15)


def test_two_classes_have_one_calibrator_and_its_complement() -> None:
    for layout, row in ((Layout(("decision_function",), 2), (0.3,)), (Layout(("predict_proba",), 2), (0.7, 0.3))):
        got = PerClass(layout, [nn.Identity()], class_indices=[1], num_classes=2)(table(row))
        assert got.flatten().tolist() == pytest.approx([0.7, 0.3])


def test_classes_that_a_member_never_saw_get_nothing_and_the_rest_is_normalised() -> None:
    calibrators = [nn.Identity(), nn.Identity()]
    layout = Layout(("decision_function",), 3)
    module = PerClass(layout, calibrators, class_indices=[2, 0], num_classes=3)
    got = module(table((1.0, 3.0, 9.0), (0.0, 0.0, 9.0)))
    assert got[0].tolist() == pytest.approx([0.75, 0.0, 0.25])
    assert got[1].tolist() == pytest.approx([1 / 3] * 3), "a row of zeros is uniform"


def test_a_temperature_multiplies_margins_and_logarithms_of_probabilities() -> None:
    margins = Temperature(Layout(("decision_function",), 3), 0.5)(table((2.0, 0.0, -2.0)))
    assert margins.tolist() == [pytest.approx(torch.tensor([1.0, 0.0, -1.0]).double().softmax(0).tolist())]
    one = Temperature(Layout(("decision_function",), 2), 2.0)(table((0.25,)))
    assert one[0, 1].item() == pytest.approx(1 / (1 + math.exp(-1.0))), "a margin m stands for -m and m"
    shares = Temperature(Layout(("predict_proba",), 2), 2.0)(table((0.2, 0.8), (0.0, 1.0)))
    assert shares[0].tolist() == pytest.approx([0.04 / 0.68, 0.64 / 0.68])
    assert shares[1].tolist() == pytest.approx([1e-24, 1.0], rel=1e-3, abs=0), "1e-12 is added before the logarithm"


def test_members_are_averaged_and_an_overshoot_is_cut() -> None:
    overshoot, beyond = 1 + 0.9e-5, 1 + 1.1e-5
    parts = [Fixed(table((0.2, 0.8), (0.0, overshoot))), Fixed(table((0.6, 0.4), (0.0, beyond)))]
    module = Calibrated(parts, classes=["no", "yes"], answers=["predict", "predict_proba"])
    scores = module(table((0.0,), (0.0,)), table((0.0,), (0.0,)))
    assert scores[0].tolist() == pytest.approx([0.4, 0.6])
    assert scores[1, 1].item() == pytest.approx((1.0 + beyond) / 2, abs=1e-12)
    assert module.probabilities(scores) is scores
    assert module.prediction(scores).tolist() == [1, 1]
    assert module.prediction(table((0.6, 0.4))).tolist() == [0]
