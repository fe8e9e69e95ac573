"""Images to tiles of pixels, and to the tokens that stand for them: the front's part of reading images.

``transformers`` has both rules: its image processor cuts an image into tiles, and its processor's text has marks and
placeholders for each. Before rescaling, tiles are bytes: a quarter of what the encoder
(:mod:`mlsys_orca.backends.transformers.vision`) makes of them, so that is what requests carry.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from mlsys_core.errors import InvalidInputError
from mlsys_orca.backends.transformers.image_rules import Vision
from mlsys_orca.scheduling.images import ImagePixels
from mlsys_orca.text.tokenizer import Tokenizer

_CHANNELS = 3
_MARKS = ("<fake_token_around_image>", "<global-img>")


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

        Raises:
            InvalidInputError: it has a size that the model's rule cannot cut.
        """
        options: dict[str, Any] = {"do_image_splitting": False} if is_whole else {}
        try:
            found = self.vision.processor(
                [image], do_rescale=False, do_normalize=False, do_pad=False, return_row_col_info=True, **options
            )
        except (ValueError, ArithmeticError) as error:
            raise InvalidInputError(f"{image.width} x {image.height} pixels cannot be cut: {error}") from error
        tiles = np.ascontiguousarray(found["pixel_values"][0], np.uint8)
        pixels = ImagePixels.of((len(tiles), _CHANNELS, self.vision.tile_side, self.vision.tile_side), tiles.tobytes())
        token_ids = self._tokenizer.encode(self._shown(found["rows"][0][0], found["cols"][0][0]), allow_special=True)
        num_features = len(tiles) * self.vision.tokens_per_tile
        if token_ids.count(self.image_token_id) != num_features:
            raise InvalidInputError(
                f"the tokenizer makes {token_ids.count(self.image_token_id)} tokens of an image with {num_features}"
            )
        return pixels, token_ids

    def _shown(self, num_rows: int, num_columns: int) -> str:
        """Return the text that stands for an image of so many tiles, and the whole of it in one more."""
        around, whole = _MARKS
        placeholders = self.image_token * self.vision.tokens_per_tile
        lines = [
            "".join(f"{around}<row_{row + 1}_col_{column + 1}>{placeholders}" for column in range(num_columns)) + "\n"
            for row in range(num_rows)
        ]
        return "".join(lines) + ("\n" if num_rows else "") + f"{around}{whole}{placeholders}{around}"
