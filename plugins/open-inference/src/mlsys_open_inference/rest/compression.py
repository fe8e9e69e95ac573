"""HTTP bodies compressed with gzip or deflate, both ways, bounded."""

from __future__ import annotations

import gzip
import zlib

from mlsys_core.errors import InvalidInputError
from mlsys_serving.http import HttpError

_WINDOW_BITS = {"gzip": 31, "deflate": 15}
_MIN_NBYTES = 1024  # a smaller response gains nothing


def decompressed(body: bytes, encoding: str, *, max_nbytes: int) -> bytes:
    """Return ``body`` as it was before compression.

    Raises:
        HttpError: 415, another encoding than gzip and deflate; 413, it is larger than ``max_nbytes``.
        InvalidInputError: it is damaged.

    Example:
        >>> decompressed(zlib.compress(b"hello"), "deflate", max_nbytes=5)
        b'hello'
    """
    window_bits = _WINDOW_BITS.get(encoding)
    if window_bits is None:
        raise HttpError(f"content-encoding is gzip or deflate, got {encoding[:40]!r}", http_status=415)
    stream = zlib.decompressobj(window_bits)
    try:
        plain = stream.decompress(body, max_nbytes + 1)
    except zlib.error as error:
        raise InvalidInputError(f"the body is no {encoding}: {error}") from error
    if len(plain) > max_nbytes:
        raise HttpError(
            f"the request's body is larger than {max_nbytes} bytes, the most this server takes", http_status=413
        )
    if not stream.eof or stream.unused_data:
        raise InvalidInputError(f"the body's {encoding} data is cut off, or something follows it")
    return plain


def compressed(body: bytes, accept_encoding: str) -> tuple[bytes, str | None]:
    """Return ``body``, compressed if the client takes it and it gets smaller, and the encoding.

    Example:
        >>> compressed(b"x" * 4096, "deflate, gzip;q=0")[1], compressed(b"x", "gzip")[1]
        ('deflate', None)
    """
    if len(body) < _MIN_NBYTES:
        return body, None
    for choice in accept_encoding.lower().split(","):
        encoding, _, quality = choice.strip().partition(";")
        if encoding.strip() in _WINDOW_BITS and quality.replace(" ", "") not in ("q=0", "q=0.0"):
            encoding = encoding.strip()
            smaller = gzip.compress(body, 1, mtime=0) if encoding == "gzip" else zlib.compress(body, 1)
            return (smaller, encoding) if len(smaller) < len(body) else (body, None)
    return body, None
