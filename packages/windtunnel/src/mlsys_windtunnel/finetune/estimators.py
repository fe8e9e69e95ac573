"""scikit-learn estimators that fit a pipeline, translate it, and fine-tune the translation end to end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import fields
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from scipy.sparse import issparse  # type: ignore[import-untyped]
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin, clone
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.pipeline import Pipeline
from sklearn.utils import Tags, _safe_indexing, check_consistent_length, check_random_state, column_or_1d, get_tags
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, has_fit_parameter, validate_data

from mlsys_windtunnel.backends.soft.options import SoftOptions
from mlsys_windtunnel.convert.translation import translate
from mlsys_windtunnel.finetune.holdout import hold_out
from mlsys_windtunnel.finetune.options import TrainingOptions
from mlsys_windtunnel.finetune.tune import fine_tune

FEW_ROWS = 100  # with which fallback operators tell how wide they are


def _has(method: str) -> Any:
    def check(estimator: Any) -> bool:
        return hasattr(getattr(estimator, "module_", None) or estimator._source(), method)

    return available_if(check)


class _FineTuned(BaseEstimator, ABC):  # type: ignore[misc]  # scikit-learn has no types
    """Base of both estimators; the parameters are documented there."""

    def __init__(
        self,
        pipeline: Any = None,
        level: str = "L2",
        *,
        gate: str = "softmax",
        init: str = "residual",
        scope: str = "pipeline",
        temperature: float = 0.1,
        leaf_temperature: float | None = None,
        final_sharpness: float = 1.0,
        dropout: float = 0.0,
        rank: int | None = None,
        epochs: int = 10,
        lr: float = 2e-3,
        batch_size: int = 1024,
        schedule: str = "onecycle",
        loss: Any = "auto",
        metric: str = "auto",
        patience: int | None = None,
        min_gain_se: float = 1.0,
        ema: float | None = None,
        weight_decay: float = 1e-6,
        leaf_decay: float | None = None,
        embedding_rate: float = 2.5,
        validation_fraction: float = 0.1,
        checkpoint_dir: Any = None,
        random_state: Any = None,
        n_threads: int | None = None,
        n_processes: int = 1,
        launcher: str = "local",
        verbose: bool | None = None,
    ) -> None:
        self.pipeline = pipeline
        self.level = level
        self.gate = gate
        self.init = init
        self.scope = scope
        self.temperature = temperature
        self.leaf_temperature = leaf_temperature
        self.final_sharpness = final_sharpness
        self.dropout = dropout
        self.rank = rank
        self.epochs = epochs
        self.lr = lr
        self.batch_size = batch_size
        self.schedule = schedule
        self.loss = loss
        self.metric = metric
        self.patience = patience
        self.min_gain_se = min_gain_se
        self.ema = ema
        self.weight_decay = weight_decay
        self.leaf_decay = leaf_decay
        self.embedding_rate = embedding_rate
        self.validation_fraction = validation_fraction
        self.checkpoint_dir = checkpoint_dir
        self.random_state = random_state
        self.n_threads = n_threads
        self.n_processes = n_processes
        self.launcher = launcher
        self.verbose = verbose

    def fit(self, X: Any, y: Any, *, eval_set: Any = None, sample_weight: Any = None) -> Self:  # noqa: N803
        """Fit the pipeline, translate it, fine-tune it.

        Args:
            X: Raw rows, as the pipeline takes them.
            y: Labels or numbers ``[rows]``.
            eval_set: ``(X, y)`` by which the best epoch is chosen, or a list of one such pair. None holds out
                ``validation_fraction`` of the rows, which the pipeline is then not fitted on either.
            sample_weight: ``[rows]``, for the pipeline and the fine-tuning.

        Raises:
            InvalidInputError: a parameter is out of range, or the pipeline cannot be translated.
            ValueError: bad data (scikit-learn's own checks).
        """
        soft, options = self._options()
        X, y = self._checked(X, y)  # noqa: N806
        sample_weight = self._weighted(y, sample_weight)
        held_out = None
        if eval_set is None:
            X, y, sample_weight, held_out = hold_out(  # noqa: N806
                X,
                y,
                sample_weight,
                fraction=self.validation_fraction,
                seed=options.random_state,
                is_classifier=isinstance(self, ClassifierMixin),
            )
        else:
            held_out = eval_set[0] if isinstance(eval_set, list) else eval_set
        self.source_ = clone(self._source())
        self.source_.fit(X, y, **_weight_for(self.source_, sample_weight))
        if hasattr(self.source_, "classes_"):
            self.classes_ = self.source_.classes_
        tuned = fine_tune(
            translate(self.source_, _safe_indexing(X, slice(0, FEW_ROWS))),
            X,
            y,
            eval_set=held_out[:2] if held_out is not None else None,
            sample_weight=sample_weight,
            eval_sample_weight=held_out[2] if held_out is not None and len(held_out) > 2 else None,
            soft=soft,
            options=options,
        )
        self.module_ = tuned.module
        self.update_: tuple[Any, Any] = (tuned.module, None)
        self.history_, self.best_epoch_, self.best_score_ = tuned.history, tuned.best_epoch, tuned.best_score
        self.metric_ = tuned.metric
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

    def _checked(self, X: Any, y: Any) -> tuple[Any, Any]:  # noqa: N803
        """Return rows and targets that can be indexed, of right shapes; the pipeline checks what rows hold."""
        if y is None:
            raise ValueError(f"{type(self).__name__} requires y to be passed, but the target y is None")
        if not hasattr(X, "iloc") and not issparse(X):
            X = np.asarray(X)  # noqa: N806
        validate_data(self, X, y, skip_check_array=True)
        check_consistent_length(X, y)
        return X, column_or_1d(y, warn=True)

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


def _weight_for(source: Any, weight: Any) -> dict[str, Any]:
    """Return the argument that tells ``fit`` of the pipeline the weights; nothing where it takes none."""
    if weight is None:
        return {}
    prefix, last = "", source
    while isinstance(last, Pipeline):
        name, last = last.steps[-1]
        prefix += f"{name}__"
    return {f"{prefix}sample_weight": weight} if has_fit_parameter(last, "sample_weight") else {}


class WindTunnelClassifier(ClassifierMixin, _FineTuned):  # type: ignore[misc]
    """A classification pipeline, fitted, translated to a network and trained further as a whole (section 5.2.4).

    Args:
        pipeline: A classifier or pipeline; its clone is fitted. One in ``FrozenEstimator`` is taken as it was fitted,
            for data that it has not seen. None: ``HistGradientBoostingClassifier``.
        level: Trained parts of trees, "L1" to "L4": see :class:`~mlsys_windtunnel.backends.soft.options.SoftOptions`.
        gate, init, scope, temperature, leaf_temperature, final_sharpness, dropout, rank: See there.
        epochs, lr, batch_size, schedule, loss, metric, patience, min_gain_se, ema, weight_decay, leaf_decay,
            embedding_rate: See :class:`~mlsys_windtunnel.finetune.options.TrainingOptions`.
        validation_fraction: Share of the rows held out to choose the best epoch by, where ``fit`` is given no
            ``eval_set``; 0 keeps the last epoch.
        checkpoint_dir, n_threads, n_processes, launcher, verbose: See there too.
        random_state: Seed of the hold-out, shuffling, dropout and the random start.
        class_weight: Class weights as in scikit-learn; multiply sample weights, the pipeline's too if it takes any.

    Attributes:
        source_: The fitted pipeline.
        module_: The fine-tuned :class:`~mlsys_windtunnel.WindTunnelModule`.
        history_: A dictionary for each epoch, the first before training: epoch, train_loss, valid_loss, valid_score,
            lr, seconds.
        best_epoch_: Number of the kept epoch; 0 is the start, where none was surely better.
        best_score_, metric_: Its score, larger is better, and what that is.
        update_: The module as it was fitted, and the labels that :meth:`update` remembers.
        classes_, n_features_in_, feature_names_in_: As in scikit-learn.

    Example:
        >>> model = WindTunnelClassifier(pipeline, level="L4").fit(X, y, eval_set=(X_val, y_val))  # doctest: +SKIP
        >>> model.predict_proba(X_test)  # doctest: +SKIP
    """

    def __init__(
        self,
        pipeline: Any = None,
        level: str = "L2",
        *,
        gate: str = "softmax",
        init: str = "residual",
        scope: str = "pipeline",
        temperature: float = 0.1,
        leaf_temperature: float | None = None,
        final_sharpness: float = 1.0,
        dropout: float = 0.0,
        rank: int | None = None,
        epochs: int = 10,
        lr: float = 2e-3,
        batch_size: int = 1024,
        schedule: str = "onecycle",
        loss: Any = "auto",
        metric: str = "auto",
        class_weight: Any = None,
        patience: int | None = None,
        min_gain_se: float = 1.0,
        ema: float | None = None,
        weight_decay: float = 1e-6,
        leaf_decay: float | None = None,
        embedding_rate: float = 2.5,
        validation_fraction: float = 0.1,
        checkpoint_dir: Any = None,
        random_state: Any = None,
        n_threads: int | None = None,
        n_processes: int = 1,
        launcher: str = "local",
        verbose: bool | None = None,
    ) -> None:
        options = {name: value for name, value in locals().items() if name not in ("self", "__class__", "class_weight")}
        super().__init__(**options)
        self.class_weight = class_weight

    @_has("predict_proba")  # type: ignore[untyped-decorator]  # scikit-learn has no types
    def predict_proba(self, X: Any) -> npt.NDArray[np.float64]:  # noqa: N803
        """Return probabilities ``[rows, classes]``."""
        result: npt.NDArray[np.float64] = self._fitted(X).predict_proba(X)
        return result

    @_has("predict_proba")  # type: ignore[untyped-decorator]  # scikit-learn has no types
    def predict_log_proba(self, X: Any) -> npt.NDArray[np.float64]:  # noqa: N803
        """Return logarithms of probabilities ``[rows, classes]``."""
        result: npt.NDArray[np.float64] = np.log(self.predict_proba(X))
        return result

    @_has("decision_function")  # type: ignore[untyped-decorator]
    def decision_function(self, X: Any) -> npt.NDArray[np.float64]:  # noqa: N803
        """Return decision values ``[rows]``, or ``[rows, classes]`` for more than two."""
        result: npt.NDArray[np.float64] = self._fitted(X).decision_function(X)
        return result

    def _source(self) -> Any:
        return HistGradientBoostingClassifier() if self.pipeline is None else self.pipeline

    def _checked(self, X: Any, y: Any) -> tuple[Any, Any]:  # noqa: N803
        X, y = super()._checked(X, y)  # noqa: N806
        check_classification_targets(y)
        return X, y

    def _weighted(self, y: Any, weight: Any) -> Any:
        weight = super()._weighted(y, weight)
        if self.class_weight is None:
            return weight
        of_row = compute_sample_weight(self.class_weight, y)
        return of_row if weight is None else of_row * weight


class WindTunnelRegressor(RegressorMixin, _FineTuned):  # type: ignore[misc]
    """A regression pipeline, fitted, translated to a network and trained further as a whole.

    Parameters and attributes are those of :class:`WindTunnelClassifier` without ``class_weight`` and ``classes_``; a
    ``pipeline`` of None is ``HistGradientBoostingRegressor``.
    """

    def _source(self) -> Any:
        return HistGradientBoostingRegressor() if self.pipeline is None else self.pipeline
