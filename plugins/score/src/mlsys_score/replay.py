"""The same requests under another policy: its own scheduler in virtual time, with the recorded iterations' costs.

The simulation is core's loop over the policy's scheduler, so order, batches, blocks and preemptions are those that the
policy would decide. An iteration costs what one like it cost in the recording, by its decode and prefill rows. Prompts
have no text: what a request had found in kept blocks counts as free again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from mlsys_core.errors import InvalidInputError
from mlsys_core.loop import Finished, SimulatedExecutor, simulate
from mlsys_core.loop.clock import VirtualClock
from mlsys_core.plugins import Registry
from mlsys_orca.engine.core import pool_of
from mlsys_orca.engine.settings import EngineConfig, EngineShape
from mlsys_orca.engine.watching.feed import IterationFeed
from mlsys_orca.engine.watching.local import parts_of
from mlsys_orca.scheduling.batch import GenerationRequest, IterationBatch, IterationOutput, SampledToken
from mlsys_orca.scheduling.block_tables import BlockTables
from mlsys_orca.scheduling.policy import make_scheduler

from mlsys_score.board import Board

if TYPE_CHECKING:
    from mlsys_score.recording import ScoreRecording

_MAX_TOKENS = 400_000  # of all requests together: seconds of work
_MAX_COLUMNS = 20_000


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a recording."""

    at_s: float
    request: GenerationRequest


def replay(
    recording: ScoreRecording, policy: str, *, shape: EngineShape, config: EngineConfig, registry: Registry
) -> dict[str, Any]:
    """Return the recording that ``policy`` would have given, in the JSON form of ``Board.snapshot``.

    Args:
        recording: Of an Orca server.
        policy: A scheduling policy's registered name.
        shape: Limits: those of this server's engine.
        config: Likewise.
        registry: Where the policy is looked up.

    Raises:
        InvalidInputError: the recording is another system's, has no request or too many tokens, or there is no such
            policy.
    """
    if recording.system != "orca":
        raise InvalidInputError(f"a recording of {recording.system!r} has no iterations: replay one of Orca")
    arrivals = arrivals_of(recording, max_model_len=shape.max_model_len)
    options: Mapping[str, Any] = config.policy_options if policy == config.policy else {}
    scheduler = make_scheduler(
        policy,
        registry,
        block_tables=(
            tables := BlockTables(num_blocks=shape.num_blocks, block_size=shape.block_size, num_states=shape.num_states)
        ),
        max_batch_size=config.max_batch_size,
        max_model_len=shape.max_model_len,
        options=options,
    )
    cost = _Cost(recording)
    clock = VirtualClock()
    executor: SimulatedExecutor[IterationBatch, IterationOutput] = SimulatedExecutor(cost.seconds, _output)
    facts = {**recording.facts, "policy": policy, "simulated": True}
    board = Board(system="orca", unit="iteration", facts=lambda: facts, max_columns=_MAX_COLUMNS, clock=clock.now)
    listener = _Listener(board, arrivals, executor, tables)
    if (pool := pool_of(scheduler)) is not None:
        pool.on_preempted = listener.feed.preempted
    trace = [(arrival.at_s, arrival.request) for arrival in arrivals]
    simulate(scheduler, executor, trace, clock=clock, listener=listener)
    return board.snapshot()


def arrivals_of(recording: ScoreRecording, *, max_model_len: int) -> list[Arrival]:
    """Return the requests of a recording by time; an answer is as long as it was there.

    Raises:
        InvalidInputError: there is none, or they have too many tokens.
    """
    first_ms: dict[int, float] = {}
    num_new: dict[int, int] = {}
    has_recovered: set[int] = set()
    for column in recording.columns:
        for row, kind, num_tokens, _ in column.squares:
            first_ms.setdefault(row, column.t)
            if kind == "r" and row in num_new:
                has_recovered.add(row)
            if kind in "dg":
                num_new[row] = num_new.get(row, 0) + num_tokens + (row in has_recovered)  # what it recovered with
                has_recovered.discard(row)
    arrivals, total = [], 0
    for recorded in recording.rows:
        if recorded.prompt is None or recorded.row not in first_ms:
            continue
        at_ms = first_ms[recorded.row] if recorded.opened is None else recorded.opened
        answer = 1 + num_new.get(recorded.row, 0)  # one comes with the prefill
        num_prompt = min(max(1, recorded.prompt - recorded.cached), max_model_len - answer)
        total += max(0, num_prompt) + answer
        if num_prompt < 1 or total > _MAX_TOKENS:
            raise InvalidInputError(
                f"the requests have over {_MAX_TOKENS} tokens together, or more than a context of {max_model_len}: "
                "replay a shorter recording"
            )
        request = GenerationRequest(
            request_id=f"row {recorded.row}",
            # No two prompts begin alike: what was shared is taken out already.
            prompt_token_ids=(recorded.row, *range(1, num_prompt)),
            max_new_tokens=answer,
        )
        arrivals.append(Arrival(max(0.0, at_ms / 1000), request))
    if not arrivals:
        raise InvalidInputError("the recording has no request that ran: let some run, and record again")
    return sorted(arrivals, key=lambda arrival: arrival.at_s)


class _Cost:
    """Seconds of an iteration, by least squares over the recorded ones."""

    def __init__(self, recording: ScoreRecording) -> None:
        samples = []
        for column in recording.columns:
            decodes = sum(1 + guesses for _, kind, _, guesses in column.squares if kind in "dg")
            prefills = sum(num for _, kind, num, _ in column.squares if kind in "pr")
            samples.append((column.ms, decodes, prefills))
        self._fixed, self._decode, self._prefill = fit_costs(samples)

    def seconds(self, batch: IterationBatch) -> float:
        num_decodes = sum(part.num_tokens == 1 and part.num_computed_tokens > 0 for part in batch.requests)
        num_prefills = batch.num_tokens - num_decodes
        ms = self._fixed + num_decodes * self._decode + num_prefills * self._prefill
        return max(ms, 0.001) / 1000


def _output(batch: IterationBatch) -> IterationOutput:
    return IterationOutput(tuple(SampledToken(part.request_id, 0) for part in batch.sampled))


class _Listener:
    """Writes the simulation to a board."""

    def __init__(
        self,
        board: Board,
        arrivals: list[Arrival],
        executor: SimulatedExecutor[IterationBatch, IterationOutput],
        tables: BlockTables,
    ) -> None:
        self.feed = IterationFeed(board)
        self._board, self._executor, self._tables = board, executor, tables
        self._arrivals, self._num_arrived, self._num_ran = arrivals, 0, 0

    def on_output(self, batch: IterationBatch, output: IterationOutput, now: float) -> None:
        """Note an iteration, and before it who came."""
        run = self._executor.runs[self._num_ran]
        self._num_ran += 1
        while self._num_arrived < len(self._arrivals) and self._arrivals[self._num_arrived].at_s <= now:
            arrival = self._arrivals[self._num_arrived]
            self._num_arrived += 1
            self._board.opened(
                arrival.request.request_id,
                at_s=arrival.at_s,
                num_prompt_tokens=len(arrival.request.prompt_token_ids),
                max_new_tokens=arrival.request.max_new_tokens,
            )
        self.feed.add(run.started_s, run.ended_s, parts_of(batch, output), num_free_blocks=self._tables.num_free_blocks)

    def on_finished(self, finished: Finished[Any], now: float) -> None:
        """Note who left."""
        self._board.closed(finished.request_id, finished.reason.value)


def fit_costs(samples: Sequence[tuple[float, int, int]]) -> tuple[float, float, float]:
    """Return (fixed, of a decode row, of a prefill row) in milliseconds, each 0 or more: least squares.

    Args:
        samples: (milliseconds, decode rows, prefill rows) of iterations, at least one.

    Example:
        >>> [round(cost, 3) for cost in fit_costs([(11, 1, 0), (12, 2, 0), (26, 0, 32), (27, 1, 32)])]
        [10.0, 1.0, 0.5]
    """
    times = np.array([ms for ms, _, _ in samples])
    inputs = np.array([(1.0, decodes, prefills) for _, decodes, prefills in samples])
    kept = [0, 1, 2]
    while kept:  # a negative cost is noise: leave its input out
        found = np.linalg.lstsq(inputs[:, kept], times, rcond=None)[0]
        if (found >= 0).all():
            costs = dict(zip(kept, found.tolist(), strict=True))
            return costs.get(0, 0.0), costs.get(1, 0.0), costs.get(2, 0.0)
        kept.pop(int(found.argmin()))
    return float(times.mean()), 0.0, 0.0
