"""A decoder that runs on the kernels of this package."""

from __future__ import annotations

from mlsys_orca.backends.triton.batch import to_device
from mlsys_orca.backends.triton.modules import FusedNorm, FusedPreNormLayer, FusedStep, fuse
from mlsys_orca.backends.triton.plan import tile_shape
from mlsys_orca.model.blocks import Decoder
from mlsys_orca.model.decoder import ForwardInputs
from mlsys_orca.model.kv_cache import KVCache
from torch import Tensor, nn


class FusedDecoder(nn.Module):
    """A :class:`~mlsys_orca.model.decoder.DecoderModel` on Triton kernels.

    The forward of a dense model waits for nothing on the device: all that it needs of the batch crosses in one copy.

    Args:
        decoder: Gives its parts away and cannot run itself any more.
    """

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        fuse(decoder)
        self.decoder = decoder
        self.config = config = decoder.config
        self.dtype = decoder.dtype
        self.device = decoder.device
        self.tile = tile_shape(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            itemsize=decoder.dtype.itemsize,
        )

    def forward(self, inputs: ForwardInputs, kv_cache: KVCache) -> Tensor:
        """Run one iteration: writes its keys and values, returns fp32 logits [num_sampled, vocab_size].

        Raises:
            MemoryPlanError: a request's block table is too short for its tokens.
        """
        batch, decoder = to_device(inputs, self.tile), self.decoder
        x: Tensor = decoder.embedding(batch.token_ids, batch.positions)
        branch: Tensor | None = None
        step = FusedStep(batch, kv_cache, decoder.rotary(batch.positions) if decoder.rotary is not None else None)
        for layer in decoder.layers:
            if isinstance(layer, FusedPreNormLayer):
                x, branch = layer(x, branch, step)
            else:
                x = layer(x, step)
        if not len(batch.sampled_rows):  # only chunks of prompts with more to come
            return x.new_empty((0, self.config.vocab_size))
        x, branch = x[batch.sampled_rows], None if branch is None else branch[batch.sampled_rows]
        if isinstance(decoder.norm, FusedNorm):
            x, normed = decoder.norm.add(x, branch)
        else:
            normed = decoder.norm(x if branch is None else x + branch)
        return decoder.logits(normed)
