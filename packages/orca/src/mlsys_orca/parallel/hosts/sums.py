"""Sums of ranks on several hosts: a thread carries the slots in which the ranks of a stage meet, and no sum changes.

On each host the ranks of a stage meet in shared memory that has slots for all of them
(``backends/native/meeting.h``). For each meeting the carrier waits for the local ranks, asleep on their futex, sends
what they have, receives the slots of the others into their places, and arrives for them. It runs in the first local
rank of a stage, beside the native program, which knows nothing of it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Mapping

import torch

from mlsys_orca.parallel.hosts.tensors import SUMS, TensorGroup, wait_for
from mlsys_orca.parallel.shard import GroupBrokenError
from mlsys_orca.parallel.tensors.shared_memory import SharedReducer

_log = logging.getLogger(__name__)


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
