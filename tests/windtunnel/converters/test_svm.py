"""Support vector machines: kernels, votes, decision shapes, ties, and libsvm's coupled probabilities."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse
import torch
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel.convert.translation import translate
from mlsys_windtunnel.modules.kernel.svm import couple
from sklearn.decomposition import KernelPCA
from sklearn.kernel_ridge import KernelRidge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC, SVR, NuSVC, NuSVR, OneClassSVM

pytestmark = pytest.mark.filterwarnings("ignore")

RNG = np.random.default_rng(13)
X, FRESH = RNG.normal(size=(120, 3)), RNG.normal(size=(50, 3)) * 1.5
Y = np.sin(X[:, 0]) + X[:, 1] * X[:, 2]
LABELS = {
    2: np.where(Y > 0, "yes", "no"),
    3: np.array(["low", "middle", "high"])[np.digitize(Y, [-0.5, 0.5])],
    5: np.digitize(Y, [-1, -0.3, 0.3, 1]) * 10,
}
KERNELS = [
    {"kernel": "linear"},
    {"kernel": "poly", "degree": 3, "coef0": 0.5},
    {"kernel": "poly", "degree": 2, "gamma": "auto"},
    {"kernel": "rbf"},
    {"kernel": "rbf", "gamma": 2.0},
    {"kernel": "sigmoid", "coef0": -0.1},
]


@pytest.mark.parametrize("num_classes", LABELS)
@pytest.mark.parametrize("options", KERNELS, ids=str)
@pytest.mark.parametrize("shape", ["ovr", "ovo"])
def test_classifiers(same_answers, options, num_classes, shape):
    for source in (
        SVC(decision_function_shape=shape, **options),
        NuSVC(nu=0.1, decision_function_shape=shape, **options),
    ):
        source.fit(X, LABELS[num_classes])
        module = same_answers(source, FRESH)
        assert module.classes_.tolist() == source.classes_.tolist()
        same_answers(source, FRESH[:1])


@pytest.mark.parametrize("num_classes", LABELS)
@pytest.mark.parametrize("kernel", ["linear", "rbf"])
def test_probabilities(same_answers, kernel, num_classes):
    for source in (
        SVC(kernel=kernel, probability=True, random_state=0),
        NuSVC(nu=0.1, kernel=kernel, probability=True),
    ):
        source.fit(X, LABELS[num_classes])
        same_answers(source, FRESH)
        same_answers(source, FRESH * 1e3, trained=False)  # all within a pair is cut to 1e-7
        same_answers(source, FRESH[:1])


def test_coupling_of_any_pairs_is_libsvms(same_answers):
    """Slopes and offsets far from what a fit gives, so that rows need few rounds, many, and all of them."""
    source = SVC(probability=True, random_state=0).fit(X, LABELS[5])
    for scale in (0.1, 3.0, 30.0):
        source._probA, source._probB = RNG.normal(size=10) * scale, RNG.normal(size=10) * scale
        same_answers(source, FRESH)


def test_couple_leaves_consistent_pairs_as_they_are():
    p = torch.tensor([[0.2, 0.3, 0.5]], dtype=torch.float64)
    pairwise = p.unsqueeze(2) / (p.unsqueeze(2) + p.unsqueeze(1)) * (1 - torch.eye(3))
    torch.testing.assert_close(couple(pairwise), p, atol=5e-3, rtol=0)


def test_couple_has_the_gradient_of_the_minimum():
    p = torch.tensor([[0.2, 0.3, 0.5], [1 / 3, 1 / 3, 1 / 3]], dtype=torch.float64, requires_grad=True)
    pairwise = p.unsqueeze(2) / (p.unsqueeze(2) + p.unsqueeze(1)) * (1 - torch.eye(3))
    for index in range(3):  # consistent pairs give p back, so its derivative within sum 1 is the identity
        (slope,) = torch.autograd.grad(couple(pairwise)[:, index].sum(), p, retain_graph=True)
        move = torch.tensor([1.0, -2.0, 1.0], dtype=torch.float64)
        torch.testing.assert_close(slope @ move, move[index].expand(2))


def test_probabilities_that_no_round_moves_can_be_trained(same_answers):
    source = SVC(probability=True, random_state=0).fit(X, LABELS[3])
    source._probA, source._probB = np.full(3, -1e-4), np.zeros(3)
    assert (source.predict_proba(FRESH) == 1 / 3).all()
    same_answers(source, FRESH)


def test_ties_are_broken_by_decision_values(same_answers):
    rng = np.random.default_rng(1)  # of its own: whether ties happen must not depend on the tests before
    labels, points = rng.integers(0, 4, size=120), rng.normal(size=(1000, 3))
    predictions = []
    for breaks in (False, True):
        source = SVC(gamma=0.5, break_ties=breaks).fit(X, labels)
        same_answers(source, points)
        predictions.append(source.predict(points))
    assert (predictions[0] != predictions[1]).any(), "the case tests nothing without ties"


def test_decision_values_of_exactly_zero(same_answers):
    source = SVC(kernel="linear").fit([[-1.0], [1.0]], ["no", "yes"])
    assert source.decision_function([[0.0]]) == 0
    assert same_answers(source, np.array([[0.0], [-0.5], [0.5]])).predict([[0.0]]).tolist() == ["yes"]
    three = SVC(kernel="linear").fit([[-2.0], [0.0], [2.0]], [0, 1, 2])
    assert (three._decision_function(np.array([[-1.0], [1.0]])) == 0).any()
    same_answers(three, np.array([[-1.0], [0.0], [1.0], [3.0]]))


@pytest.mark.parametrize("options", KERNELS, ids=str)
def test_regressors_and_outlier_detectors(same_answers, options):
    for source in (SVR(**options), NuSVR(**options), OneClassSVM(nu=0.3, **options)):
        source.fit(X, Y)
        same_answers(source, FRESH)
        same_answers(source, FRESH[:1].astype(np.float32))


def test_far_and_large_data_keep_their_digits(same_answers):
    far = X * [1.0, 10.0, 0.1] + [1e5, -1e4, 0.0]
    same_answers(SVC(gamma=0.5).fit(far, LABELS[3]), far + 0.01)
    same_answers(make_pipeline(StandardScaler(), SVR()).fit(far, Y), far[::2] + 0.1)


def test_a_fit_on_sparse_rows(same_answers):
    rows = scipy.sparse.csr_matrix(np.where(X > 0, X, 0))
    for kernel in ("linear", "rbf"):
        for num_classes in (2, 3):
            same_answers(SVC(kernel=kernel).fit(rows, LABELS[num_classes]), rows)
        same_answers(SVR(kernel=kernel).fit(rows, Y), rows)
    same_answers(SVC(probability=True, random_state=0).fit(rows, LABELS[3]), rows)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (SVC(kernel="precomputed", probability=True, random_state=0), LABELS[3]),
        (NuSVC(kernel="precomputed", nu=0.1), LABELS[3] == "low"),
        (SVR(kernel="precomputed"), Y),
        (OneClassSVM(kernel="precomputed"), None),
        (KernelRidge(kernel="precomputed"), Y),
        (KernelRidge(kernel="precomputed"), np.stack([Y, -2 * Y], axis=1)),
        (KernelPCA(2, kernel="precomputed"), None),
    ],
    ids=["SVC", "NuSVC", "SVR", "OneClassSVM", "KernelRidge", "KernelRidge of two outputs", "KernelPCA"],
)
def test_precomputed_kernels_are_maps_of_their_values(same_answers, source, target):
    same_answers(source.fit(X @ X.T + 1, target), FRESH @ X.T + 1)


@pytest.mark.parametrize(
    ("source", "rows"),
    [
        (SVC(kernel=lambda a, b: a @ b.T), X),
        (SVC(break_ties=True, decision_function_shape="ovo"), X),
        (SVR(kernel=lambda a, b: a @ b.T), X),
        (OneClassSVM(kernel=lambda a, b: a @ b.T), X),
    ],
    ids=["callable", "ties of pairs", "SVR", "OneClassSVM"],
)
def test_irreproducible_values_are_refused(source, rows):
    with pytest.raises(InvalidInputError, match=type(source).__name__):
        translate(source.fit(rows, Y if isinstance(source, SVR) else LABELS[3]))


def test_a_step_along_the_gradient_lowers_the_loss():
    module = translate(SVC(probability=True, random_state=0).fit(X[:60], LABELS[3][:60]))
    x, y = torch.from_numpy(X[60:]), torch.from_numpy(np.searchsorted(module.classes_, LABELS[3][60:]))
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        loss = torch.nn.functional.nll_loss(module(x).log(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[0] > losses[1] > losses[2]
    assert {name.split(".")[-1] for name, _ in module.named_parameters()} == {
        "anchors", "gamma", "dual", "intercept", "slope", "shift"
    }  # fmt: skip


@pytest.mark.slow
def test_probabilities_are_exported():
    source = SVC(probability=True, random_state=0).fit(X, LABELS[2])
    module = translate(source)
    rows = torch.export.Dim("rows")
    exported = torch.export.export(module, (torch.from_numpy(FRESH),), dynamic_shapes=({0: rows},)).module()
    np.testing.assert_allclose(exported(torch.from_numpy(X)).detach(), source.predict_proba(X), atol=1e-9)
