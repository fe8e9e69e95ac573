"""Rules by which a model's images are cut and counted, from its files: the vision part before any weight is read.

``transformers``' own image processor does the work, in its Pillow variant, which needs no torchvision. Shared by
:mod:`mlsys_orca.text.image_reader`, which cuts images and finds their tokens, and :mod:`.vision`, which reads tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from mlsys_core.errors import InvalidInputError, MissingDependencyError
from mlsys_orca.model.config import refuse
from mlsys_orca.model.weights.damage import json_object
from mlsys_orca.scheduling.images import ImagePixels

VISION_ARCHITECTURES = ("smolvlm", "idefics3")
_PROCESSORS = {"smolvlm": "SmolVLMImageProcessorPil", "idefics3": "Idefics3ImageProcessorPil"}


@dataclass(frozen=True, slots=True)
class Vision:
    """Facts about a model's vision part, from its files. Owner: the loader."""

    processor: Any  # transformers' image processor
    tile_side: int  # pixels
    tokens_per_tile: int
    image_token_id: int  # stands for a feature; in a rendered chat, for a whole image

    @classmethod
    def of(cls, path: Path, config: Any) -> Vision:
        """Return what the directory ``path``, whose configuration ``transformers`` read, says.

        Raises:
            InvalidInputError: its parts do not belong together.
            MissingDependencyError: Pillow is not installed, or ``transformers`` is too old to read images with it.
        """
        try:
            import_module("PIL.Image")
            processors = import_module(f"transformers.models.{config.model_type}")
            kind = getattr(processors, _PROCESSORS[config.model_type])
        except (ImportError, AttributeError) as error:
            raise MissingDependencyError(
                f"{path} reads images, which needs Pillow and a transformers that uses it: "
                'pip install --upgrade "mlsys-orca[transformers]"'
            ) from error
        if not any((path / name).is_file() for name in ("preprocessor_config.json", "processor_config.json")):
            raise InvalidInputError(
                f"{path / 'preprocessor_config.json'} is missing; a model that reads images says there how they are cut"
            )
        try:
            processor = kind.from_pretrained(path, trust_remote_code=False, local_files_only=True)
        except (ValueError, OSError, TypeError, KeyError) as error:
            said = (str(error).strip().splitlines() or [""])[-1][:200]
            raise InvalidInputError(f"{path}: its preprocessor_config.json is refused: {said}") from error
        side = dict(processor.max_image_size or {}).get("longest_edge")
        patch, factor, most = config.vision_config.patch_size, config.scale_factor, config.vision_config.image_size
        is_square = isinstance(patch, int) and isinstance(most, int)
        if not isinstance(side, int) or not is_square or not 0 < side <= most:
            raise InvalidInputError(f"{path}: tiles of {side} pixels a side do not fit an encoder made for {most}")
        refuse(not processor.do_resize, "images that are not brought to one size (do_resize)")
        per_side = side // patch
        if not per_side or per_side % factor:
            raise InvalidInputError(f"{path}: {per_side} patches a side cannot be joined {factor} by {factor}")
        tokens = (per_side // factor) ** 2
        stated = _stated_tokens(path)
        if stated not in (None, tokens):
            raise InvalidInputError(
                f"{path}: image_seq_len is {stated} in processor_config.json, and the model makes {tokens} of a tile"
            )
        return cls(processor, side, tokens, config.image_token_id)

    def tile(self, image: ImagePixels, index: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return a tile of an image as the encoder takes it: fp32 [3, tile_side, tile_side]."""
        processor: Any = self.processor
        tile: Any = np.frombuffer(image.pixels, np.uint8).reshape(image.shape)[index]
        if processor.do_rescale:
            tile = processor.rescale(tile, processor.rescale_factor)
        if processor.do_normalize:
            tile = processor.normalize(tile, processor.image_mean, processor.image_std)
        return np.asarray(tile, np.float32)


def _stated_tokens(path: Path) -> Any:
    file = path / "processor_config.json"
    return json_object(file).get("image_seq_len") if file.is_file() else None
