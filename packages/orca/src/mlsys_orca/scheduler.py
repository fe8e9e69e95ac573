"""Iteration-level scheduling, as the fronts see it: requests and results; ``schedulers/`` has the policies.

The engine resolves a policy by name (:mod:`mlsys_orca.scheduling.policy`); :class:`IterationScheduler` is the paper's.
"""

from __future__ import annotations

from mlsys_orca.scheduling.orca import IterationScheduler
from mlsys_orca.scheduling.request import GenerationRequest, GenerationResult

__all__ = ["GenerationRequest", "GenerationResult", "IterationScheduler"]
