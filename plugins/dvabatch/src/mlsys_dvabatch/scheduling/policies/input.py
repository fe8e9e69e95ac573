"""Policy I: cluster requests by input size and run small batches (DVABatch, section 7.2); token packing."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar

from mlsys_core.loop.queue import ServeRequest

from mlsys_dvabatch.scheduling.costs import remaining_s
from mlsys_dvabatch.scheduling.policies.base import Mode, New, Policy, State, Stretch
from mlsys_dvabatch.scheduling.policies.decisions import BatchCost, cluster, cluster_by_bounds
from mlsys_dvabatch.scheduling.policies.planner import LONGEST_RUN_S, TASK_S
from mlsys_dvabatch.scheduling.table import Row

BOUNDS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
PATIENCE_S = 0.2  # after which a request is served before those that would be quicker


GroupOf = Callable[[Any], Hashable]  # payload -> requests of another group are not to share a batch with it


def best_batch(
    state: State,
    batch_s: BatchCost,
    now: float,
    *,
    patience_s: float,
    max_units: float = math.inf,
    group_of: GroupOf | None = None,
) -> list[ServeRequest[Any]]:
    """Take the batch to run next: among the clusters with the least total waiting, the one that serves most per second.

    Clusters lie within a group, where requests have one. Only the most urgent priority counts; a request that has
    waited for ``patience_s`` takes its cluster first. At most ``max_units`` in all, unless one request alone has more.
    """
    waiting = sorted(state.waiting.waiting(), key=lambda each: (each[0].priority, each[1]))[: state.max_batch_size]
    waiting = [(request, since_s) for request, since_s in waiting if request.priority == waiting[0][0].priority]
    lengths = [request.length for request, _ in waiting]
    load = min(state.utilisation(max(1, round(state.mean_length))), 0.95)
    num_behind = state.num_waiting * load / (1 - load)
    groups: dict[Hashable, list[int]] = {}
    for position, (request, _) in enumerate(waiting):
        groups.setdefault(None if group_of is None else group_of(request.payload), []).append(position)
    clusters = [
        [positions[place] for place in places]
        for positions in groups.values()
        for places in cluster(
            batch_s, [lengths[position] for position in positions], num_behind=num_behind, max_units=max_units
        )
    ]

    def seconds_each(positions: list[int]) -> float:
        units = [lengths[position] for position in positions]
        return batch_s(len(units), max(units), sum(units)) / len(units)

    overdue = now - waiting[0][1] > patience_s
    best = next(each for each in clusters if 0 in each) if overdue else min(clusters, key=seconds_each)
    return state.take_these([waiting[position][0] for position in sorted(best)])  # in order of arrival


class InputPolicy(Policy):
    """Batches of similar lengths, padded within.

    Literal: at most ``max_batch_size`` requests are active; they are admitted into whatever room there is once the
    oldest has waited for the window, the duration of the first stage at the largest batch, and clustered by ``bounds``.
    Cost-aware: whenever a batch can begin all that wait are clustered for the least waiting in all, and the cluster
    begins that serves most requests per second; so it needs no window, and a cluster grows as long as it waits.

    Args:
        mode: which.
        bounds: literal: upper bounds of the clusters of lengths.
        window_s: literal: None takes it from the costs.
        patience_s: cost-aware: a request that has waited so long is served next.

    Attributes:
        group_of: Cost-aware: group of a payload; requests of one group may share a batch. None: all may.
    """

    num_pairs: ClassVar[int] = 2
    group_of: GroupOf | None = None

    def __init__(
        self,
        *,
        mode: Mode = "cost-aware",
        bounds: Sequence[int] = BOUNDS,
        window_s: float | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        super().__init__(mode=mode)
        self.bounds = tuple(bounds)
        self.window_s = window_s
        self.patience_s = patience_s

    def admit(self, state: State, now: float) -> Sequence[New | Stretch]:
        """Return the best cluster when a batch can begin; literal: as many as may be active, after the window."""
        if self.mode == "cost-aware":
            if not state.can_begin():
                return ()
            costs = state.costs
            batch = best_batch(
                state,
                lambda num, longest, _: remaining_s(costs, 0, num, longest),
                now,
                patience_s=self.patience_s,
                group_of=self.group_of,
            )
            return [New(batch, can_stretch=False)]
        room = state.max_batch_size - state.num_active
        if room < 1 or not self._is_due(state, room, now):
            return ()
        requests = state.take(room, now)
        clusters = cluster_by_bounds([request.length for request in requests], self.bounds)
        return [New([requests[position] for position in positions], can_stretch=False) for positions in clusters]

    def run_to(self, row: Row, stage: int, state: State) -> int:
        """Return the last stage if the rest is short, since nothing is decided in between; else ``stage``."""
        if self.mode == "literal" or remaining_s(state.costs, stage, row.size, row.padded_length) > LONGEST_RUN_S:
            return stage
        return state.costs.num_stages - 1

    def wake_at(self, state: State, now: float) -> float | None:
        """Return the end of the window; None if none is open."""
        if self.mode == "cost-aware" or not state.num_waiting or state.num_active >= state.max_batch_size:
            return None
        return self._due_s(state)

    def _is_due(self, state: State, room: int, now: float) -> bool:
        if not state.num_active or state.is_draining or state.num_waiting >= room:
            return True
        due_s = self._due_s(state)
        return due_s is None or now >= due_s

    def _due_s(self, state: State) -> float | None:
        if state.oldest_s is None:
            return None
        window_s = self.window_s
        if window_s is None:
            window_s = state.costs.stage_s(0, state.max_batch_size, max(1, round(state.mean_length)))
        return state.oldest_s + window_s


class PackedPolicy(Policy):
    """Batches without padding: the tokens of all requests in one row, for encoders (an "effective" transformer).

    Orthogonal to the paper's policies, as it says of ragged tensors; a strong rival on a CPU. Literal: in order of
    arrival, up to ``max_tokens``, since beyond a few hundred a larger batch is no faster per token. Cost-aware: as
    Policy I, where a batch costs what as many requests of its mean length cost.

    Args:
        mode: which.
        max_tokens: most units in a batch; a longer request runs alone.
        patience_s: cost-aware: a request that has waited so long is served next.
    """

    is_packed: ClassVar[bool] = True
    num_pairs: ClassVar[int] = 2

    def __init__(self, *, mode: Mode = "cost-aware", max_tokens: int = 512, patience_s: float = PATIENCE_S) -> None:
        super().__init__(mode=mode)
        self.max_tokens = max_tokens
        self.patience_s = patience_s

    def admit(self, state: State, now: float) -> Sequence[New | Stretch]:
        """Return a new batch of as many requests as the token limit allows, or of the best of them."""
        if not state.can_begin():
            return ()
        if self.mode == "cost-aware":
            costs = state.costs
            batch = best_batch(
                state,
                lambda num, _longest, units: TASK_S + remaining_s(costs, 0, num, max(1, round(units / num))),
                now,
                patience_s=self.patience_s,
                max_units=self.max_tokens,
            )
            return [New(batch, can_stretch=False)]
        taken: list[ServeRequest[Any]] = []
        num_tokens = 0
        while len(taken) < state.max_batch_size and num_tokens < self.max_tokens:
            request = state.take(1, now)
            if not request:
                break
            taken += request
            num_tokens += request[0].length
        return [New(taken, can_stretch=False)]

    def ahead_after_s(self, requests: Sequence[ServeRequest[Any]], state: State) -> float | None:
        """Return half of the batch's time: late, for the sake of urgent requests that come meanwhile."""
        num, units = len(requests), sum(request.length for request in requests)
        return 0.5 * remaining_s(state.costs, 0, num, max(1, round(units / num)))

    def can_fill(self, state: State) -> bool:
        """Return whether as many units wait as a batch may have, or as many requests."""
        if state.num_waiting >= state.max_batch_size:
            return True
        return sum(request.length for request, _ in state.waiting.waiting()) >= self.max_tokens

    def run_to(self, row: Row, stage: int, state: State) -> int:
        """Return the last stage if the batch's tokens take a short time; else ``stage``. See Policy I."""
        rest_s = remaining_s(state.costs, stage, row.size, max(1, round(state.mean_length)))
        return state.costs.num_stages - 1 if rest_s <= LONGEST_RUN_S else stage
