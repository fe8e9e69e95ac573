"""Images of a prompt as everything below the front sees them: pixels by a digest, and the tokens that stand for them.

The front reads an image into tiles (:mod:`mlsys_orca.text.image_reader`); scheduler, wire and caches
carry them as they are; the model's encoder turns them into features, which replace the embeddings of those tokens
(:mod:`mlsys_orca.backends.transformers.vision`). Pure.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

_DIGEST_NBYTES = 32  # who could make two images collide would read another's answer


@dataclass(frozen=True, slots=True, weakref_slot=True)
class ImagePixels:
    """An image as its model's encoder reads it. Owner: the requests that have it.

    Example:
        >>> ImagePixels.of((1, 3, 2, 2), bytes(12)).num_tiles
        1
    """

    digest: bytes  # of shape and pixels
    shape: tuple[int, int, int, int]  # tiles, channels, height, width
    pixels: bytes  # uint8, in the order of ``shape``

    @classmethod
    def of(cls, shape: tuple[int, int, int, int], pixels: bytes) -> ImagePixels:
        """Return the image with its digest."""
        digest = blake2b(struct.pack("<4q", *shape), digest_size=_DIGEST_NBYTES)
        digest.update(pixels)
        return cls(digest.digest(), shape, pixels)

    @property
    def num_tiles(self) -> int:
        """Pictures of one size that the encoder reads, each by itself."""
        return self.shape[0]


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """An image, and the tokens of its prompt that its features replace."""

    image: ImagePixels
    positions: tuple[int, ...]  # rising; one for each of its features

    def between(self, start: int, stop: int) -> tuple[int, int]:
        """Return the range of its features whose positions are from ``start`` to before ``stop``.

        Example:
            >>> image = ImagePixels.of((1, 3, 1, 1), bytes(3))
            >>> PlacedImage(image, (4, 5, 8, 9)).between(5, 9)
            (1, 3)
        """
        return bisect_left(self.positions, start), bisect_left(self.positions, stop)


def images_between(images: Sequence[PlacedImage], start: int, stop: int) -> tuple[PlacedImage, ...]:
    """Return the images with features at positions from ``start`` to before ``stop``."""
    if not images:
        return ()
    return tuple(placed for placed in images if len(range(*placed.between(start, stop))))


def mark_of(images: Sequence[PlacedImage], start: int, stop: int) -> bytes:
    """Return a digest of the features at positions from ``start`` to before ``stop``; empty if there are none.

    Example:
        >>> images = [PlacedImage(ImagePixels.of((1, 3, 1, 1), bytes(3)), (4, 5))]
        >>> mark_of(images, 0, 4), len(mark_of(images, 4, 8))
        (b'', 32)
    """
    found = []
    for placed in images_between(images, start, stop):
        first, last = placed.between(start, stop)
        offsets = (position - start for position in placed.positions[first:last])
        found.append(placed.image.digest + array("q", (first, last, *offsets)).tobytes())
    return blake2b(b"".join(found), digest_size=_DIGEST_NBYTES).digest() if found else b""
