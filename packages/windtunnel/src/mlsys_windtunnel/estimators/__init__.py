"""Estimators with the scikit-learn interface that WindTunnel's source has and scikit-learn lacks.

Categorical encoders (hash, binary, two-hot: dissertation, sections 5.2.3 and 5.4.1), leaves of trees as features, and
factorisation models. They
stand in any scikit-learn pipeline, and ``translate`` makes trainable modules of them. Importing this package alone
imports neither scikit-learn nor torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlsys_core.lazy import lazy_exports

if TYPE_CHECKING:
    from mlsys_windtunnel.estimators.categories import BinaryEncoder, HashEncoder, TwoHotEncoder
    from mlsys_windtunnel.estimators.factorization_machine import (
        FactorizationMachineClassifier,
        FactorizationMachineRegressor,
    )
    from mlsys_windtunnel.estimators.leaves import LeafEncoder
    from mlsys_windtunnel.estimators.matrix_factorization import MatrixFactorizationRegressor

__all__ = [
    "BinaryEncoder",
    "FactorizationMachineClassifier",
    "FactorizationMachineRegressor",
    "HashEncoder",
    "LeafEncoder",
    "MatrixFactorizationRegressor",
    "TwoHotEncoder",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "categories": ["BinaryEncoder", "HashEncoder", "TwoHotEncoder"],
        "factorization_machine": ["FactorizationMachineClassifier", "FactorizationMachineRegressor"],
        "leaves": ["LeafEncoder"],
        "matrix_factorization": ["MatrixFactorizationRegressor"],
    },
)
