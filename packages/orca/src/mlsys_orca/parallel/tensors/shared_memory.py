"""Memory in which the ranks of one stage on one host meet: partial sums, signals, and an end for all if one is gone.

What happens in it is ``backends/native/meeting.h``: the native program meets there once for each sum, torch's operators
and the embedding through :meth:`SharedReducer.exchange`.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from typing import TYPE_CHECKING, Any

from mlsys_core.errors import InvalidInputError

from mlsys_orca.model.config import ModelConfig
from mlsys_orca.parallel.shard import GroupBrokenError

if TYPE_CHECKING:
    from torch import Tensor

_MOST_ROWS = 512  # that the native program takes through all layers at once, at most (AMX)
_HEADER = 1024


class SharedReducer:
    """One rank's view of the memory; a :class:`~mlsys_orca.parallel.shard.Reducer`.

    Args:
        memory: Shared, all zeros before the first rank joins, of :meth:`nbytes_needed`: an anonymous mapping that ranks
            are forked with, or one of a memfd. A group has its own: it is not used again once a rank has left.
        config: The whole model's.
        rank: This process's.
        num_ranks: Ranks of the stage.

    Raises:
        InvalidInputError: the memory is too small.
    """

    def __init__(self, memory: mmap.mmap, config: ModelConfig, *, rank: int, num_ranks: int) -> None:
        from mlsys_orca.backends.native import library

        if len(memory) < (needed := self.nbytes_needed(config, num_ranks=num_ranks)):
            raise InvalidInputError(f"ranks meet in {needed} bytes of memory, not in {len(memory)}")
        self.rank, self.num_ranks = rank, num_ranks
        self.slot_size = _slot_size(config)
        self._memory = memory
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._native = library.load()
        if self._native.constants["MEETING_HEADER"] != _HEADER or num_ranks > self._native.constants["MAX_RANKS"]:
            raise InvalidInputError(f"{num_ranks} ranks cannot meet; at most 8 can")
        self._meeting = ctypes.c_void_p(self._native.orca_meeting(self._base, rank, num_ranks, self.slot_size))
        weakref.finalize(self, self._native.orca_free_meeting, self._meeting.value)

    @staticmethod
    def nbytes_needed(config: ModelConfig, *, num_ranks: int) -> int:
        """Return the bytes of memory that the ranks of a model need, in whole pages; untouched ones cost nothing."""
        nbytes = _HEADER + 2 * num_ranks * _slot_size(config) * 4
        return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE

    @classmethod
    def create(cls, config: ModelConfig, *, num_ranks: int) -> mmap.mmap:
        """Return new memory for ranks that are forked from this process, or run in its threads."""
        return mmap.mmap(-1, cls.nbytes_needed(config, num_ranks=num_ranks))

    @property
    def address(self) -> int:
        """Address of the native object through which programs meet."""
        assert self._meeting.value is not None
        return self._meeting.value

    def exchange(self, own: Tensor) -> list[Tensor]:
        """Return every rank's tensor; see :meth:`mlsys_orca.parallel.shard.Reducer.exchange`."""
        import torch

        flat = own.contiguous().view(-1)
        parts: list[list[Tensor]] = [[] for _ in range(self.num_ranks)]
        for start in range(0, max(1, len(flat)), self.slot_size):
            piece = flat[start : start + self.slot_size]
            first = self._native.orca_exchange(self._meeting, piece.data_ptr(), len(piece))
            if first < 0:
                raise GroupBrokenError("another rank of this stage is gone")
            for rank, found in enumerate(parts):
                offset = _HEADER + (first + rank * self.slot_size) * 4
                found.append(
                    torch.frombuffer(self._memory, dtype=torch.float32, count=max(1, len(piece)), offset=offset)[
                        : len(piece)
                    ]
                )
            if len(flat) > self.slot_size:  # the memory is used again
                for found in parts:
                    found[-1] = found[-1].clone()
        return [torch.cat(found).view(own.shape) if len(found) > 1 else found[0].view(own.shape) for found in parts]

    def view_of(self, rank: int) -> MeetingView:
        """Return the meetings as one of the ranks has them: to wait for it, or to arrive for it."""
        return MeetingView(self._native, self._base, rank, self.num_ranks, self.slot_size)

    def slot(self, number: int, rank: int, num_floats: int) -> Tensor:
        """Return the beginning of a rank's slot of meeting ``number``: fp32 [num_floats], in the memory itself."""
        import torch

        offset = _HEADER + ((number & 1) * self.num_ranks + rank) * self.slot_size * 4
        return torch.frombuffer(self._memory, dtype=torch.float32, count=max(1, num_floats), offset=offset)[:num_floats]

    def abort(self) -> None:
        """End all runs of the group; see :meth:`mlsys_orca.parallel.shard.Reducer.abort`."""
        self._native.orca_abort(self._meeting)


class MeetingView:
    """Meetings of a :class:`SharedReducer` as one rank has them, for who carries its slots to other machines."""

    def __init__(self, native: Any, base: int, rank: int, num_ranks: int, slot_size: int) -> None:
        self._native = native
        self._meeting = ctypes.c_void_p(native.orca_meeting(base, rank, num_ranks, slot_size))
        weakref.finalize(self, native.orca_free_meeting, self._meeting.value)

    def wait(self, number: int) -> int:
        """Sleep until the rank has arrived at a meeting; return the floats in its slot, or -1: it was aborted."""
        num_floats: int = self._native.orca_await(self._meeting, number)
        return num_floats

    def arrive(self, number: int, num_floats: int) -> None:
        """Say that the rank's slot of a meeting has so many floats."""
        self._native.orca_arrive(self._meeting, number, num_floats)


def _slot_size(config: ModelConfig) -> int:
    """Return the floats of a rank's slot: a token's states, or what each of its experts makes of them."""
    return _MOST_ROWS * config.hidden_size * max(1, config.num_chosen_experts)
