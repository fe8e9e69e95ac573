"""Executors and buffer pairs as a state machine, without tensors (DVABatch, section 6, Figure 11).

Executor i reads boundary i and writes boundary i + 1; at every boundary there is one buffer for each pair. The right to
use pair j travels backwards: a buffer that was read is *invalid* until the executor behind it is active again. So two
pairs or more give a software pipeline, and one pair lets a single executor work at a time.

Two things the paper needs and does not write down are here too. A buffer counts the rows in it that nobody has read yet
(``unread``): after a split several batches read from one buffer, and it must not be overwritten before the last. And an
executor after which a batch is held, or from which nothing goes on, returns the pair as the last executor does.
"""

from __future__ import annotations

from enum import Enum

from mlsys_core.errors import InvalidInputError


class BufferState(Enum):
    """State of a buffer: which accesses it allows."""

    AVAILABLE = "available"
    INVALID = "invalid"  # may be written, not read
    INREADING = "inreading"
    INWRITING = "inwriting"


class ExecutorState(Enum):
    """State of an executor."""

    ACTIVE = "active"
    CHECKING = "checking"  # has pulled a batch whose pair is not legitimate yet
    WORKING = "working"
    INACTIVE = "inactive"  # no pair of it is legitimate


_FREE = (BufferState.AVAILABLE, BufferState.INVALID)


class BufferPairs:
    """The states of all executors and buffers of one model.

    Args:
        num_stages: executors.
        num_pairs: buffer pairs of each; 1 makes the executors work one at a time.

    Raises:
        InvalidInputError: a number is below 1.

    Example:
        >>> pairs = BufferPairs(num_stages=2, num_pairs=1)
        >>> pairs.begin(0, 0)
        True
        >>> pairs.finish(0, 0, num_read=2, num_written=2)
        >>> pairs.executors[0], pairs.begin(1, 0)
        (<ExecutorState.INACTIVE: 'inactive'>, True)
    """

    def __init__(self, num_stages: int, num_pairs: int) -> None:
        if num_stages < 1 or num_pairs < 1:
            raise InvalidInputError(f"num_stages={num_stages}, num_pairs={num_pairs}: at least 1 of each is needed")
        self.num_stages = num_stages
        self.num_pairs = num_pairs
        self.executors = [ExecutorState.ACTIVE] * num_stages
        self.buffers = [[BufferState.AVAILABLE] * num_pairs for _ in range(num_stages + 1)]
        self.unread = [[0] * num_pairs for _ in range(num_stages + 1)]
        self.reserved: dict[int, int] = {}  # pair of a stretched batch -> the stage after which it is held
        self._restore: list[BufferState] = [BufferState.AVAILABLE] * num_stages  # output after the task
        self._owed: list[set[int]] = [set() for _ in range(num_stages)]  # pairs read, not yet given back to i - 1

    def is_legitimate(self, stage: int, pair: int) -> bool:
        """Return whether ``stage`` may run a batch with ``pair`` (section 6.1); unread rows of others are kept."""
        output = stage + 1
        return (
            self.buffers[stage][pair] is BufferState.AVAILABLE
            and self.buffers[output][pair] in _FREE
            and (not self.unread[output][pair] or stage <= self.reserved.get(pair, -1))
        )

    def free_pair(self) -> int | None:
        """Return a pair with which a new batch may start now, or None."""
        return next((j for j in range(self.num_pairs) if j not in self.reserved and self.is_legitimate(0, j)), None)

    def begin(self, stage: int, pair: int) -> bool:
        """Note that ``stage`` pulls a batch with ``pair``; return whether it may work, else it is checking."""
        assert self.executors[stage] is not ExecutorState.WORKING
        if not self.is_legitimate(stage, pair):
            self.executors[stage] = ExecutorState.CHECKING
            return False
        self.executors[stage] = ExecutorState.WORKING
        self._restore[stage] = self.buffers[stage + 1][pair]
        self.buffers[stage][pair] = BufferState.INREADING
        self.buffers[stage + 1][pair] = BufferState.INWRITING
        return True

    def finish(self, stage: int, pair: int, *, num_read: int, num_written: int, returns: bool = False) -> None:
        """Note that ``stage`` has run a batch with ``pair``.

        Args:
            stage: the executor.
            pair: the pair it used.
            num_read: rows that were waiting in its input and are read now.
            num_written: rows it leaves in its output for the next executor; 0 for the last.
            returns: nothing goes on from here by itself, so the pair goes back as from the last executor.
        """
        self._end(stage, pair, input_state=BufferState.INVALID)
        self.unread[stage][pair] -= num_read if stage else 0
        self.unread[stage + 1][pair] += num_written
        if stage:
            self._owed[stage].add(pair)
        if returns or stage == self.num_stages - 1:
            self.buffers[stage][pair] = BufferState.AVAILABLE
        self.update_executors()

    def retry(self, stage: int, pair: int) -> None:
        """Note that ``stage`` has failed with ``pair``, and that its input will be read again."""
        self._end(stage, pair, input_state=BufferState.AVAILABLE)
        self.update_executors()

    def discard(self, stage: int, pair: int, num: int) -> None:
        """Give up ``num`` rows that wait for ``stage``; when none is left the pair goes back."""
        if stage:
            self.unread[stage][pair] -= num
            if not self.unread[stage][pair]:
                self._owed[stage].add(pair)
        self.update_executors()

    def hold(self, stage: int, pair: int) -> None:
        """Keep what ``stage`` writes until later parts of its batch come, and open the way for them.

        Only they may use the pair up to there.
        """
        self.reserved[pair] = stage
        behind = stage - 1 if self.buffers[stage][pair] is BufferState.INREADING else stage
        if behind >= 0 and self.buffers[behind][pair] is BufferState.INVALID:
            self.buffers[behind][pair] = BufferState.AVAILABLE
        self.update_executors()

    def release(self, pair: int, *, is_empty: bool) -> None:
        """End the hold, and close the way that was opened for later parts.

        The pair comes back from who reads what was held, as without a hold; at once if nothing was left (``is_empty``).
        """
        stage = self.reserved.pop(pair)
        for index in range(stage + 1) if not is_empty else ():
            if self.buffers[index][pair] is BufferState.AVAILABLE:
                self.buffers[index][pair] = BufferState.INVALID
            if index:
                self._owed[index].add(pair)
        self.update_executors()

    def update_executors(self) -> None:
        """Set every executor that is not at work active or inactive; active ones give back the pairs they owe.

        From the last to the first: what an executor gives back matters only to those before it.
        """
        for stage in reversed(range(self.num_stages)):
            state = self.executors[stage]
            if state is ExecutorState.WORKING:
                continue
            if state is not ExecutorState.CHECKING:
                if not any(self.is_legitimate(stage, pair) for pair in range(self.num_pairs)):
                    self.executors[stage] = ExecutorState.INACTIVE
                    continue
                self.executors[stage] = ExecutorState.ACTIVE
            for pair in [pair for pair in self._owed[stage] if not self.unread[stage][pair]]:
                self._owed[stage].discard(pair)
                self._legitimise(stage - 1, pair)

    def leave_checking(self, stage: int) -> None:
        """Make the executor active or inactive again: the batch that ``stage`` had pulled is gone, or may run."""
        if self.executors[stage] is ExecutorState.CHECKING:
            self.executors[stage] = ExecutorState.ACTIVE
            self.update_executors()

    def _legitimise(self, boundary: int, pair: int) -> None:
        if self.buffers[boundary][pair] is BufferState.INWRITING:  # its writer puts this back when it ends
            self._restore[boundary - 1] = BufferState.AVAILABLE
        elif self.buffers[boundary][pair] is BufferState.INVALID:
            self.buffers[boundary][pair] = BufferState.AVAILABLE

    def _end(self, stage: int, pair: int, *, input_state: BufferState) -> None:
        assert self.executors[stage] is ExecutorState.WORKING
        self.executors[stage] = ExecutorState.ACTIVE  # or inactive: update_executors() decides
        self.buffers[stage][pair] = input_state
        self.buffers[stage + 1][pair] = self._restore[stage]
