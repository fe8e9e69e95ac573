"""Black boxes: a few numbers that each process writes into memory which outlives it.

Whoever watches reads in it when the process's present work began, by when it should end, and whose work it is: also
after the process has died. Written without locks, by one process; a reader may find a row half written, and reads
again.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Sequence

_WORK = struct.Struct("<QQQQ")  # pieces of work begun, the present one's begin and deadline (ns; 0: none), its owners
_RECEIVED = struct.Struct("<Q")
_OWNERS_AT = _WORK.size + _RECEIVED.size
_ROW_NBYTES = 1 << 14
MAX_OWNERS = (_ROW_NBYTES - _OWNERS_AT) // 8


class Boxes:
    """Rows of shared memory, one for each process; made before the first fork.

    Args:
        num_rows: Processes at a time, at most.

    Example:
        >>> box = Boxes(4).box(1)
        >>> box.begin([7, 9], limit_s=1.0)
        >>> box.owners(), box.is_late()
        ((7, 9), False)
        >>> box.end()
        >>> box.owners()
        ()
    """

    def __init__(self, num_rows: int) -> None:
        self._memory = mmap.mmap(-1, num_rows * _ROW_NBYTES)
        self.num_rows = num_rows

    def box(self, number: int) -> Box:
        """Return the row of process ``number``; numbers that are ``num_rows`` apart share one."""
        return Box(self._memory, number % self.num_rows * _ROW_NBYTES)


class Box:
    """One process's row; see :class:`Boxes`."""

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        self._memory, self._offset = memory, offset

    def clear(self) -> None:
        """Forget what a process before had written."""
        self._memory[self._offset : self._offset + _ROW_NBYTES] = bytes(_ROW_NBYTES)

    def begin(self, owners: Sequence[int], *, limit_s: float) -> None:
        """Note that work for ``owners`` begins now and should take ``limit_s`` seconds at most."""
        now, owners = time.monotonic_ns(), owners[:MAX_OWNERS]
        struct.pack_into(f"<{len(owners)}Q", self._memory, self._offset + _OWNERS_AT, *owners)
        self._write(self.num_begun + 1, now, now + int(limit_s * 1e9), len(owners))

    def end(self) -> None:
        """Note that the work has ended."""
        self._write(self.num_begun, 0, 0, 0)

    def receive(self) -> None:
        """Count a message that was taken; another thread than that of the work may."""
        _RECEIVED.pack_into(self._memory, self._offset + _WORK.size, self.num_received + 1)

    @property
    def num_received(self) -> int:
        """Messages taken so far."""
        return int(_RECEIVED.unpack_from(self._memory, self._offset + _WORK.size)[0])

    @property
    def num_begun(self) -> int:
        """Pieces of work begun so far."""
        return self._read()[0]

    def owners(self) -> tuple[int, ...]:
        """Return the owners of the work under way; empty: none is."""
        return struct.unpack_from(f"<{self._read()[3]}Q", self._memory, self._offset + _OWNERS_AT)

    def is_late(self) -> bool:
        """Return whether work is under way that should have ended."""
        deadline = self._read()[2]  # 0: none; it may be read amid a write, which begins with the other numbers
        return 0 < deadline < time.monotonic_ns()

    def _read(self) -> tuple[int, int, int, int]:
        return _WORK.unpack_from(self._memory, self._offset)

    def _write(self, *numbers: int) -> None:
        _WORK.pack_into(self._memory, self._offset, *numbers)
