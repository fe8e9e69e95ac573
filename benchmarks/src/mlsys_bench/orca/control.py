"""Processor time of control in a divided engine: ``mlsys bench orca-control``.

One iteration's messages go through a master's executor and a rank's loop in this process, over their own sockets and
memory, with a part that computes nothing. So no process is woken, and what is measured is the work alone: the least of
many turns, which other users of the machine hardly change. What ``mlsys orca bench scale`` measures beyond it is waking
processes, and waiting for cores and for other ranks.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from mlsys_core.report import Section
from mlsys_orca.parallel import messages
from mlsys_orca.parallel.channels import RankLinks, SocketChannel
from mlsys_orca.parallel.executor import MasterLinks, ParallelExecutor
from mlsys_orca.parallel.placement import Placement
from mlsys_orca.parallel.rank import Rank
from mlsys_orca.parallel.tensors.ring import Results, new_memory
from mlsys_orca.scheduling.batch import BatchBuilder, IterationBatch, SamplingParams

from mlsys_bench.harness.text import rows_section

if TYPE_CHECKING:
    from mlsys_core.bench import BenchContext

CASES = ((1, 64, 1), (1, 64, 2), (1, 64, 4), (8, 64, 2), (8, 2048, 2))  # requests, tokens of context, ranks


@dataclass(frozen=True, slots=True)
class Control:
    """Microseconds of one iteration's control on its way through one stage."""

    requests: int
    context: int  # tokens behind each
    ranks: int  # of the stage
    message_bytes: int
    send_us: float  # the master encodes a step and sends it
    forward_us: float  # the controller receives, passes on to the other ranks, decodes
    begin_and_end_us: float  # tensors of ids and positions, room for results, the word that they are there
    results_us: float  # the master hears it and chooses the tokens
    sum_us: float


class _Nothing:
    """A part that makes its inputs, and computes nothing; its keys and values too."""

    needs_logits, block_size = False, 16

    def run(self, inputs: Any, states: Any, out: Any, kv_cache: Any) -> None:
        """Make the tensors that a part reads."""
        _ = inputs.token_ids, inputs.positions

    def copy_blocks(self, block_copies: Any) -> None:
        """Do nothing."""


def run(context: BenchContext) -> Section:
    """Return the section."""
    turns = 200 if context.is_quick else 2000
    with torch.inference_mode():
        rows = [_measured(*case, turns=turns) for case in CASES]
    return rows_section("Orca: processor time of control", rows, f"Decodes of greedy requests; least of {turns} turns.")


def _measured(requests: int, context: int, ranks: int, *, turns: int) -> Control:
    batch = _batch(requests, context)
    with ExitStack() as stack:
        (up, to_master), (down, from_master) = _pair(stack), _pair(stack)
        followers = [_pair(stack) for _ in range(ranks - 1)]
        memory = new_memory("orca-control", 1 << 24)
        stack.callback(os.close, memory)
        results = Results(memory, depth=1, max_rows=requests, vocab_size=256, num_ranks=1)
        part: Any = _Nothing()
        links = RankLinks(
            up=to_master,
            down=from_master,
            onward=[out for out, _ in followers],
            states_in=None,
            states_out=None,
            results=results.of_rank(0),
        )
        rank = Rank(part, links, lambda _: part, hello=messages.Hello(0, 0, "", "", "", needs_logits=False, nbytes=0))
        rank._cache = part
        master = ParallelExecutor(
            MasterLinks(down=down, ups=[(Placement(), up)], results=results), max_in_flight=1, finds_largest=True
        )
        best = [float("inf")] * 4
        for _ in range(turns):
            best = [min(pair) for pair in zip(best, _turn(master, rank, links, batch), strict=True)]
            for _, end in followers:
                end.receive()
        nbytes = master.num_sent_nbytes // turns
    send_us, forward_us, begin_and_end_us, results_us = (1e6 * part_s for part_s in best)
    return Control(requests, context, ranks, nbytes, send_us, forward_us, begin_and_end_us, results_us, 1e6 * sum(best))


def _turn(master: ParallelExecutor, rank: Rank, links: RankLinks, batch: IterationBatch) -> Sequence[float]:
    """Run one iteration; return the seconds of its four pieces."""
    times = [time.perf_counter()]
    master.submit(batch)
    master.wait(0)  # sends it, and does not wait
    times.append(time.perf_counter())
    payload = links.down.receive()
    assert payload is not None
    for channel in links.onward:
        channel.send(payload)
    step = messages.decode_to_rank(payload)
    times.append(time.perf_counter())
    rank._step(step)
    times.append(time.perf_counter())
    assert master.wait(None) is not None
    times.append(time.perf_counter())
    return [after - before for before, after in pairwise(times)]


def _pair(stack: ExitStack) -> tuple[SocketChannel, SocketChannel]:
    ends = [SocketChannel(end) for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)]
    for end in ends:
        stack.callback(end.close)
    return ends[0], ends[1]


def _batch(requests: int, context: int) -> IterationBatch:
    builder, num_blocks = BatchBuilder(), context // 16 + 1
    for index in range(requests):
        table = tuple(range(index * num_blocks, (index + 1) * num_blocks))
        sampling = SamplingParams()
        builder.add(f"r{index}", (5,), num_computed_tokens=context, block_table=table, sampling=sampling)
    return builder.build()
