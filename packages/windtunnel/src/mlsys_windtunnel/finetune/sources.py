"""Questions that fine-tuning asks of the pipeline that it fits first."""

from __future__ import annotations

from typing import Any

from mlsys_core.errors import InvalidInputError
from sklearn.pipeline import Pipeline
from sklearn.utils.validation import has_fit_parameter


def refuse_ranker(source: Any) -> None:
    """Raise InvalidInputError for a pipeline that ends in a ranker."""
    while isinstance(source, Pipeline):
        source = source.steps[-1][1]
    if (name := type(source).__name__).endswith("Ranker"):
        raise InvalidInputError(
            f"{name} ranks rows within queries, which an estimator's fit is not told: fit it, and give its translation "
            "to fine_tune_ranker"
        )


def weight_for(source: Any, weight: Any) -> dict[str, Any]:
    """Return the argument that tells ``fit`` of the pipeline the weights; nothing where it takes none."""
    if weight is None:
        return {}
    prefix, last = "", source
    while isinstance(last, Pipeline):
        name, last = last.steps[-1]
        prefix += f"{name}__"
    return {f"{prefix}sample_weight": weight} if has_fit_parameter(last, "sample_weight") else {}
