"""Checks for every converter: the module answers as its source does, and gradients reach its parameters."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mlsys_core.native.loader import builds_to_test, compiled_with
from mlsys_windtunnel.backends.soft import native as soft
from mlsys_windtunnel.convert.translation import translate
from mlsys_windtunnel.modules import native as exact
from mlsys_windtunnel.parse.boosters import as_estimator

METHODS = ("predict", "predict_proba", "predict_log_proba", "decision_function", "score_samples", "transform")
TOLERANCE = 1e-6
BUILDS = builds_to_test()


def _numpy(answer: Any) -> np.ndarray:
    return np.asarray(answer.toarray() if hasattr(answer, "toarray") else answer)


def _compare(source: Any, x: Any, *, trained: bool = True, **options: Any) -> Any:
    module = translate(source, x if options.pop("with_example", False) else None, **options)
    source = as_estimator(source)  # a booster of its library's own, as what takes tables
    offered = [method for method in METHODS if hasattr(source, method)]
    assert offered, "the source answers nothing"
    if hasattr(source, "predict"):  # clusterers transform too; a predictor's module answers what its source predicts
        offered = [method for method in offered if method != "transform" or hasattr(module, "transform")]
    for method in offered:
        expected, got = _numpy(getattr(source, method)(x)), getattr(module, method)(x)
        assert got.shape == expected.shape, (method, got.shape, expected.shape)
        if expected.dtype.kind in "fc" and got.dtype.kind in "fc":
            np.testing.assert_allclose(got, expected, rtol=TOLERANCE, atol=TOLERANCE, err_msg=method)
        else:
            assert (got == expected).all(), method
    for method in METHODS:
        assert hasattr(module, method) <= hasattr(source, method), f"the source has no {method}"
    if trained:
        _check_gradients(module, x)
    return module


def _check_gradients(module: Any, x: Any) -> None:
    """Some gradient that is finite reaches some parameter, and a step changes the answer."""
    packed = torch.from_numpy(module.encode(x)).to(module.dtype)
    answer = module(packed)
    finite = answer[torch.isfinite(answer)]
    (finite * torch.linspace(0.5, 1.5, finite.numel(), dtype=finite.dtype)).sum().backward()
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    assert gradients, "no parameter is reached"
    assert all(torch.isfinite(gradient).all() for gradient in gradients)
    assert any(gradient.abs().sum() > 0 for gradient in gradients)


@pytest.fixture
def same_answers() -> Callable[..., Any]:
    """``same_answers(source, X, trained=True, with_example=False, **translate_options)`` -> the module.

    Every method of the source is compared (values to 1e-6, labels exactly, shapes exactly), methods the source lacks
    must be absent, and with ``trained`` a gradient must reach a parameter.
    """
    return _compare


@pytest.fixture
def answer_alone(tmp_path: Path) -> Callable[[Any, Any], np.ndarray]:
    """``answer_alone(module, X)`` -> the probabilities by a process that has neither scikit-learn nor pandas loaded."""

    def answer(module: Any, x: Any) -> np.ndarray:
        (tmp_path / "sent.pkl").write_bytes(pickle.dumps((module, x)))
        script = (
            "import pickle, sys, numpy as np\n"
            "module, x = pickle.load(open('sent.pkl', 'rb'))\n"
            "np.save('answer.npy', module.predict_proba(x))\n"
            "assert not {'sklearn', 'pandas'} & set(sys.modules)\n"
        )
        subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True)
        return np.load(tmp_path / "answer.npy")

    return answer


@pytest.fixture(scope="module", params=BUILDS)
def kernel_level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Compile the kernels for one level; :data:`BUILDS` has its flags."""
    with compiled_with(BUILDS[request.param], exact.kernel, soft.kernel):
        yield request.param
