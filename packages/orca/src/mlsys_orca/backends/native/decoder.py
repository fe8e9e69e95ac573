"""A decoder that runs natively: the plan bound to packed weights."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from copy import copy
from ctypes import byref, c_int32, c_void_p
from typing import Any, Self

import numpy as np
import torch
from mlsys_core.errors import InvalidInputError, MlsysError
from mlsys_core.native import warn_without_kernels
from mlsys_orca.backends.native import library
from mlsys_orca.backends.native.binding import Binder
from mlsys_orca.backends.native.iteration import Iteration, NativeKVCache, Results, look_up_native
from mlsys_orca.backends.native.kept import Kept, is_without_memory
from mlsys_orca.backends.native.library import PANEL
from mlsys_orca.backends.native.lowering import lower
from mlsys_orca.backends.native.packing import Rows
from mlsys_orca.backends.native.plan_writer import LoweringError
from mlsys_orca.model.blocks import Decoder
from mlsys_orca.model.decoder import DecoderModel, ForwardInputs
from mlsys_orca.model.kv_cache import Empty, KVCache, kv_dtype_name
from mlsys_orca.model.layers import Rotaries, Rotary
from numpy.typing import NDArray
from torch import Tensor

_log = logging.getLogger(__name__)
_MOST_ROWS = 256  # that go through all layers at once: what lies between two operators stays in the caches; twice as
# many where AMX multiplies them, which would else wait for the weights
_SPINS = 2000  # pauses before a waiting thread sleeps: some 20 microseconds, an operator of a small batch
_DTYPES = (torch.float32, torch.bfloat16)
_ADDERS = {  # by struct
    "Gemm": "orca_add_gemm",
    "Attention": "orca_add_attention",
    "Normalise": "orca_add_normalise",
    "GatherRows": "orca_add_gather_rows",
    "Reduce": "orca_add_reduce",
    "Route": "orca_add_route",
    "Grouped": "orca_add_grouped",
    "Combine": "orca_add_combine",
    "Convolve": "orca_add_convolve",
    "Scan": "orca_add_scan",
    "Gate": "orca_add_gate",
}


class _Program(c_void_p):
    """The native program's handle; freed with the last decoder that holds it."""


class NativeDecoder:
    """A :class:`~mlsys_orca.model.decoder.DecoderModel` over the native program.

    A request's result does not depend on its neighbours: every sum runs in one order, whatever the batch.

    Args:
        decoder: Gives its weights away and can't run itself any more.
        kept: The copy that has the weights which ``decoder`` only says the shapes of.
        activations: ``"int8"``: rows that meet packed codes are quantised too.
        part: What :func:`~.lowering.lower` is told of a decoder that is a part of one.

    Raises:
        LoweringError: the decoder has a part without a native operator; nothing was taken from it.
        MissingDependencyError: there is no C++ compiler.

    Example:
        >>> decoder = NativeDecoder(model).with_threads(2)  # doctest: +SKIP
        >>> Runner(decoder, new_kv_cache(decoder, num_blocks=64)).run(batch)  # doctest: +SKIP
    """

    def __init__(self, decoder: Decoder, *, kept: Kept | None = None, activations: Rows = "float", **part: Any) -> None:
        if decoder.device.type != "cpu" or decoder.dtype not in _DTYPES:
            raise LoweringError(f"{decoder.dtype} on {decoder.device}")
        self.config = decoder.config
        self._num_layers = decoder.config.num_kv_layers  # layers with keys and values
        self.dtype = decoder.dtype
        self.device = decoder.device
        self.plan = lower(decoder, **part)
        self.embedding = decoder.embedding
        if is_without_memory(self.embedding.table) and kept is not None and (table := kept.table()) is not None:
            self.embedding.table = table  # type: ignore[assignment]  # torch's stubs know of tensors alone
        rotary = decoder.rotary
        rotaries = list(rotary.rotaries) if isinstance(rotary, Rotaries) else [rotary] if rotary else []
        self._factors = [Factors(each) for each in rotaries if isinstance(each, Rotary)]
        self._native = library.load()
        self.seconds: NDArray[np.float64] | None = None  # per operator of the plan, to be added to; None: not measured
        self.largest: NDArray[np.int64] | None = None  # [num_sampled] of the last call: where a row's largest logit is
        self.activations = activations
        self._copy = kept
        self._binder = Binder(
            self._native, self.plan, self.config, dtype=self.dtype, activations=self.activations, copy=kept
        )
        self._operators = [self._binder.bind(operator) for operator in self.plan.operators]
        self.linears = self._binder.linears  # of the plan's products; None: one that was not quantised
        self._program = self._new_program(1)

    def with_threads(self, num_threads: int, *, meeting: int | None = None) -> Self:
        """Return a decoder with the same weights and its own team of ``num_threads`` threads, the caller's among them.

        Args:
            num_threads: The caller's thread and helpers.
            meeting: The native object through which ranks add their parts; None: there is one rank.

        Raises:
            InvalidInputError: ``num_threads`` is below 1.
        """
        if num_threads < 1:
            raise InvalidInputError(f"{num_threads} threads cannot run a model; at least 1 can")
        other = copy(self)
        other._program = self._new_program(num_threads)
        if meeting is not None:
            self._native.orca_join(other._program, meeting)
        return other

    @property
    def nbytes(self) -> int:
        """Bytes of packed weights, all but the embedding's."""
        return sum(kept.nbytes for kept in self._binder.kept)

    @property
    def num_integer_products(self) -> int:
        """Number of the plan's products that multiply integers."""
        return sum(each is not None and each.is_integer for each in self.linears)

    def __call__(self, inputs: ForwardInputs, kv_cache: KVCache | NativeKVCache) -> Tensor:
        """Run one iteration: writes its keys and values, returns fp32 logits [num_sampled, vocab_size], or [.., 0].

        Raises:
            MemoryPlanError: a request's block table is too short for its tokens.
        """
        if not isinstance(kv_cache, NativeKVCache):
            raise InvalidInputError("a native decoder keeps its keys and values in a NativeKVCache")
        states = self.embedding(inputs.token_ids, inputs.positions, look_up_native).contiguous()
        cap = self.config.logit_softcap
        logits = torch.empty(len(inputs.wanted), 0)
        if inputs.needs_logits or cap is not None:
            logits = inputs.room.take(len(inputs.wanted), self.config.vocab_size)
        # Found while logits are made. A cap may make equals of two, of which the first would have to be taken.
        self.largest = np.empty(len(logits), dtype=np.int64) if cap is None else None
        self.run(inputs, states, kv_cache, Results(logits, self.largest))
        return logits if cap is None else (logits / cap).tanh_().mul_(cap)

    def run(self, inputs: ForwardInputs, states: Tensor, kv_cache: NativeKVCache, results: Results) -> bool:
        """Run all operators on ``states`` fp32 [num_tokens, hidden_size], which are changed; fill ``results``.

        Returns:
            False: another rank is gone, and the results are void.

        Raises:
            MemoryPlanError: a request's block table is too short for its tokens.
        """
        highest = max(request.context_len for request in inputs.batch.requests) - 1
        rotated: Sequence[tuple[Tensor | None, Tensor | None]] = [(None, None)]
        if self._factors:
            rotated = [factors(inputs.positions, highest) for factors in self._factors]
        iteration = Iteration(inputs, states, rotated, kv_cache, results)
        return all(
            self._run_rows(iteration, first, stop) for first, stop in _even_parts(iteration.num_rows, most_rows())
        )

    def _run_rows(self, iteration: Iteration, first: int, stop: int) -> bool:
        """Run rows ``first`` to ``stop`` of the iteration through all layers; those before them have been run."""
        batch, _held = iteration.batch(first, stop, self._native, num_layers=self._num_layers, seconds=self.seconds)
        return bool(self._native.orca_run(self._program, byref(batch)))

    def _new_program(self, num_threads: int) -> _Program:
        widths = list(self.plan.widths.values())
        array = (c_int32 * len(widths))(*widths)
        program = _Program(self._native.orca_program(num_threads, _SPINS, len(widths), array))
        for operator in self._operators:
            getattr(self._native, _ADDERS[type(operator).__name__])(program, byref(operator))
        weakref.finalize(program, self._native.orca_free, program.value)
        return program


def to_native(
    model: DecoderModel, *, backend: str = "auto", kept: Kept | None = None, activations: Rows = "float"
) -> DecoderModel:
    """Convert ``model`` to a native decoder.

    Args:
        model: A decoder of ours gives its weights away.
        backend: ``"auto"``: where it can't be, the model comes back as it is, and the log says why.
        kept: The copy that the model's quantised weights are in.
        activations: As of :class:`NativeDecoder`.

    Raises:
        MlsysError: it can't be, and ``backend`` is ``"native"``.
    """
    try:
        if not isinstance(model, Decoder):
            raise LoweringError(f"a model by {type(model).__name__}")
        return NativeDecoder(model, kept=kept, activations=activations)
    except MlsysError as error:
        if backend == "native":
            raise
        reason = error
    if isinstance(reason, LoweringError):
        _log.info("the model runs in torch: %s", reason)
    else:
        warn_without_kernels(
            "Orca", "the model runs in torch's operators, with weights widened and no batch invariance", reason
        )
    return model


def new_kv_cache(
    model: DecoderModel,
    *,
    num_blocks: int,
    block_size: int = PANEL,
    num_states: int = 1,
    dtype: str | None = None,
    empty: Empty | None = None,
) -> KVCache | NativeKVCache:
    """Make an empty cache of the kind that ``model`` reads.

    Args:
        model: Reads and writes it.
        num_blocks: The scheduler's number of blocks.
        block_size: Tokens of a block.
        num_states: Slots for the states of a recurrent model's requests.
        dtype: Of keys and values, as ``--kv-dtype`` has it; None: the model's.
        empty: Makes its tensors, if given.

    Raises:
        InvalidInputError: a native model's blocks hold another number of tokens, or the model cannot read that dtype.
    """
    name = kv_dtype_name(dtype, model.dtype, is_native=isinstance(model, NativeDecoder))
    kept_in: torch.dtype = getattr(torch, name)
    if isinstance(model, NativeDecoder):
        if block_size != PANEL:
            raise InvalidInputError(f"a native model's K/V blocks hold {PANEL} tokens, not {block_size}")
        return NativeKVCache(model.config, num_blocks=num_blocks, num_states=num_states, dtype=kept_in, empty=empty)
    return KVCache(
        model.config,
        num_blocks=num_blocks,
        block_size=block_size,
        num_states=num_states,
        dtype=kept_in,
        device=model.device,
        empty=empty,
    )


def most_rows() -> int:
    """Return the rows that go through all layers at once, at most."""
    return _MOST_ROWS * (2 if library.load().orca_has_amx() else 1)


def _even_parts(num_rows: int, most_rows: int) -> list[tuple[int, int]]:
    """Return ranges of at most ``most_rows`` rows, as even as can be."""
    parts = max(1, -(-num_rows // most_rows))
    return [(num_rows * part // parts, num_rows * (part + 1) // parts) for part in range(parts)]


_FIRST = 1024  # positions to begin with
_MOST = 1 << 15  # beyond them factors are computed anew: a table would take as much memory as a layer


class Factors:
    """Rotary factors by position, as :class:`~mlsys_orca.model.layers.Rotary` gives, from a table that grows.

    Args:
        rotary: which.
    """

    def __init__(self, rotary: Rotary) -> None:
        self._rotary = rotary
        self._table: tuple[Tensor, Tensor] = rotary(torch.arange(_FIRST))

    def __call__(self, positions: Tensor, highest: int) -> tuple[Tensor, Tensor]:
        """Return cosines and signed sines of ``positions`` [num_tokens] int64, each fp32 [num_tokens, 1, rotary_dim].

        Args:
            positions: of the tokens.
            highest: none of them is above it.
        """
        if highest >= len(self._table[0]):
            if highest >= _MOST:
                return self._rotary(positions)  # type: ignore[no-any-return]
            self._table = self._rotary(torch.arange(1 << (highest + 1).bit_length()))
        cos, sin = self._table
        return cos[positions], sin[positions]
