"""Images in messages: data URLs to pictures within bounds, and a prompt's placeholders to what stands for them.

Endpoints hand contents on as :func:`content_of` makes them. :func:`.conversation.encode_chat` lifts the images
out, has the chat template write a placeholder for each, and puts the tokens of each in its place.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from mlsys_core.errors import InvalidInputError

from mlsys_orca.scheduling.images import ImagePixels, PlacedImage

if TYPE_CHECKING:
    from mlsys_orca.text.image_reader import ImageReader

MAX_IMAGE_NBYTES = 20 << 20  # of a file
MAX_IMAGE_PIXELS = 1 << 25  # of a picture: a camera's 33 million; decoded they take 134 MB
MAX_PIXELS_NBYTES = 64 << 20  # of a request's tiles, which go to the engine together
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_HOW = "send the image itself, as data:image/png;base64,..."

Detail = Literal["auto", "low", "high", "original"]


@dataclass(frozen=True, slots=True)
class SentImage:
    """An image as a client sent it."""

    url: str
    detail: Detail | None = None  # "low": not cut into tiles


@dataclass(frozen=True, slots=True)
class Prompt:
    """A chat's prompt."""

    token_ids: list[int]
    images: tuple[PlacedImage, ...] = ()


def content_of(parts: Iterable[str | SentImage]) -> str | list[dict[str, Any]]:
    """Return a message's content: its text, or if it has images its parts.

    Example:
        >>> content_of(["a", "b"])
        'ab'
        >>> [part["type"] for part in content_of(["a", SentImage("data:image/png;base64,")])]
        ['text', 'image']
    """
    found = list(parts)
    texts = [part for part in found if isinstance(part, str)]
    if len(texts) == len(found):
        return "".join(texts)
    return [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part} for part in found
    ]


def lift_images(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[SentImage]]:
    """Return messages whose contents are lists of parts, as templates of models that see expect them, and the images.

    Example:
        >>> lift_images([{"role": "user", "content": "Hi"}])
        ([{'role': 'user', 'content': [{'type': 'text', 'text': 'Hi'}]}], [])
    """
    sent: list[SentImage] = []
    lifted = []
    for message in messages:
        content = message.get("content")
        found: list[dict[str, Any]] = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
        parts = []
        for part in found:
            if part["type"] == "image":
                sent.append(part["image"])
            parts.append({"type": "image"} if part["type"] == "image" else part)
        lifted.append({**message, "content": parts})
    return lifted, sent


def read_images(sent: Sequence[SentImage], reader: ImageReader) -> Iterator[tuple[ImagePixels, list[int]]]:
    """Yield each image's tiles and the tokens that stand for it, one after the other.

    Raises:
        InvalidInputError: one is no image that is read here, or they are too many pixels in all.
    """
    nbytes = 0
    for number, image in enumerate(sent, start=1):
        try:
            picture = decode_image(image.url)
        except InvalidInputError as error:
            raise InvalidInputError(f"image {number} of {len(sent)}: {error}") from error
        found = reader.read(picture, is_whole=image.detail == "low")
        nbytes += len(found[0].pixels)
        if nbytes > MAX_PIXELS_NBYTES:
            raise InvalidInputError(
                f"the first {number} of {len(sent)} images make {nbytes:,} bytes of pixels, and a request may have "
                f"{MAX_PIXELS_NBYTES:,}: send fewer, or with the detail 'low'"
            )
        yield found


def place_images(
    token_ids: Sequence[int], found: Sequence[tuple[ImagePixels, list[int]]], *, image_token_id: int
) -> Prompt:
    """Return the prompt with the tokens of each image in the place of its placeholder.

    Args:
        token_ids: The prompt; one ``image_token_id`` for each image.
        found: Tiles and tokens of each image, in order.
        image_token_id: Id of the placeholder, which stands for each feature too.

    Raises:
        InvalidInputError: there are more or fewer placeholders than images.
    """
    num_places = sum(token_id == image_token_id for token_id in token_ids)
    if num_places != len(found):
        raise InvalidInputError(
            f"the model's chat template shows {num_places} of {len(found)} images: put them where it shows them, as a "
            "rule into a user's message"
        )
    images, ids, left = [], list[int](), iter(found)
    for token_id in token_ids:
        if token_id != image_token_id:
            ids.append(token_id)
            continue
        pixels, shown = next(left)
        positions = (len(ids) + offset for offset, each in enumerate(shown) if each == image_token_id)
        images.append(PlacedImage(pixels, tuple(positions)))
        ids += shown
    return Prompt(ids, tuple(images))


def decode_image(url: str) -> Any:
    """Return the picture in a data URL as a Pillow image in RGB, upright; of an animation its first.

    Raises:
        InvalidInputError: ``url`` is none, is damaged, or is larger than a picture may be; the size is read before the
            pixels are.
    """
    data = _data_of(url)
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        picture = Image.open(io.BytesIO(data), formats=_FORMATS)
        num_pixels = picture.width * picture.height
        if num_pixels <= MAX_IMAGE_PIXELS:
            upright = ImageOps.exif_transpose(picture)
            return upright.convert("RGB")
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise InvalidInputError(f"it is far beyond the {MAX_IMAGE_PIXELS:,} pixels that one may have") from error
    except MemoryError:
        raise
    except Exception as error:  # whatever a decoder says of bytes from outside
        said = " ".join(str(error).split())[:200] if not isinstance(error, UnidentifiedImageError) else ""
        raise InvalidInputError(
            f"its {len(data):,} bytes are no image that can be read ({', '.join(_FORMATS)} are)"
            + (f": {said}" if said else "")
        ) from error
    raise InvalidInputError(
        f"it has {picture.width} x {picture.height} = {num_pixels:,} pixels, and one may have {MAX_IMAGE_PIXELS:,}: "
        "make it smaller"
    )


def _data_of(url: str) -> bytes:
    """Return the bytes of a data URL."""
    head, comma, data = url.partition(",")
    if not head.lower().startswith("data:"):
        shown = repr(url[:40])
        raise InvalidInputError(f"{shown} is no data URL, and nothing is fetched from elsewhere: {_HOW}")
    media, *options = head[len("data:") :].lower().split(";")
    if not comma or not media.startswith("image/") or options[-1:] != ["base64"]:
        raise InvalidInputError(f"the data URL begins with {head[:60]!r}, and not as an image in base64 does: {_HOW}")
    if len(data) > MAX_IMAGE_NBYTES * 4 // 3 + 4:
        raise InvalidInputError(
            f"it has about {len(data) * 3 // 4:,} bytes, and a file may have {MAX_IMAGE_NBYTES:,}: make it smaller"
        )
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidInputError(f"its base64 is broken: {error}") from error
