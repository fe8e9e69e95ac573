"""The loop that trains the factorisation estimators: Adam over shuffled batches, seeded, until the loss stays."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from mlsys_core.errors import InvalidInputError
from sklearn.base import BaseEstimator
from torch import Tensor

PATIENCE = 5  # epochs without progress after which training stops
LEAST = {  # what each parameter may be at least; whole numbers where these are
    "n_factors": 0,
    "max_iter": 1,
    "batch_size": 1,
    "learning_rate": 0.0,  # itself not allowed
    "alpha": 0.0,
    "tol": 0.0,
    "init_std": 0.0,
}


@dataclass(repr=False, eq=False)
class Factorization(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """Base of the factorisation estimators, which document the parameters."""

    n_factors: int = 8
    _: KW_ONLY
    learning_rate: float = 0.02
    max_iter: int = 100
    batch_size: int = 256
    alpha: float = 1e-6
    tol: float = 1e-4
    init_std: float = 0.01
    random_state: Any = None
    verbose: bool = False

    def check_parameters(self) -> None:
        """Refuse parameters out of their range.

        Raises:
            InvalidInputError: names the parameter, what it is and what is allowed.
        """
        for name, least in LEAST.items():
            value: Any = getattr(self, name)
            kind, word = (Integral, "a whole number") if isinstance(least, int) else (Real, "a finite number")
            is_number = isinstance(value, kind) and not isinstance(value, bool)
            if not is_number or not least <= float(value) < math.inf or (name == "learning_rate" and value == 0):
                bound = "above" if name == "learning_rate" else "from"
                raise InvalidInputError(f"{name} is {value!r}; {word} {bound} {least} is needed")


def minimise(
    estimator: Factorization,
    parameters: Sequence[Tensor],
    loss: Callable[[Tensor], Tensor],
    num_rows: int,
    *,
    generator: torch.Generator,
) -> int:
    """Train ``parameters`` in place.

    Args:
        estimator: Holds the options.
        parameters: Leaves that require gradients.
        loss: The mean loss of the rows whose indices, ``[batch]`` int64, it is given.
        num_rows: Rows of the data.
        generator: Shuffles.

    Returns:
        Epochs run: fewer than ``max_iter`` if the loss has not fallen by ``tol`` for several epochs.

    Raises:
        InvalidInputError: the loss is no longer finite.
    """
    from rich.console import Console
    from rich.progress import Progress

    optimizer = torch.optim.Adam(parameters, lr=estimator.learning_rate, weight_decay=estimator.alpha)
    best, num_stale = math.inf, 0
    with Progress(console=Console(stderr=True), disable=not estimator.verbose) as progress:
        task = progress.add_task(type(estimator).__name__, total=estimator.max_iter)
        for epoch in range(1, estimator.max_iter + 1):
            total = 0.0
            for rows in torch.split(torch.randperm(num_rows, generator=generator), estimator.batch_size):
                optimizer.zero_grad()
                value = loss(rows)
                torch.autograd.backward(value)
                optimizer.step()
                total += value.item() * len(rows)
            mean = total / num_rows
            if not math.isfinite(mean):
                raise InvalidInputError(
                    f"the loss is {mean} in epoch {epoch}: scale the features, or take a learning_rate below "
                    f"{estimator.learning_rate}"
                )
            num_stale = 0 if mean < best - estimator.tol else num_stale + 1
            best = min(best, mean)
            progress.update(task, advance=1, description=f"{type(estimator).__name__} loss {mean:.4g}")
            if num_stale == PATIENCE:
                return epoch
    return int(estimator.max_iter)


def seeded_generator(random_state: Any) -> torch.Generator:
    """Make a generator seeded by scikit-learn's ``random_state``: a number, a ``RandomState`` or None."""
    from sklearn.utils import check_random_state

    return torch.Generator().manual_seed(int(check_random_state(random_state).randint(np.iinfo(np.int32).max)))
