"""One iteration as a column of the score: the kinds of its squares and the split of its time. No clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlsys_serving.watch import Board, Kind, Square

_DECAY = 0.98  # weight of the past at each new iteration: some fifty count


@dataclass(frozen=True, slots=True)
class Part:
    """One request's part of an iteration that ran."""

    request_id: str
    num_rows: int  # tokens that ran, guesses among them
    is_decode: bool  # one token after others, and guesses
    num_new: int  # tokens that came of it
    block_table: tuple[int, ...]
    num_cached: int = 0  # of its prompt, found in kept blocks; with its first token
    num_prompt_tokens: int | None = None
    max_new_tokens: int | None = None


class PrefillSplit:
    """Split of an iteration's time between prefill and decode, by least squares over recent decode-only iterations.

    Decodes alone take ``fixed + n * each`` milliseconds; the rest of a mixed iteration is its prefills'.

    Example:
        >>> split = PrefillSplit()
        >>> for n in (1, 2, 4, 8):
        ...     _ = split.divide(10.0 + n, num_decode_rows=n, num_prefill_rows=0)
        >>> {cause: round(part) for cause, part in split.divide(40.0, num_decode_rows=2, num_prefill_rows=64).items()}
        {'decode': 12, 'prefill': 28}
    """

    def __init__(self) -> None:
        self._weight = self._n = self._nn = self._t = self._nt = 0.0

    def divide(self, ms: float, *, num_decode_rows: int, num_prefill_rows: int) -> dict[str, float]:
        """Return the milliseconds of an iteration by cause: ``decode``, ``prefill``. Learns from it."""
        if not num_prefill_rows:
            self._learn(ms, num_decode_rows)
            return {"decode": ms}
        if not num_decode_rows:
            return {"prefill": ms}
        alone_ms = self.decodes_ms(num_decode_rows)
        if alone_ms is None:
            alone_ms = ms * num_decode_rows / (num_decode_rows + num_prefill_rows)
        decode_ms = min(alone_ms, ms)
        return {"decode": decode_ms, "prefill": ms - decode_ms}

    def decodes_ms(self, num_rows: int) -> float | None:
        """Return the estimated time of an iteration of ``num_rows`` decodes alone; None: none was seen."""
        if not self._weight:
            return None
        mean_n, mean_t = self._n / self._weight, self._t / self._weight
        variance = self._nn / self._weight - mean_n * mean_n
        covariance = self._nt / self._weight - mean_n * mean_t
        each = max(0.0, covariance / variance) if variance > 1e-9 else 0.0
        return max(0.0, mean_t + each * (num_rows - mean_n))

    def _learn(self, ms: float, n: int) -> None:
        self._weight = _DECAY * self._weight + 1
        self._n = _DECAY * self._n + n
        self._nn = _DECAY * self._nn + n * n
        self._t = _DECAY * self._t + ms
        self._nt = _DECAY * self._nt + n * ms


class IterationFeed:
    """Writer of iterations to a board. From one thread at a time.

    Args:
        board: Where they go; None: it is set before the first comes.
    """

    def __init__(self, board: Board | None = None) -> None:
        self._board = board
        self._splits: dict[int, PrefillSplit] = {}  # by lane
        self._preempted: list[str] = []  # not on the board yet
        self._behind: set[str] = set()  # requests that compute again what they had computed
        self._interrupted: set[str] = set()  # requests whose worker has died, until they go on

    @property
    def board(self) -> Board:
        """Where iterations go."""
        assert self._board is not None, "nobody has looked yet"
        return self._board

    @board.setter
    def board(self, board: Board) -> None:
        self._board = board

    def opened(self, request_id: str, at_s: float, facts: dict[str, int | None]) -> None:
        """Note that a request was submitted."""
        self.board.opened(request_id, at_s=at_s, **facts)

    def closed(self, request_id: str, reason: str, at_s: float) -> None:
        """Note that a request has left."""
        self.board.closed(request_id, reason, at_s=at_s)

    def preempted(self, request_id: str) -> None:
        """Note that a request's K/V blocks go to others."""
        self._preempted.append(request_id)
        self._behind.add(request_id)

    def interrupted(self, request_id: str) -> None:
        """Note that the worker of a running request has died; where its blocks are left, it goes on with a decode."""
        self._behind.add(request_id)
        self._interrupted.add(request_id)

    def add(
        self, start_s: float, end_s: float, parts: Sequence[Part], num_free_blocks: int | None = None, lane: int = 0
    ) -> None:
        """Add a column.

        Args:
            start_s: When the iteration began, on the board's clock.
            end_s: When it ended.
            parts: Its requests.
            num_free_blocks: K/V blocks that nobody holds.
            lane: Number of the replica.
        """
        board = self.board
        # The next iteration is made before this one is told of: whoever ran in this one was preempted after it.
        ran = {part.request_id for part in parts}
        preempted = [request_id for request_id in self._preempted if request_id not in ran]
        self._preempted = [request_id for request_id in self._preempted if request_id in ran]
        squares = [Square(board.row(request_id).number, Kind.PREEMPTED, 0) for request_id in preempted]
        tables: dict[int, tuple[int, ...]] = {}
        num_decode_rows = num_prefill_rows = 0
        for part in parts:
            row = board.row(
                part.request_id, num_prompt_tokens=part.num_prompt_tokens, max_new_tokens=part.max_new_tokens
            )
            tables[row.number] = part.block_table
            if part.num_cached:
                board.note_cached(row, part.num_cached)
            if part.is_decode:
                num_decode_rows += part.num_rows
                is_guessed = part.num_new > 1
                kind, num_tokens = (Kind.GUESSED, part.num_new) if is_guessed else (Kind.DECODE, 1)
                if part.request_id in self._interrupted:
                    kind = Kind.RECOVERED
                squares.append(Square(row.number, kind, num_tokens, part.num_rows - 1))
            else:
                num_prefill_rows += part.num_rows
                kind = Kind.RECOVERED if part.request_id in self._behind else Kind.PREFILL
                squares.append(Square(row.number, kind, part.num_rows))
            self._interrupted.discard(part.request_id)
            if part.num_new and part.request_id not in self._preempted:
                self._behind.discard(part.request_id)
        split = self._splits.setdefault(lane, PrefillSplit())
        split_ms = split.divide(
            1000 * (end_s - start_s), num_decode_rows=num_decode_rows, num_prefill_rows=num_prefill_rows
        )
        board.add(start_s, end_s, squares, split_ms=split_ms, lane=lane, num_free_blocks=num_free_blocks, tables=tables)
