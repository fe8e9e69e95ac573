"""Base of the fine-tuning estimators: fit a pipeline, translate it, and train it while that pays."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import KW_ONLY, dataclass, fields, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from mlsys_core.errors import InvalidInputError
from scipy.sparse import issparse  # type: ignore[import-untyped]
from sklearn.base import BaseEstimator, ClassifierMixin, clone
from sklearn.utils import Tags, _safe_indexing, check_consistent_length, check_random_state, column_or_1d, get_tags
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from mlsys_windtunnel.backends.soft.options import SoftOptions
from mlsys_windtunnel.convert.translation import translate
from mlsys_windtunnel.finetune.choose import Choice, choose_epochs, report, splits_of
from mlsys_windtunnel.finetune.makers import check_members, refuse_ranker, weight_for
from mlsys_windtunnel.finetune.members import with_members
from mlsys_windtunnel.finetune.options import TrainingOptions
from mlsys_windtunnel.finetune.tune import FineTuned, fine_tune
from mlsys_windtunnel.module import WindTunnelModule

FEW_ROWS = 100  # with which fallback operators tell how wide they are


@dataclass(repr=False, eq=False)
class FineTunedBase(BaseEstimator, ABC):  # type: ignore[misc]  # scikit-learn has no types
    """Base of both estimators; the parameters are documented there."""

    pipeline: Any = None
    level: str = "L2"
    _: KW_ONLY
    gate: str = "softmax"
    init: str = "residual"
    scope: str = "pipeline"
    temperature: float = 0.1
    leaf_temperature: float | None = None
    dropout: float = 0.0
    rank: int | None = None
    epochs: int = 10
    lr: float = 2e-3
    batch_size: int = 1024
    schedule: str = "onecycle"
    loss: Any = "auto"
    metric: str = "auto"
    patience: int | None = None
    min_gain_se: float = 2.0
    ema: float | None = None
    weight_decay: float = 1e-6
    leaf_decay: float | None = None
    embedding_rate: float = 2.5
    validation_fraction: float = 0.1
    cv: Any = None
    members: int = 0
    warm_start: bool = False
    checkpoint_dir: Any = None
    random_state: Any = None
    n_threads: int | None = None
    verbose: bool | None = None

    def fit(
        self,
        X: Any,  # noqa: N803
        y: Any,
        *,
        eval_set: Any = None,
        sample_weight: Any = None,
        groups: Any = None,
    ) -> Self:
        """Fit the pipeline, translate it, fine-tune it as long as rows held out show a gain.

        Args:
            X: Raw rows, as the pipeline takes them.
            y: Labels or numbers ``[rows]``.
            eval_set: ``(X, y)`` by which the best epoch is chosen, or a list of one such pair. None holds rows out
                (``cv``, ``validation_fraction``), chooses the number of epochs by them, and then fits the pipeline and
                so many epochs on all rows; where nothing is surely gained, on the pipeline alone.
            sample_weight: ``[rows]``, for the pipeline and the fine-tuning.
            groups: ``[rows]``, for a splitter ``cv`` that reads them.

        Raises:
            InvalidInputError: a parameter is out of range, or the pipeline cannot be translated.
            ValueError: bad data (scikit-learn's own checks).
        """
        soft, options = self._options()
        refuse_ranker(self._source())
        check_members(self._source(), self.members)
        X, y = self._checked(X, y)  # noqa: N806
        sample_weight = self._weighted(y, sample_weight)
        is_first = not (self.warm_start and hasattr(self, "module_"))
        rows = (X, y, sample_weight)
        tuned = self._tuned(rows, eval_set, groups, soft, options)
        if self.members and is_first:
            facts = {"members": self.members, "cv": self.cv, "groups": groups, "options": options}
            joined = with_members(tuned.module, self.source_, *rows, **facts)
            self.shares_, self.members_gain_ = joined.shares, (joined.gain, joined.gain_se)
            tuned = replace(tuned, module=joined.module)
        return self._keep(tuned)

    def _tuned(self, rows: Any, eval_set: Any, groups: Any, soft: SoftOptions, options: TrainingOptions) -> FineTuned:
        """Fit the pipeline and fine-tune its translation."""
        X, y, sample_weight = rows  # noqa: N806
        if eval_set is not None:
            pair = eval_set[0] if isinstance(eval_set, list) else eval_set
            start = self._started(X, y, sample_weight)
            return fine_tune(start, X, y, eval_set=pair, sample_weight=sample_weight, soft=soft, options=options)
        splits = splits_of(
            X,
            y,
            cv=self.cv,
            groups=groups,
            fraction=self.validation_fraction,
            seed=options.random_state,
            is_classifier=isinstance(self, ClassifierMixin),
        )
        choice = choose_epochs(self._started, X, y, sample_weight, splits, soft, options) if splits else None
        start = self._started(X, y, sample_weight)
        if choice is None and (self.cv is not None or self.validation_fraction):
            choice = Choice(0, math.nan, math.nan, math.nan, "none", [])
        if choice is not None and not choice.epochs:
            report(options, choice)
            return FineTuned(start, choice.history, 0, choice.score, choice.metric, choice.gain, choice.gain_se)
        last = replace(options, patience=None, last_epoch=None if choice is None else choice.epochs)
        tuned = fine_tune(start, X, y, sample_weight=sample_weight, soft=soft, options=last)
        if choice is not None:
            tuned = replace(
                tuned,
                history=choice.history,
                best_epoch=choice.epochs,
                best_score=choice.score,
                metric=choice.metric,
                gain=choice.gain,
                gain_se=choice.gain_se,
            )
        return tuned

    def partial_fit(self, X: Any, y: Any, classes: Any = None, *, sample_weight: Any = None) -> Self:  # noqa: N803
        """Train one epoch on more rows, at a constant rate; the first call is :meth:`fit`.

        Args:
            X: Raw rows.
            y: Their labels or numbers.
            classes: All labels of a classifier; the rows of the first call must have each of them.
            sample_weight: ``[rows]``.

        Raises:
            InvalidInputError: a label that the first call did not have, rows that the pipeline refuses.
        """
        if not hasattr(self, "module_"):
            known = [] if classes is None else np.asarray(classes).tolist()
            if lacking := sorted(set(known) - set(np.asarray(y).tolist() if known else ())):
                raise InvalidInputError(f"the first rows have no {lacking[:5]}: begin with rows of every class")
            return self.fit(X, y, sample_weight=sample_weight)
        soft, options = self._options()
        X, y = self._checked(X, y, reset=False)  # noqa: N806
        once = replace(options, epochs=1, schedule="constant", patience=None, checkpoint_dir=None)
        weight = self._weighted(y, sample_weight)
        return self._keep(fine_tune(self.module_, X, y, sample_weight=weight, soft=soft, options=once))

    def _started(self, X: Any, y: Any, weight: Any) -> WindTunnelModule:  # noqa: N803
        """Fit a clone of the pipeline and translate it; with ``warm_start``, return what an earlier fit left."""
        if self.warm_start and hasattr(self, "module_"):
            module: WindTunnelModule = self.module_
            return module
        self.source_ = clone(self._source())
        self.source_.fit(X, y, **weight_for(self.source_, weight))
        if hasattr(self.source_, "classes_"):
            self.classes_ = self.source_.classes_
        return translate(self.source_, _safe_indexing(X, slice(0, FEW_ROWS)))

    def _keep(self, tuned: FineTuned) -> Self:
        """Answer by a module from now on."""
        self.module_ = tuned.module
        self.update_: tuple[Any, Any] = (tuned.module, None)
        self.history_, self.best_epoch_, self.best_score_ = tuned.history, tuned.best_epoch, tuned.best_score
        self.metric_, self.gain_, self.gain_se_ = tuned.metric, tuned.gain, tuned.gain_se
        return self

    def update(self, X: Any, y: Any, *, sample_weight: Any = None, **options: Any) -> Self:  # noqa: N803
        """Bring the model up to date with a few hundred new labels; call it with the new ones each time.

        Args:
            X: New raw rows.
            y: Their labels or numbers.
            sample_weight: ``[rows]``.
            options: Fields of :class:`~mlsys_windtunnel.finetune.update.UpdateOptions`.

        Raises:
            InvalidInputError: an option is out of range, rows that the pipeline refuses, labels that it does not know.
        """
        from mlsys_windtunnel.finetune.update import UpdateOptions, update

        self._fitted(X)
        start, memory = self.update_
        weight = None if sample_weight is None else _check_sample_weight(sample_weight, X)
        state = update(start, X, y, memory=memory, sample_weight=weight, options=UpdateOptions(**options))
        self.update_, self.module_ = (start, state.memory), state.module
        return self

    def predict(self, X: Any) -> npt.NDArray[Any]:  # noqa: N803
        """Return labels or numbers ``[rows]``."""
        result: npt.NDArray[Any] = self._fitted(X).predict(X)
        return result

    def _fitted(self, X: Any) -> Any:  # noqa: N803
        check_is_fitted(self)
        if len(getattr(X, "shape", (1, 1))) == 1:
            raise ValueError("Expected 2D array, got 1D array instead. Reshape your data: one row is [[...]].")
        validate_data(self, X, reset=False, skip_check_array=True)
        return self.module_

    def _checked(self, X: Any, y: Any, *, reset: bool = True) -> tuple[Any, Any]:  # noqa: N803
        """Return rows and targets that can be indexed, of right shapes; the pipeline checks what rows hold."""
        if y is None:
            raise ValueError(f"{type(self).__name__} requires y to be passed, but the target y is None")
        if not hasattr(X, "iloc") and not issparse(X):
            X = np.asarray(X)  # noqa: N806
        validate_data(self, X, y, reset=reset, skip_check_array=True)
        check_consistent_length(X, y)
        return X, self._target(y)

    def _target(self, y: Any) -> Any:
        """Return targets ``[rows]``."""
        return column_or_1d(y, warn=True)

    def _weighted(self, y: Any, weight: Any) -> Any:
        """Sample weights; a classifier multiplies them with those of classes."""
        return None if weight is None else _check_sample_weight(weight, y)

    def _options(self) -> tuple[SoftOptions, TrainingOptions]:
        values = self.get_params(deep=False)
        soft = SoftOptions(**{field.name: values[field.name] for field in fields(SoftOptions)})
        names = [field.name for field in fields(TrainingOptions) if field.name in values]
        chosen = {name: values[name] for name in names if name != "random_state"}
        seed = int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))
        return soft, TrainingOptions(**chosen, random_state=seed)

    @abstractmethod
    def _source(self) -> Any:
        """Return the pipeline to fit."""

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        source = get_tags(self._source())
        tags.input_tags = source.input_tags
        tags.non_deterministic = source.non_deterministic
        return tags
