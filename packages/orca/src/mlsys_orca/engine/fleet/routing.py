"""Choice of the replica that serves a request. Pure: no sockets, no clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mlsys_core.errors import InvalidInputError
from mlsys_orca.scheduling.batch import GenerationRequest
from mlsys_orca.scheduling.pager import extend_digests, root_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """State of one replica when a request is to be placed."""

    is_serving: bool  # a worker runs there, and all requests may run
    num_requests: int  # running and waiting
    num_outstanding_tokens: int  # tokens of prompts left to compute and of answers left to generate
    num_shared_blocks: int = 0  # leading blocks of the new prompt whose keys and values it keeps
    num_kept_blocks: int = 0  # blocks of any prompt that it keeps


def choose(loads: Sequence[Load], *, max_batch_size: int) -> int:
    """Return the index of the replica for a request.

    One that serves, if any does. Among those that keep a beginning of the prompt and have room in their next batch, the
    one with the longest; else the one with the least to do, and among equals the one that keeps the fewest blocks. The
    request goes there at once and is served in order of arrival, so none starves.

    Args:
        loads: The replicas, at least one.
        max_batch_size: Requests at which a replica is saturated.

    Raises:
        InvalidInputError: there is no replica.

    Example:
        >>> idle = Load(is_serving=True, num_requests=0, num_outstanding_tokens=0)
        >>> warm = Load(is_serving=True, num_requests=1, num_outstanding_tokens=90, num_shared_blocks=4)
        >>> choose([idle, warm], max_batch_size=2), choose([idle, warm], max_batch_size=1)
        (1, 0)
    """
    if not loads:
        raise InvalidInputError("there is no replica to choose from: an engine has at least one")
    serving = [index for index, load in enumerate(loads) if load.is_serving] or list(range(len(loads)))
    warm = [index for index in serving if loads[index].num_shared_blocks and loads[index].num_requests < max_batch_size]

    def rank(index: int) -> tuple[int, int, int, int]:
        load = loads[index]
        shared = load.num_shared_blocks if warm else 0
        return -shared, load.num_outstanding_tokens, load.num_kept_blocks, index

    return min(warm or serving, key=rank)


class KeptBlocks:
    """Digests of contents by the block that holds them.

    Example:
        >>> kept = KeptBlocks()
        >>> kept.update({7: b"first", 3: b"second"})
        >>> kept.num_leading([b"first", b"second", b"third"])
        2
        >>> kept.update({7: None})
        >>> kept.num_leading([b"first", b"second"]), len(kept)
        (0, 1)
    """

    def __init__(self) -> None:
        self._digests: dict[int, bytes] = {}  # in the order in which they were kept
        self._known: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._digests)

    @property
    def digests(self) -> Mapping[int, bytes]:
        """Digests by block."""
        return self._digests

    def update(self, changes: Mapping[int, bytes | None]) -> None:
        """Take what a worker told: digests by block, None for those that are not kept any more."""
        for block in changes:
            before = self._digests.pop(block, None)
            if before is not None:
                self._known.discard(before)
        for block, digest in changes.items():
            if digest is not None:
                self._digests[block] = digest
                self._known.add(digest)

    def num_leading(self, chain: Sequence[bytes]) -> int:
        """Return how many of a prompt's blocks, from its first on, are kept."""
        for index, digest in enumerate(chain):
            if digest not in self._known:
                return index
        return len(chain)


def chain_of(request: GenerationRequest, block_size: int) -> list[bytes]:
    """Return the digests of the prompt's full blocks, as prefix caches have them; none, if the request shares none."""
    chain: list[bytes] = []
    if not request.num_encoder_tokens and request.sampling.num_prompt_logprobs is None:
        root = root_of(request.adapter)
        extend_digests(chain, request.prompt_token_ids, block_size, root=root)
    return chain
