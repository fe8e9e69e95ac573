"""Images in a batch: the vision encoder of a ``transformers`` model, whose features replace embeddings of tokens.

Beside :mod:`.decoder`, which runs the text part. The encoder reads one tile at a time, so an image's features are the
same bits whatever else a batch or a prompt has. A tile's features are kept for as long as there is room: a prompt in
chunks, another answer to it or a preempted request finds them, and who does not computes them again.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import torch
from mlsys_core.errors import InvalidInputError
from mlsys_orca.backends.transformers.image_rules import Vision
from mlsys_orca.scheduling.batch import IterationBatch
from mlsys_orca.scheduling.images import ImagePixels
from torch import Tensor, nn

_KEPT_NBYTES = 64 << 20  # of features


class ImageEncoder:
    """Encoder of images. Not thread-safe: one caller at a time.

    Args:
        model: The whole model, as ``transformers`` has it; the text part is left alone.
        vision: What its files say.
    """

    def __init__(self, model: Any, vision: Vision) -> None:
        self.module = nn.ModuleList([model.model.vision_model, model.model.connector])
        self._model, self._vision = model.model, vision
        self._kept: OrderedDict[tuple[bytes, int], Tensor] = OrderedDict()  # of tiles; the least recently used first
        self._kept_nbytes = 0

    def place(self, batch: IterationBatch, embeddings: Tensor) -> Tensor:
        """Return ``embeddings`` with the features of the batch's images in the rows that stand for them.

        Args:
            batch: The iteration.
            embeddings: [num_tokens, hidden_size] of its tokens.
        """
        embeddings = embeddings.clone()
        for part in batch.requests:
            for placed in () if part.details is None else part.details.images:
                first, last = placed.between(part.num_computed_tokens, part.context_len)
                offset = part.start - part.num_computed_tokens
                rows = torch.tensor([offset + position for position in placed.positions[first:last]])
                found = self.features(placed.image, first, last)
                embeddings[rows.to(embeddings.device)] = found.to(embeddings.dtype)
        return embeddings

    def features(self, image: ImagePixels, first: int, last: int) -> Tensor:
        """Return features ``first`` to ``last - 1`` of an image, [last - first, hidden_size] in the model's dtype.

        Only tiles that have some are read, so a prompt in chunks does not keep others waiting for whole images.
        """
        per_tile = self._vision.tokens_per_tile
        begin, end = first // per_tile, -(-last // per_tile)
        found = torch.cat([self._tile(image, index) for index in range(begin, end)])
        return found[first - begin * per_tile : last - begin * per_tile]

    def _tile(self, image: ImagePixels, index: int) -> Tensor:
        key = image.digest, index
        found = self._kept.get(key)
        if found is None:
            found = self._kept[key] = self._encode(self._vision.tile(image, index))
            self._kept_nbytes += found.nbytes
            while self._kept_nbytes > _KEPT_NBYTES and len(self._kept) > 1:
                self._kept_nbytes -= self._kept.popitem(last=False)[1].nbytes
        self._kept.move_to_end(key)
        return found

    def verify(self) -> None:
        """See that a tile gives as many finite features as the prompt has tokens for it.

        Raises:
            InvalidInputError: it does not.
        """
        side, wanted = self._vision.tile_side, self._vision.tokens_per_tile
        pixels = (bytes(range(256)) * (3 * side * side // 256 + 1))[: 3 * side * side]
        found = self._encode(self._vision.tile(ImagePixels.of((1, 3, side, side), pixels), 0))
        if len(found) != wanted or not bool(found.isfinite().all()):
            raise InvalidInputError(
                f"the vision encoder makes {len(found)} features of a tile of {side} pixels a side, where {wanted} are "
                "wanted, or they are not finite: its weights or its preprocessor_config.json are wrong"
            )

    def _encode(self, tile: Any) -> Tensor:
        pixels = torch.from_numpy(tile)[None, None].to(next(self.module.parameters()).device)
        features: Tensor = self._model.get_image_features(pixel_values=pixels, return_dict=True).pooler_output[0]
        return features


def text_part(model: Any) -> nn.Module:
    """Return the text part of a model that reads images as a model of its own, with the same weights."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        text: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            copy.deepcopy(model.config.get_text_config())
        )
    setattr(text, text.base_model_prefix, model.model.text_model)
    text.set_output_embeddings(model.get_output_embeddings())
    found: nn.Module = text.eval()
    return found
