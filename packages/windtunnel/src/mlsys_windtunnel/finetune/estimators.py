"""scikit-learn estimators that fit a pipeline, translate it, and fine-tune the translation end to end."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from mlsys_core.errors import InvalidInputError
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.utils import check_array
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets

from mlsys_windtunnel.finetune.base import FineTunedBase


def _has(method: str) -> Any:
    def check(estimator: Any) -> bool:
        return hasattr(getattr(estimator, "module_", None) or estimator._source(), method)

    return available_if(check)


@dataclass(repr=False, eq=False)
class WindTunnelClassifier(ClassifierMixin, FineTunedBase):  # type: ignore[misc]
    """A classification pipeline, fitted, translated to a network and trained further as a whole (section 5.2.4).

    Args:
        pipeline: A classifier or pipeline; its clone is fitted. One in ``FrozenEstimator`` is taken as it was fitted,
            for data that it has not seen. None: ``HistGradientBoostingClassifier``.
        level: Trained parts of trees, "L1" to "L4": see :class:`~mlsys_windtunnel.backends.soft.options.SoftOptions`.
        gate, init, scope, temperature, leaf_temperature, dropout, rank: See there.
        epochs, lr, batch_size, schedule, loss, metric, patience, min_gain_se, ema, weight_decay, leaf_decay,
            embedding_rate: See :class:`~mlsys_windtunnel.finetune.options.TrainingOptions`.
        cv: Splits to choose the number of epochs by, where ``fit`` is given no ``eval_set``: a number of folds, a
            splitter of scikit-learn (``TimeSeriesSplit``, ``GroupKFold``) or an iterable; None: one, by chance.
        validation_fraction: Share of the rows that one split holds out; 0 chooses nothing and keeps the last epoch.
        members: Refits beside the pipeline's boosted trees, with a linear model and perceptrons, weighed by
            cross-validation (``cv``, else five folds) and added only where they surely pay. An answer costs as many
            times the trees. See :mod:`~mlsys_windtunnel.finetune.members`.
        warm_start: True trains what an earlier ``fit`` left further, on the new rows.
        checkpoint_dir, n_threads, verbose: See there too.
        random_state: Seed of the hold-out, shuffling, dropout and the random start.
        class_weight: Class weights as in scikit-learn; multiply sample weights, the pipeline's too if it takes any.

    Attributes:
        source_: The fitted pipeline.
        module_: The fine-tuned :class:`~mlsys_windtunnel.WindTunnelModule`.
        history_: A dictionary for each epoch, the first before training: epoch, train_loss, valid_loss, valid_score,
            lr, seconds.
        best_epoch_: Number of the kept epoch; 0 is the start, where none was surely better: ``module_`` is then the
            exact translation of ``source_``.
        best_score_, metric_: Its score, larger is better, and what that is.
        gain_, gain_se_: Gain over the source on the rows held out, and its standard error; NaN without any.
        shares_, members_gain_: With ``members``, the weight of each kind, and the loss that they save on the rows held
            out of their fits with its standard error; NaN without any.
        update_: The module as it was fitted, and the labels that :meth:`update` remembers.
        classes_, n_features_in_, feature_names_in_: As in scikit-learn.

    Example:
        >>> model = WindTunnelClassifier(pipeline, level="L4").fit(X, y, eval_set=(X_val, y_val))  # doctest: +SKIP
        >>> model.predict_proba(X_test)  # doctest: +SKIP
    """

    _: KW_ONLY
    class_weight: Any = None

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

    def _target(self, y: Any) -> Any:
        """Return labels ``[rows]``; several a row are refused."""
        shape = np.asarray(y).shape
        if len(shape) == 2 and shape[1] > 1:
            name = type(self._source()).__name__
            raise InvalidInputError(
                f"y has {shape[1]} labels a row (y should be a 1d array): {name} of several outputs is translated, "
                "but not fine-tuned; fit one WindTunnelClassifier for each column"
            )
        return super()._target(y)

    def _source(self) -> Any:
        return HistGradientBoostingClassifier() if self.pipeline is None else self.pipeline

    def _checked(self, X: Any, y: Any, *, reset: bool = True) -> tuple[Any, Any]:  # noqa: N803
        X, y = super()._checked(X, y, reset=reset)  # noqa: N806
        check_classification_targets(y)
        return X, y

    def _weighted(self, y: Any, weight: Any) -> Any:
        weight = super()._weighted(y, weight)
        if self.class_weight is None:
            return weight
        of_row = compute_sample_weight(self.class_weight, y)
        return of_row if weight is None else of_row * weight


class WindTunnelRegressor(RegressorMixin, FineTunedBase):  # type: ignore[misc]
    """A regression pipeline, fitted, translated to a network and trained further as a whole.

    Parameters and attributes are those of :class:`WindTunnelClassifier` without ``class_weight`` and ``classes_``; a
    ``pipeline`` of None is ``HistGradientBoostingRegressor``. Several numbers a row, ``[rows, outputs]``, are learnt
    where the pipeline takes them; loss and metric are means over the outputs, so scale outputs of unlike units.
    """

    def _target(self, y: Any) -> Any:
        """Return targets ``[rows]`` or ``[rows, outputs]``."""
        values = np.asarray(y)
        if values.ndim == 2 and values.shape[1] > 1:
            return check_array(values, dtype=np.float64)
        return super()._target(y)

    def _source(self) -> Any:
        return HistGradientBoostingRegressor() if self.pipeline is None else self.pipeline
