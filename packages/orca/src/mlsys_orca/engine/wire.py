"""Messages between a front and an engine's worker process: MessagePack, of the types below and no others.

A front gives each request a *handle*, a number that stays the same whichever worker serves it.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import msgspec
from mlsys_orca.engine.settings import EngineCounts
from mlsys_orca.scheduling.batch import (
    FinishedBy,
    GenerationRequest,
    Progress,
    SampledToken,
    SamplingParams,
    ScoredPrompt,
)

_SAMPLING = tuple(field.name for field in fields(SamplingParams) if field.init and field.name != "guide")
Logprobs = tuple[tuple[int, float], ...]


class Submit(msgspec.Struct, array_like=True, tag=0):
    """Front to worker: serve a request, from its beginning or from where another worker stopped."""

    handle: int
    prompt_token_ids: tuple[int, ...]
    max_new_tokens: int
    sampling: dict[str, Any]  # the fields of SamplingParams without the guide
    grammar: str | None  # the guide's, in llguidance's form
    stop_token_ids: tuple[int, ...]
    num_encoder_tokens: int
    adapter: str | None
    answer: tuple[int, ...]  # tokens that were generated before
    block_table: tuple[int, ...]  # K/V blocks that hold num_computed_tokens of its tokens; empty: none are left
    num_computed_tokens: int


class Cancel(msgspec.Struct, array_like=True, tag=1):
    """Front to worker: drop a request."""

    handle: int


class Start(msgspec.Struct, array_like=True, tag=2):
    """Front to worker: serve from now on; the first message."""

    replica: int  # whose K/V memory is the worker's
    block_tables: dict[int, tuple[int, ...]]  # by handle: blocks of requests that are to follow
    alone: int | None  # as of Alone
    kept_blocks: dict[int, bytes]  # digests by block, of contents that requests to come may share
    slowest_s: float  # of an iteration so far, by the worker before; 0: unknown
    most_work: float  # of an iteration so far
    kv_identity: str = ""  # of the keys and values that the blocks are in; another one has others


class Alone(msgspec.Struct, array_like=True, tag=3):
    """Front to worker: run one request alone, for one iteration, and then wait for the next of these messages.

    The others are held: they keep their blocks if they can.
    """

    handle: int | None  # None: all may run from now on


class Token(msgspec.Struct, array_like=True):
    """One token of one request."""

    handle: int
    token_id: int
    logprob: float | None
    top_logprobs: Logprobs
    num_cached_tokens: int


class Scored(msgspec.Struct, array_like=True):
    """Log-probabilities of a run of a prompt's tokens."""

    handle: int
    position: int
    tokens: tuple[tuple[int, float | None, Logprobs], ...]


class Seal(msgspec.Struct, array_like=True):
    """State of one request after an iteration: what another worker would need to go on."""

    handle: int
    num_computed_tokens: int
    block_table: tuple[int, ...] | None  # None: as told before
    num_rows: int = 0  # that the iteration ran of it, guesses among them


class Iteration(msgspec.Struct, array_like=True, tag=10):
    """Worker to front: an iteration has ended. What it says is sealed; what a worker had not said is done again."""

    tokens: tuple[Token, ...]
    scored: tuple[Scored, ...]
    seals: tuple[Seal, ...]
    counts: EngineCounts
    slowest_s: float
    most_work: float
    started_s: float  # when it ran, in seconds of time.perf_counter, which processes of a machine share
    ended_s: float

    def handles(self) -> set[int]:
        """Return the requests that it ran."""
        return {state.handle for state in self.seals} | {token.handle for token in self.tokens}


class Lost(msgspec.Struct, array_like=True, tag=11):
    """Worker to front: these requests' K/V blocks are about to be overwritten. Sent before they are."""

    handles: tuple[int, ...]


class Kept(msgspec.Struct, array_like=True, tag=15):
    """Worker to front: blocks whose contents requests may share from now on. Sent before any of them is overwritten."""

    changes: dict[int, bytes | None]  # digests by block; None: not any more


class Placed(msgspec.Struct, array_like=True, tag=12):
    """Worker to front: a request is about to run for the first time."""

    handle: int


class Ended(msgspec.Struct, array_like=True, tag=13):
    """Worker to front: a request has left."""

    handle: int
    finish_reason: FinishedBy | None  # None: it did not finish
    guide_failure: str | None
    error: str | None  # of a request that failed
    is_input_error: bool


class Ready(msgspec.Struct, array_like=True, tag=14):
    """Worker to front: the engine runs."""

    counts: EngineCounts
    kv_identity: str = ""  # of its keys and values: if it is not that of Start, all that were computed are lost


class Waiting(msgspec.Struct, array_like=True, tag=17):
    """Worker to front, again and again before Ready: its ranks are to come."""

    reason: str  # what is missing; empty: nothing, they are on their way


Command = Start | Submit | Cancel | Alone
Report = Iteration | Lost | Kept | Placed | Ended | Ready | Waiting
encode = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_report = msgspec.msgpack.Decoder(Report).decode


def submit_of(
    handle: int, request: GenerationRequest, *, answer: tuple[int, ...], block_table: tuple[int, ...], computed: int
) -> Submit:
    """Return the message that hands ``request`` to a worker."""
    sampling = request.sampling
    return Submit(
        handle=handle,
        prompt_token_ids=request.prompt_token_ids,
        max_new_tokens=request.max_new_tokens,
        sampling={name: getattr(sampling, name) for name in _SAMPLING},
        grammar=None if sampling.guide is None else sampling.guide.source,
        stop_token_ids=tuple(request.stop_token_ids),
        num_encoder_tokens=request.num_encoder_tokens,
        adapter=request.adapter,
        answer=answer,
        block_table=block_table,
        num_computed_tokens=computed,
    )


def request_of(message: Submit, sampling: SamplingParams, *, keeps_blocks: bool) -> GenerationRequest:
    """Return the request of ``message``, called by its handle.

    Args:
        message: As it came.
        sampling: Made of its parameters, with its guide.
        keeps_blocks: False: the policy cannot take blocks over, so its keys and values are computed again.
    """
    block_table = message.block_table if keeps_blocks else ()
    progress = None
    if message.answer or block_table:
        progress = Progress(message.answer, block_table, message.num_computed_tokens if block_table else 0)
    return GenerationRequest(
        request_id=str(message.handle),
        prompt_token_ids=message.prompt_token_ids,
        max_new_tokens=message.max_new_tokens,
        sampling=sampling,
        stop_token_ids=frozenset(message.stop_token_ids),
        num_encoder_tokens=message.num_encoder_tokens,
        adapter=message.adapter,
        progress=progress,
    )


def sampling_of(message: Submit) -> dict[str, Any]:
    """Return the keywords of the request's SamplingParams, without the guide; MessagePack has lists for tuples."""
    return {name: _tuples(value) for name, value in message.sampling.items()}


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def sampled(request_id: str, token: Token) -> SampledToken:
    """Return a token as fronts read it."""
    return SampledToken(request_id, token.token_id, token.logprob, token.top_logprobs, token.num_cached_tokens)


def scored(request_id: str, part: Scored) -> ScoredPrompt:
    """Return a prompt's log-probabilities as fronts read them."""
    tokens = tuple(SampledToken(request_id, token_id, logprob, top) for token_id, logprob, top in part.tokens)
    return ScoredPrompt(request_id, part.position, tokens)
