"""Certainty of a classifier's scores: the rule by which requests leave early, or go on to a larger model. Pure."""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
from mlsys_core.errors import InvalidInputError

Rule = Literal["confidence", "margin", "entropy"]
RULES: tuple[str, ...] = get_args(Rule)


def certainty(scores: npt.NDArray[Any], rule: str = "confidence") -> npt.NDArray[np.float64]:
    """Return how certain each row of scores is, from 0 to 1.

    Args:
        scores: [rows, classes], before a softmax.
        rule: ``confidence``: the largest share of the softmax; ``margin``: by how much it leads the second;
            ``entropy``: 1 less the entropy of the shares over that of equal ones (BranchyNet's rule, turned round).

    Raises:
        InvalidInputError: There is no such rule, or the scores are no rows of two classes or more.

    Example:
        >>> scores = np.array([[0.0, 0.0], [0.0, 4.0]])
        >>> [certainty(scores, rule).round(2).tolist() for rule in RULES]
        [[0.5, 0.98], [0.0, 0.96], [0.0, 0.87]]
    """
    if rule not in RULES:
        raise InvalidInputError(f"there is no rule {rule!r}: give {', '.join(RULES)}")
    if scores.ndim != 2 or scores.shape[1] < 2:
        raise InvalidInputError(f"scores of shape {list(scores.shape)}: needed is [rows, classes], two classes or more")
    wide = scores.astype(np.float64)
    shares = np.exp(wide - wide.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    if rule == "confidence":
        return np.asarray(shares.max(1))
    if rule == "margin":
        top = np.partition(shares, -2, axis=1)
        return np.asarray(top[:, -1] - top[:, -2])
    logs = np.log(shares, out=np.zeros_like(shares), where=shares > 0)
    return np.asarray(1 + (shares * logs).sum(1) / np.log(shares.shape[1]))
