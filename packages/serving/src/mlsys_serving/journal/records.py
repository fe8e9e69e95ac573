"""Records of a log file: a checksum, a length, then as many bytes. Pure.

A record that its writer did not finish, and whatever is damaged, ends the log: what stands before it is whole.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

_HEADER = struct.Struct("<II")  # CRC-32 of length and payload; the length
_LENGTH = struct.Struct("<I")
MAX_RECORD_NBYTES = 1 << 28
MAGIC = b"MLSYSLOG1\n"


def record(payload: bytes) -> bytes:
    """Return ``payload`` as a record.

    Raises:
        ValueError: it is larger than :data:`MAX_RECORD_NBYTES`.

    Example:
        >>> [payload for payload, _ in records(MAGIC + record(b"a") + record(b"bc")[:-1])]
        [b'a']
    """
    if len(payload) > MAX_RECORD_NBYTES:
        raise ValueError(f"a record of {len(payload)} bytes; at most {MAX_RECORD_NBYTES} may be in one")
    return _HEADER.pack(_checksum(payload), len(payload)) + payload


def records(data: bytes | memoryview) -> Iterator[tuple[bytes, int]]:
    """Yield the payloads of a log's whole records, each with the offset in bytes where it ends."""
    if bytes(data[: len(MAGIC)]) != MAGIC:
        return
    at = len(MAGIC)
    while at + _HEADER.size <= len(data):
        checksum, nbytes = _HEADER.unpack_from(data, at)
        end = at + _HEADER.size + nbytes
        if nbytes > MAX_RECORD_NBYTES or end > len(data):
            return
        payload = bytes(data[at + _HEADER.size : end])
        if _checksum(payload) != checksum:
            return
        yield payload, end
        at = end


def _checksum(payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(_LENGTH.pack(len(payload))))
