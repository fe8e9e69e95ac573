"""Images on their way to the engine: what is read, what is refused, and what tells them apart."""

from __future__ import annotations

import base64
import contextlib
import io
import struct
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlsys_core.errors import InvalidInputError
from mlsys_orca.api import images
from mlsys_orca.api.images import SentImage, content_of, decode_image, place_images
from mlsys_orca.engine import wire
from mlsys_orca.scheduling.batch import SamplingParams
from mlsys_orca.scheduling.images import ImagePixels, PlacedImage, images_between, mark_of
from mlsys_orca.scheduling.prefix_cache import extend_digests
from mlsys_orca.scheduling.request import GenerationRequest
from PIL import Image

from tests.orca.vision.models import data_url, picture


def png(width: int, height: int) -> str:
    """A file that claims a size and has no pixels to speak of."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    data = b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(data).decode()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("https://example.org/a.png", "no data URL, and nothing is fetched"),
        ("file:///etc/passwd", "no data URL, and nothing is fetched"),
        ("/etc/passwd", "no data URL"),
        ("", "no data URL"),
        ("data:text/html;base64,aGVsbG8=", "not as an image in base64"),
        ("data:image/png,hello", "not as an image in base64"),
        ("data:image/png;base64", "not as an image in base64"),
        ("data:image/png;base64,a!b=", "its base64 is broken"),
        ("data:image/png;base64,aGVsbG8", "its base64 is broken"),
        ("data:image/png;base64,", "its 0 bytes are no image"),
        ("data:image/png;base64,aGVsbG8=", "its 5 bytes are no image"),
        ("data:image/svg+xml;base64,PHN2Zy8+", r"PNG, JPEG, WEBP, GIF are"),
        (png(9000, 9000), "81,000,000 pixels, and one may have 33,554,432"),
        (png(60_000, 60_000), "far beyond the 33,554,432 pixels"),
        (png(300, 300), "are no image that can be read"),
    ],
)
def test_what_is_no_image_is_refused_with_its_reason(url: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        decode_image(url)


def test_a_file_that_is_too_large_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MAX_IMAGE_NBYTES", 100)
    with pytest.raises(InvalidInputError, match=r"about [\d,]+ bytes, and a file may have 100: make it smaller"):
        decode_image(data_url(picture(50, 50, 1)))


@given(
    cut=st.integers(0, 2000),
    place=st.integers(0, 2000),
    value=st.integers(0, 255),
    kind=st.sampled_from(["PNG", "JPEG", "GIF", "WEBP"]),
)
def test_damaged_files_are_read_or_refused(cut: int, place: int, value: int, kind: str) -> None:
    file = io.BytesIO()
    picture(20, 30, 1).save(file, kind)
    data = bytearray(file.getvalue())
    data[place % len(data)] = value
    url = "data:image/any;base64," + base64.b64encode(data[: max(1, len(data) - cut)]).decode()
    with contextlib.suppress(InvalidInputError):
        assert decode_image(url).mode == "RGB"


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P", "1", "LA", "I;16"])
def test_every_mode_is_read_as_transformers_does(mode: str) -> None:
    from transformers.image_utils import load_image

    image = Image.new("I;16", (9, 7), 300) if mode == "I;16" else picture(9, 7, 3).convert(mode)
    url = data_url(image)
    assert decode_image(url).tobytes() == load_image(url).tobytes()


def test_a_turned_photograph_is_upright() -> None:
    file, turned = io.BytesIO(), Image.Exif()
    turned[0x0112] = 6
    picture(40, 20, 1).save(file, "JPEG", exif=turned)
    url = "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
    assert decode_image(url).size == (20, 40)


def placed(seed: int, *positions: int) -> PlacedImage:
    return PlacedImage(ImagePixels.of((1, 3, 1, 1), bytes([seed, 0, 0])), positions)


def test_digests_part_where_images_do() -> None:
    def chain(*found: PlacedImage) -> list[bytes]:
        digests: list[bytes] = []
        extend_digests(digests, [7] * 16, 4, images=found)
        return digests

    text, one, other = chain(), chain(placed(1, 5, 6)), chain(placed(2, 5, 6))
    assert text[0] == one[0] == other[0]
    assert len({text[1], one[1], other[1]}) == 3
    assert len({text[3], one[3], other[3]}) == 3  # and ever after
    assert chain(placed(1, 5, 6)) == one
    assert chain(placed(1, 5, 7))[1] != one[1] != chain(placed(1, 5), placed(2, 6))[1]
    assert chain(placed(1, 5, 6), placed(2, 12, 13))[:3] == one[:3]  # a later image does not change what was before
    assert ImagePixels.of((1, 3, 2, 1), bytes(6)).digest != ImagePixels.of((1, 3, 1, 2), bytes(6)).digest


def test_images_are_found_by_the_tokens_that_run() -> None:
    found = [placed(1, 2, 3, 6), placed(2, 9)]
    assert images_between(found, 0, 2) == ()
    assert images_between(found, 4, 6) == ()
    assert images_between(found, 6, 10) == tuple(found)
    assert mark_of(found, 4, 6) == b""


def test_placeholders_become_the_tokens_of_their_images() -> None:
    one, two = placed(1).image, placed(2).image
    prompt = place_images([5, 9, 5, 9], [(one, [8, 9, 9, 8]), (two, [8, 9, 8])], image_token_id=9)
    assert prompt.token_ids == [5, 8, 9, 9, 8, 5, 8, 9, 8]
    assert prompt.images == (PlacedImage(one, (2, 3)), PlacedImage(two, (7,)))
    with pytest.raises(InvalidInputError, match="shows 1 of 2 images"):
        place_images([9, 5], [(one, [9]), (two, [9])], image_token_id=9)


def test_a_worker_gets_each_image_once() -> None:
    image = ImagePixels.of((1, 3, 2, 2), bytes(range(12)))
    request = GenerationRequest(
        request_id="a", prompt_token_ids=(9, 9), max_new_tokens=1, images=(PlacedImage(image, (0, 1)),)
    )
    known: dict[bytes, ImagePixels] = {}
    made: list[Any] = []
    for handle in (1, 2):
        message = wire.submit_of(handle, request, answer=(), block_table=(), computed=0)
        command = wire.decode_command(wire.encode(message))
        assert isinstance(command, wire.Submit)
        made.append(wire.request_of(command, SamplingParams(), keeps_blocks=True, known=known))
    assert made[0].images == request.images
    assert made[0].images[0].image is made[1].images[0].image


def test_contents_without_images_stay_texts() -> None:
    assert content_of(["a", "b"]) == "ab"
    assert content_of([SentImage("data:"), "b"]) == [
        {"type": "image", "image": SentImage("data:")},
        {"type": "text", "text": "b"},
    ]
