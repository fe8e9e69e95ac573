"""Images to tiles of pixels, and to the tokens that stand for them: the front's part of reading images.

``transformers`` has both rules: its image processor, of which the Pillow variant needs no torchvision, cuts an image
into tiles, and its processor's text has a line of marks and placeholders for each. Before rescaling, tiles are bytes:
a quarter of what the encoder (:mod:`.vision`) makes of them, so that is what requests carry.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from mlsys_core.errors import InvalidInputError, MissingDependencyError
from mlsys_orca.model.config import refuse
from mlsys_orca.scheduling.images import ImagePixels
from mlsys_orca.text.tokenizer import Tokenizer

VISION_ARCHITECTURES = ("smolvlm", "idefics3")
_PROCESSORS = {"smolvlm": "SmolVLMImageProcessorPil", "idefics3": "Idefics3ImageProcessorPil"}
_CHANNELS = 3
_MARKS = ("<fake_token_around_image>", "<global-img>")


@dataclass(frozen=True, slots=True)
class Vision:
    """Facts about a model's vision part, from its files. Owner: the loader."""

    architecture: str
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
            processor = kind.from_pretrained(path, local_files_only=True)
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
        if per_side % factor:
            raise InvalidInputError(f"{path}: {per_side} patches a side cannot be joined {factor} by {factor}")
        tokens = (per_side // factor) ** 2
        stated = _stated_tokens(path)
        if stated not in (None, tokens):
            raise InvalidInputError(
                f"{path}: image_seq_len is {stated} in processor_config.json, and the model makes {tokens} of a tile"
            )
        return cls(config.model_type, processor, side, tokens, config.image_token_id)

    def tiles(self, image: ImagePixels) -> Iterator[np.ndarray[Any, np.dtype[np.float32]]]:
        """Yield an image's tiles as the encoder takes them: fp32 [3, tile_side, tile_side]."""
        processor: Any = self.processor
        tile: Any
        for tile in np.frombuffer(image.pixels, np.uint8).reshape(image.shape):
            if processor.do_rescale:
                tile = processor.rescale(tile, processor.rescale_factor)
            if processor.do_normalize:
                tile = processor.normalize(tile, processor.image_mean, processor.image_std)
            yield np.asarray(tile, np.float32)


def _stated_tokens(path: Path) -> Any:
    file = path / "processor_config.json"
    return json.loads(file.read_text(encoding="utf-8")).get("image_seq_len") if file.is_file() else None


class ImageReader:
    """Reader of images for one model. Thread-safe.

    Args:
        vision: What the model's files say.
        tokenizer: The model's.

    Raises:
        InvalidInputError: the tokenizer does not have the tokens that stand around and for images.
    """

    def __init__(self, vision: Vision, tokenizer: Tokenizer) -> None:
        self.vision, self.image_token_id = vision, vision.image_token_id
        self.image_token = tokenizer.decode([vision.image_token_id], skip_special=False)
        unknown = [mark for mark in _MARKS if tokenizer.token_id(mark) is None]
        if self.image_token not in tokenizer.control_tokens or unknown:
            raise InvalidInputError(
                f"the tokenizer lacks what images need: token {vision.image_token_id} is {self.image_token!r}, "
                f"and of the marks around images it lacks {', '.join(unknown) or 'none'}. Take the model's own files"
            )
        self._tokenizer = tokenizer

    @property
    def least_tokens(self) -> int:
        """Tokens of a prompt that an image takes at least."""
        return self.vision.tokens_per_tile + 3

    def read(self, image: Any, *, is_whole: bool = False) -> tuple[ImagePixels, list[int]]:
        """Return an image's tiles, and the tokens that stand for it in a prompt.

        Args:
            image: A Pillow image in RGB.
            is_whole: Do not cut it into tiles: fewer tokens, less detail.
        """
        options: dict[str, Any] = {"do_image_splitting": False} if is_whole else {}
        found = self.vision.processor(
            [image], do_rescale=False, do_normalize=False, do_pad=False, return_row_col_info=True, **options
        )
        tiles = np.ascontiguousarray(found["pixel_values"][0], np.uint8)
        pixels = ImagePixels.of((len(tiles), _CHANNELS, self.vision.tile_side, self.vision.tile_side), tiles.tobytes())
        text = self._shown(found["rows"][0][0], found["cols"][0][0])
        return pixels, self._tokenizer.encode(text, allow_special=True)

    def _shown(self, num_rows: int, num_columns: int) -> str:
        """Return the text that stands for an image of so many tiles, and the whole of it in one more."""
        around, whole = _MARKS
        placeholders = self.image_token * self.vision.tokens_per_tile
        lines = [
            "".join(f"{around}<row_{row + 1}_col_{column + 1}>{placeholders}" for column in range(num_columns)) + "\n"
            for row in range(num_rows)
        ]
        return "".join(lines) + ("\n" if num_rows else "") + f"{around}{whole}{placeholders}{around}"
