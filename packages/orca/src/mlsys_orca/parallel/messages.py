"""Messages of a parallel engine's control channel: MessagePack, of the types below and no others.

The master sends a :class:`Step` for each iteration to the first stage's controller; every controller passes it on as
it came, to its ranks and to the next stage. It says what a rank needs to run its part of the model, and nothing of
sampling, which is the master's. The ranks of the last stage answer with :class:`Done`. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from mlsys_orca.scheduling.batch import BlockCopy, IterationBatch, RequestSlice


class Part(msgspec.Struct, array_like=True, frozen=True):
    """One request's rows of an iteration, those behind the rows of the part before."""

    num_tokens: int
    num_computed_tokens: int  # tokens whose keys and values are in the blocks already
    block_table: tuple[int, ...]


class Step(msgspec.Struct, array_like=True, tag=0, frozen=True):
    """Master to ranks: run one iteration."""

    number: int  # of the iteration, from 0 in each group: buffers of tensors are chosen by it
    token_ids: tuple[int, ...]  # [num_tokens]
    parts: tuple[Part, ...]
    block_copies: tuple[BlockCopy, ...]
    wanted: tuple[int, ...]  # rows whose logits the master reads, ascending
    needs_logits: bool  # False: where each row's largest logit is suffices


class Serve(msgspec.Struct, array_like=True, tag=1, frozen=True):
    """Master to ranks: use this replica's keys and values from now on; sent before the first step."""

    replica: int


class Hello(msgspec.Struct, array_like=True, tag=10, frozen=True):
    """Rank to master: it is there. A master that has other code or another model refuses it."""

    stage: int
    rank: int
    version: str  # of this package
    recipe: str  # of the compiled kernels; empty: there are none
    model: str  # digest of the model's configuration and the form of its weights
    needs_logits: bool  # the part needs all logits to find the largest one
    nbytes: int  # of its weights


class Serving(msgspec.Struct, array_like=True, tag=11, frozen=True):
    """Rank to master: nobody else writes to the replica's keys and values any more."""

    kv_identity: str = ""  # of their memory; another one has other contents


class Done(msgspec.Struct, array_like=True, tag=12, frozen=True):
    """Rank of the last stage to master: its part of an iteration's result can be read."""

    number: int
    run_s: float  # that it computed
    idle_s: float  # between the end of the iteration before and the begin of this one
    was_waiting: bool  # this step's message was there when the iteration before had ended


ToRank = Step | Serve
ToMaster = Hello | Serving | Done
encode = msgspec.msgpack.Encoder().encode
decode_to_rank = msgspec.msgpack.Decoder(ToRank).decode
decode_to_master = msgspec.msgpack.Decoder(ToMaster).decode


def step_of(number: int, batch: IterationBatch, *, wanted: Sequence[int], needs_logits: bool) -> Step:
    """Return the message that has ranks run ``batch``.

    Example:
        >>> from mlsys_orca.scheduling.batch import BatchBuilder
        >>> builder = BatchBuilder()
        >>> builder.add("a", (5, 6), num_computed_tokens=3, block_table=(9,), sampling=None)
        >>> step_of(0, builder.build(), wanted=[], needs_logits=False).parts[0].num_computed_tokens
        3
    """
    return Step(
        number,
        batch.token_ids,
        tuple(
            Part(
                request.stop - request.start,
                request.num_computed_tokens,
                request.block_table,
            )
            for request in batch.requests
        ),
        batch.block_copies,
        tuple(wanted),
        needs_logits,
    )


def batch_of(step: Step) -> IterationBatch:
    """Return the batch that a rank runs: that of the master without names and sampling parameters."""
    positions: list[int] = []
    requests: list[RequestSlice] = []
    start = 0
    for index, part in enumerate(step.parts):
        stop, first = start + part.num_tokens, part.num_computed_tokens
        positions.extend(range(first, first + part.num_tokens))
        requests.append(RequestSlice(str(index), start, stop, first, part.block_table, None))
        start = stop
    return IterationBatch(step.token_ids, tuple(positions), tuple(requests), step.block_copies)
