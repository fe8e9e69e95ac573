"""Slots of one stage's sums between machines; on each, its ranks meet in shared memory as on one host (ADR 22)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Mapping, Sequence

import torch
from mlsys_orca.parallel.placement import Placement
from mlsys_orca.parallel.shard import GroupBrokenError
from mlsys_orca.parallel.tensors.shared_memory import SharedReducer

from mlsys_ray.tensors import SUMS, TensorGroup, wait_for

_log = logging.getLogger(__name__)


def number_of(place: Placement) -> int:
    """Return a rank's number in its group; the master's is 0.

    Example:
        >>> number_of(Placement(stage=1, num_stages=2, rank=0, num_ranks=2))
        3
    """
    return 1 + place.stage * place.num_ranks + place.rank


def carriers_of(place: Placement, nodes: Sequence[object]) -> dict[int, int]:
    """Return, by rank of ``place``'s stage, the first rank on that one's node: who carries its slots.

    Args:
        place: Any of the stage.
        nodes: Of all places, stage after stage.

    Example:
        >>> carriers_of(Placement(rank=3, num_ranks=4), (7, 7, 8, 8))
        {0: 0, 1: 0, 2: 2, 3: 2}
    """
    own = nodes[place.stage * place.num_ranks :][: place.num_ranks]
    return {rank: list(own).index(node) for rank, node in enumerate(own)}


class SumsCarrier:
    """Carrier of one stage's slots between this host and the others.

    Args:
        reducer: The memory, as the first local rank has it.
        group: The tensors' way.
        local: Ranks of the stage on this host.
        others: Ranks on other hosts, with the number in the group of the process that carries for each.
    """

    def __init__(
        self, reducer: SharedReducer, group: TensorGroup, *, local: Collection[int], others: Mapping[int, int]
    ) -> None:
        self._reducer, self._group = reducer, group
        self._local, self._others = sorted(local), sorted(others.items())
        self._carriers = sorted(set(others.values()))
        self._views = {rank: reducer.view_of(rank) for rank in (*local, *others)}

    def start(self) -> None:
        """Carry in a thread, until a host is gone or the meetings are aborted."""
        threading.Thread(target=self._run, name="orca-sums", daemon=True).start()

    def _run(self) -> None:
        number = 1
        try:
            with torch.inference_mode():
                while self.carry(number):
                    number = (number + 1) % 2**32
        except GroupBrokenError as error:
            _log.debug("sums are carried no more: %s", error)
        self._reducer.abort()

    def carry(self, number: int) -> bool:
        """Carry the slots of one meeting; return False if it was aborted.

        Raises:
            GroupBrokenError: another host is gone.
        """
        num_floats = 0
        sending = []
        for rank in self._local:
            num_floats = self._views[rank].wait(number)
            if num_floats < 0:
                return False
            slot = self._reducer.slot(number, rank, num_floats)
            sending += [self._group.send(slot, carrier, SUMS + rank) for carrier in self._carriers if num_floats]
        for rank, carrier in self._others:
            if num_floats:
                self._group.receive(self._reducer.slot(number, rank, num_floats), carrier, SUMS + rank)
        for work in sending:
            wait_for(work)
        for rank, _ in self._others:
            self._views[rank].arrive(number, num_floats)
        return True
