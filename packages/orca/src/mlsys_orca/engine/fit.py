"""Number of requests of a model that fit a machine's memory: for ``mlsys orca explain``, and what ``serve`` takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlsys_orca.engine.core import CACHE_SHARE, kv_token_nbytes
from mlsys_orca.engine.engine import EngineConfig, plan_kv_tokens
from mlsys_orca.loading.loaded import LoadedModel
from mlsys_orca.model.kv_cache import DEFAULT_BLOCK_SIZE, kv_dtype_name

USUAL_TOKENS = 1024  # of a request, prompt and answer, where nobody says
MAX_SUGGESTED = 64  # more requests per iteration make all of them slow before they make the machine faster


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Memory that a model takes, and the requests that fit beside it."""

    architecture: str
    dtype: str
    is_native: bool
    weights_nbytes: int
    available_nbytes: int  # of memory, with the weights loaded
    kv_dtype: str
    kv_nbytes_per_token: int
    state_nbytes: int  # of a request's recurrent states; 0: the model has none
    most_requests: int  # at a time, by their states, or by what is ever suggested
    context: int  # tokens
    tokens_per_request: int  # what a request usually has
    num_slots: int  # tokens whose keys and values fit

    @property
    def max_batch_size(self) -> int:
        """Requests per iteration to begin with: as many usual ones as the slots hold."""
        return min(self.most_requests, _requests_of(self.tokens_per_request, self.num_slots))

    def rows(self) -> list[tuple[str, str]]:
        """Return the rows to show: (name, value)."""
        runs = "native kernels, the same bits in any batch" if self.is_native else "torch's operators"
        states = [("states of recurrent layers", f"{_mib(self.state_nbytes)} a request")] if self.state_nbytes else []
        return [
            ("architecture", f"{self.architecture}, {self.dtype}, {runs}"),
            ("weights", _mib(self.weights_nbytes)),
            ("memory left", _mib(self.available_nbytes)),
            ("keys and values", f"{self.kv_nbytes_per_token / 1024:.1f} KiB a token, {self.kv_dtype}"),
            *states,
            ("context", f"{self.context} tokens, {_mib(self.context * self.kv_nbytes_per_token)} each"),
            ("K/V slots", f"{self.num_slots}, {_mib(self.num_slots * self.kv_nbytes_per_token)}"),
            ("requests of full length", f"{self.num_slots // self.context} at a time"),
            (f"requests of {self.tokens_per_request} tokens", f"{self.num_slots // self.tokens_per_request} at a time"),
            ("serve takes", f"--max-batch-size {self.max_batch_size} --kv-tokens {self.num_slots} --policy chunked"),
        ]


def suggested_batch_size(loaded: LoadedModel, engine: Mapping[str, Any], *, available_nbytes: int) -> int:
    """Return the requests per iteration that ``mlsys orca explain`` suggests, within limits that were given.

    Args:
        loaded: The model.
        engine: Keywords of an :class:`EngineConfig`; its ``max_batch_size`` is not read.
        available_nbytes: Of memory, with the weights loaded.

    Raises:
        InvalidInputError: not even one request of the model's context fits.
    """
    most = _most_requests(loaded, available_nbytes)
    limits = EngineConfig(**{**engine, "max_batch_size": most})
    num_slots = plan_kv_tokens(loaded, limits, available_nbytes)
    tokens = min(USUAL_TOKENS, limits.max_model_len or USUAL_TOKENS, loaded.config.max_positions)
    return min(most, _requests_of(tokens, num_slots))


def _most_requests(loaded: LoadedModel, available_nbytes: int) -> int:
    """Return how many requests' states take half of the cache's share of memory, up to the most that are suggested."""
    part = loaded.config.recurrent
    if part is None:
        return MAX_SUGGESTED
    return max(1, min(MAX_SUGGESTED, int(available_nbytes * CACHE_SHARE / 2) // part.nbytes))


def _requests_of(tokens: int, num_slots: int) -> int:
    """Return how many requests of so many tokens the slots hold, 1 to the most that are suggested."""
    blocks = -(-tokens // DEFAULT_BLOCK_SIZE)
    return max(1, min(num_slots // (blocks * DEFAULT_BLOCK_SIZE), MAX_SUGGESTED))


def fit_of(loaded: LoadedModel, *, available_nbytes: int, tokens_per_request: int, kv_dtype: str | None = None) -> Fit:
    """Return what fits beside ``loaded`` in ``available_nbytes``, by the engine's plan for its suggested batch size.

    Raises:
        InvalidInputError: not even one request of the model's context fits, or the model cannot keep keys and values in
            ``kv_dtype``.
    """
    context = loaded.config.max_positions
    most = _most_requests(loaded, available_nbytes)
    limits = EngineConfig(max_batch_size=most, kv_dtype=kv_dtype)
    num_slots = plan_kv_tokens(loaded, limits, available_nbytes)
    return Fit(
        architecture=loaded.config.architecture,
        dtype=str(loaded.model.dtype).removeprefix("torch."),
        is_native=loaded.is_native,
        weights_nbytes=loaded.weights_nbytes,
        available_nbytes=available_nbytes,
        kv_dtype=kv_dtype_name(kv_dtype, loaded.model.dtype, is_native=loaded.is_native),
        kv_nbytes_per_token=kv_token_nbytes(loaded, limits),
        state_nbytes=0 if loaded.config.recurrent is None else loaded.config.recurrent.nbytes,
        most_requests=most,
        context=context,
        tokens_per_request=min(tokens_per_request, context),
        num_slots=num_slots,
    )


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.0f} MiB" if nbytes < 10 * 2**30 else f"{nbytes / 2**30:.1f} GiB"
