"""Comparison of memory's bytes with what they were, by all workers of a team."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from mlsys_nimble.backends.cpu.library import Kernel, load
from mlsys_nimble.backends.cpu.replay import ReplayPlan, Team
from mlsys_nimble.planning.planner import Assignment, Piece
from mlsys_nimble.state.digest import address_arrays
from mlsys_nimble.state.ranges import Piece as Memory

_NBYTES_PER_S = 10e9  # that a thread reads: what one claim takes follows from it
_WORTH_NBYTES = 256 * 1024  # from which on a second worker is woken


class Comparison:
    """Record of memory's bytes, which a team of workers compares with what they are.

    Args:
        pieces: Addresses and bytes; the caller keeps the memory alive.
        team: Workers that read them.
        num_workers: Their number.
    """

    def __init__(self, pieces: Sequence[Memory], team: Team, num_workers: int) -> None:
        self.nbytes = sum(nbytes for _, nbytes in pieces)
        self._has_changed = ctypes.c_int32(0)
        addresses, sizes = address_arrays(pieces)
        arguments = {
            "addresses": ctypes.addressof(addresses),
            "nbytes": ctypes.addressof(sizes),
            "count": len(pieces),
            "fault": ctypes.addressof(self._has_changed),
        }
        self._kernel = Kernel(load(), "comparison", arguments, fault=self._has_changed)
        shares = num_workers if self.nbytes >= _WORTH_NBYTES else 1
        lists = tuple((Piece(0, share, shares),) for share in range(shares))
        seconds = self.nbytes / _NBYTES_PER_S
        self._plan = ReplayPlan(Assignment(lists, seconds / shares), {0: self._kernel}, num_workers, {0: seconds})
        self._team = team

    def is_same(self, *, has_team: bool = True) -> bool:
        """Return whether all bytes are what they were; false ever after a look that found others.

        Args:
            has_team: Whether the team is idle and the caller's alone; if not, the caller reads all by itself.
        """
        if self.nbytes and has_team:
            self._team.run(self._plan)
        elif self.nbytes:
            self._kernel.run()
        return not self._has_changed.value
