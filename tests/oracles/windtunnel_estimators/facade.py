"""scikit-learn's own estimator checks, run on translations: an estimator whose fit translates what it has fitted."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from typing import Any
from unittest import SkipTest

import numpy as np
from mlsys_core.errors import InvalidInputError
from mlsys_windtunnel import translate
from sklearn.base import BaseEstimator, clone
from sklearn.utils import Tags, get_tags
from sklearn.utils.estimator_checks import estimator_checks_generator
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import check_is_fitted

from tests.oracles.tally import Tally

# Checks of what is given to predict and transform; the others are about fit, which is the source's own.
CHECKS = frozenset(
    (
        "check_classifier_data_not_an_array",
        "check_complex_data",
        "check_dataframe_column_names_consistency",
        "check_dict_unchanged",
        "check_dtype_object",
        "check_estimator_sparse_array",
        "check_estimator_sparse_matrix",
        "check_estimators_data_not_an_array",
        "check_estimators_dtypes",
        "check_estimators_empty_data_messages",
        "check_estimators_nan_inf",
        "check_estimators_pickle",
        "check_f_contiguous_array_estimator",
        "check_fit2d_predict1d",
        "check_methods_sample_order_invariance",
        "check_methods_subset_invariance",
        "check_n_features_in_after_fitting",
        "check_readonly_memmap_input",
        "check_regressor_data_not_an_array",
        "check_transformer_data_not_an_array",
        "check_transformer_general",
    )
)


def _offered(method: str) -> Any:
    def check(estimator: Any) -> bool:
        return hasattr(getattr(estimator, "module_", estimator.source), method)

    return available_if(check)


class Translated(BaseEstimator):
    """Fits the source and answers with its translation."""

    def __init__(self, source: Any = None) -> None:
        self.source = source

    def fit(self, X: Any, y: Any = None) -> Translated:  # noqa: N803  scikit-learn's name
        """Fit and translate."""
        self.source_ = clone(self.source)
        seeds = [name for name in self.source_.get_params() if name.endswith("random_state")]
        self.source_.set_params(**dict.fromkeys(seeds, 0)).fit(X, y)
        for name in ("n_features_in_", "feature_names_in_", "classes_"):
            if hasattr(self.source_, name):
                setattr(self, name, getattr(self.source_, name))
        self.module_ = translate(self.source_)
        return self

    def _answer(self, method: str, x: Any) -> Any:
        check_is_fitted(self)
        return getattr(self.module_, method)(x)

    @_offered("predict")
    def predict(self, X: Any) -> Any:  # noqa: N803
        """The translation's; so are all below."""
        return self._answer("predict", X)

    @_offered("predict_proba")
    def predict_proba(self, X: Any) -> Any:  # noqa: N803
        """See above."""
        return self._answer("predict_proba", X)

    @_offered("decision_function")
    def decision_function(self, X: Any) -> Any:  # noqa: N803
        """See above."""
        return self._answer("decision_function", X)

    @_offered("transform")
    def transform(self, X: Any) -> Any:  # noqa: N803
        """See above."""
        return self._answer("transform", X)

    @_offered("transform")
    def fit_transform(self, X: Any, y: Any = None) -> Any:  # noqa: N803
        """See above."""
        return self.fit(X, y).transform(X)

    def __sklearn_tags__(self) -> Tags:
        return get_tags(self.source)


class SkewedChi2Sampler(Translated):
    """Has the source's name, by which scikit-learn's checks choose data that it takes."""


def _outcome(check: Any, estimator: Any) -> Exception | None:
    """Return what a check says; None if it is passed, or says nothing of such an estimator."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            check(estimator)
        except SkipTest:
            return None
        except (Exception, AssertionError) as error:  # noqa: BLE001  any check may raise anything
            return error
    return None


def run(sources: Iterable[Any], tally: Tally, refusals: dict[str, str]) -> None:
    """Run the checks on the translations of estimators that are not fitted yet.

    A check that the source itself fails counts for nothing; one in which translation is refused is refused.
    """
    for source in sources:
        name = repr(source).replace("\n", "")[:100]
        own = {str(check): check for _, check in _checks(source)}
        facade = SkewedChi2Sampler if type(source).__name__ == "SkewedChi2Sampler" else Translated
        for estimator, check in _checks(facade(source)):
            error = _outcome(check, estimator)
            if error is None:
                tally.add("equal", name)
                continue
            if re.search("has no attribute '(transform|predict)'", str(error)):  # a predictor's translation predicts
                tally.add("refused", name, "one of the source's two methods is not translated")
                continue
            if (reason := _refusal(error)) is not None:
                refusals.setdefault(name, reason)
                tally.add("refused", name)
                continue
            same = next((each for label, each in own.items() if _name(each) == _name(check)), None)
            if same is not None and _outcome(same, source) is None:
                tally.add("wrong", f"{name}, {_name(check)}", f"{type(error).__name__}: {error}"[:300])


def _refusal(error: BaseException | None) -> str | None:
    """Why the source was not translated, if that is what a check stumbled on."""
    while error is not None:
        if isinstance(error, InvalidInputError) and "cannot be translated" in str(error):
            return str(error)
        error = error.__cause__ or error.__context__
    return None


def _name(check: Any) -> str:
    return str(getattr(check, "func", check).__name__)


def _checks(estimator: Any) -> list[tuple[Any, Any]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [
            (each, check)
            for each, check in estimator_checks_generator(estimator, legacy=True, mark="skip")
            if _name(check) in CHECKS
        ]
