"""Policy I: cluster requests by input size and run small batches in parallel (DVABatch, section 7.2); token packing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from mlsys_core.serving.request import ServeRequest

from mlsys_dvabatch.policies.base import Mode, New, Policy, State, Stretch
from mlsys_dvabatch.policies.decisions import cluster, cluster_by_bounds

BOUNDS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


class InputPolicy(Policy):
    """Batches of similar lengths, padded within.

    At most ``max_batch_size`` requests are active. The window is the duration of the first stage at the largest batch.
    Literal: requests are admitted into whatever room there is once the oldest has waited for the window, and clustered
    by ``bounds``. Cost-aware: the window counts from the last admission, since room that is filled as it appears
    makes batches of one under overload; and clusters are those with the least waiting in all.

    Args:
        mode: which.
        bounds: upper bounds of the clusters of lengths.
        window_s: None takes it from the costs.
    """

    num_pairs: ClassVar[int] = 2

    def __init__(
        self, *, mode: Mode = "cost-aware", bounds: Sequence[int] = BOUNDS, window_s: float | None = None
    ) -> None:
        super().__init__(mode=mode)
        self.bounds = tuple(bounds)
        self.window_s = window_s

    def admit(self, state: State, now: float) -> Sequence[New | Stretch]:
        """As many as may be active, in clusters, when the window has passed or nothing is active."""
        room = state.max_batch_size - state.num_active
        if room < 1 or not self._is_due(state, room, now):
            return ()
        requests = state.take(room, now)
        lengths = [request.length for request in requests]
        if self.mode == "literal":
            clusters = cluster_by_bounds(lengths, self.bounds)
        else:
            clusters = cluster(state.costs, lengths, num_behind=state.num_behind(state.num_waiting))
        return [New([requests[position] for position in positions], can_stretch=False) for positions in clusters]

    def wake_at(self, state: State, now: float) -> float | None:
        """The window's end."""
        return self._due_s(state) if state.num_waiting and state.num_active < state.max_batch_size else None

    def _is_due(self, state: State, room: int, now: float) -> bool:
        if not state.num_active or state.is_draining:
            return True
        if self.mode == "literal" and state.num_waiting >= room:
            return True
        due_s = self._due_s(state)
        return due_s is None or now >= due_s

    def _due_s(self, state: State) -> float | None:
        since_s = state.oldest_s if self.mode == "literal" else state.last_admission_s
        if since_s is None:
            return None
        window_s = self.window_s
        if window_s is None:
            window_s = state.costs.stage_s(0, state.max_batch_size, max(1, round(state.mean_length)))
        return since_s + window_s


class PackedPolicy(Policy):
    """Batches without padding: the tokens of all requests in one row, for encoders (an "effective" transformer).

    Orthogonal to the paper's policies, as it says of ragged tensors; a strong rival on a CPU. Batches are bounded in
    tokens, since beyond a few hundred a larger one is no faster per token.

    Args:
        mode: accepted as for the others; there is one way.
        max_tokens: most units in a batch; a longer request runs alone.
    """

    is_packed: ClassVar[bool] = True
    num_pairs: ClassVar[int] = 2

    def __init__(self, *, mode: Mode = "cost-aware", max_tokens: int = 512) -> None:
        super().__init__(mode=mode)
        self.max_tokens = max_tokens

    def admit(self, state: State, now: float) -> Sequence[New | Stretch]:
        """A new batch of so many requests as the tokens allow."""
        if not state.can_begin():
            return ()
        taken: list[ServeRequest[Any]] = []
        num_tokens = 0
        while len(taken) < state.max_batch_size and num_tokens < self.max_tokens:
            request = state.take(1, now)
            if not request:
                break
            taken += request
            num_tokens += request[0].length
        return [New(taken, can_stretch=False)]
