"""Contents of K/V blocks that a replica keeps, as its workers tell: the front's mirror of their prefix caches. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mlsys_orca.scheduling.prefix_cache import extend_digests, root_of
from mlsys_orca.scheduling.request import GenerationRequest


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
        extend_digests(chain, request.prompt_token_ids, block_size, root=root, images=request.images)
    return chain
