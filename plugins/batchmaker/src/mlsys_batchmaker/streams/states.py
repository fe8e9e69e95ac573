"""States of streams: in slots of a pool, or in host memory while a stream rests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlsys_batchmaker.plan.spec import Port
from mlsys_batchmaker.streams.frames import Move, MoveKind, Stream


class StatePool:
    """States of all streams; one thread at a time moves them.

    Args:
        num_slots: streams whose states are in the pool.
        ports: the states of a stream.
    """

    def __init__(self, num_slots: int, ports: Sequence[Port]) -> None:
        self.arrays = [np.zeros((num_slots, *port.shape), dtype=port.dtype) for port in ports]  # [slot, *shape]
        self._host: dict[Stream, list[NDArray[Any]]] = {}  # states that are swapped out

    def make(self, moves: Sequence[Move]) -> None:
        """Move states in order; no batch that needs them has begun."""
        for move in moves:
            if move.kind is MoveKind.CLEAR:
                for state in self.arrays:
                    state[move.slot] = 0
            elif move.kind is MoveKind.OUT:
                self._host[move.stream] = [state[move.slot].copy() for state in self.arrays]
            elif move.kind is MoveKind.IN:
                for state, kept in zip(self.arrays, self._host.pop(move.stream), strict=True):
                    state[move.slot] = kept
            else:
                self._host.pop(move.stream, None)
