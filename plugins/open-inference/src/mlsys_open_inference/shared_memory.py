"""System shared memory that clients register: inputs are read from it, outputs written to it (Triton's extension).

A client on this machine makes a POSIX region, names it here, and sends requests that name the region instead of
bytes. Regions are read and written by ``pread`` and ``pwrite``, not mapped: a client that cuts or changes its region
while a request runs gets an error or other numbers, and cannot end this process.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlsys_core.errors import InvalidInputError
from mlsys_core.posix import open_shared_memory, read_at, write_at
from mlsys_serving.http import HttpError
from mlsys_serving.models.errors import UnknownRegionError, UnsupportedError
from mlsys_serving.models.messages import Parameter

_MAX_REGIONS = 4096
_MAX_SIZE = 2**63 - 1
REGION = "shared_memory_region"
_OFFSET = "shared_memory_offset"


class OpenFile:
    """An open file, closed when nobody holds it any more.

    A request under way may outlive its region's registration; were the file closed then, its number could be that of
    another file by the time the answer is written.
    """

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


@dataclass(frozen=True, slots=True)
class Region:
    """A part of a client's shared memory."""

    name: str
    key: str  # of the POSIX object
    offset: int  # bytes
    nbytes: int
    file: OpenFile


@dataclass(frozen=True, slots=True)
class Placement:
    """Place of one tensor in a region."""

    region: Region
    offset: int  # bytes from the region's own start
    nbytes: int

    def read(self, what: str) -> memoryview:
        """Return a copy of its bytes.

        Raises:
            InvalidInputError: the client has cut the region.
        """
        found = read_at(self.region.file.number, self.nbytes, self.region.offset + self.offset)
        if len(found) != self.nbytes:
            raise InvalidInputError(f"{what}: shared memory {self.region.name!r} is shorter than it was registered")
        return memoryview(found)

    def write(self, raw: bytes | memoryview, what: str) -> int:
        """Write a tensor's bytes; return how many.

        Raises:
            InvalidInputError: there is no room for them, or the client has cut the region.
        """
        if len(raw) > self.nbytes:
            raise InvalidInputError(f"{what} has {len(raw)} bytes, and its shared memory room for {self.nbytes}")
        start = self.region.offset + self.offset
        if os.fstat(self.region.file.number).st_size < start + len(raw):
            raise InvalidInputError(f"{what}: shared memory {self.region.name!r} is shorter than it was registered")
        return write_at(self.region.file.number, raw, start)


class SharedRegions:
    """Regions by name. Used from one event loop.

    Args:
        is_allowed: False: clients may register none.

    Example:
        >>> SharedRegions(is_allowed=False).status()
        []
    """

    def __init__(self, *, is_allowed: bool = False) -> None:
        self.is_allowed = is_allowed
        self._regions: dict[str, Region] = {}

    def register(self, name: str, key: str, offset: int, nbytes: int) -> None:
        """Open a region that a client has made.

        Raises:
            HttpError: 403, the operator has not allowed it.
            InvalidInputError: the name is taken, there is no such region, or it is smaller than that.
        """
        self._require_allowed()
        if not name or name in self._regions:
            raise InvalidInputError(f"shared memory {name[:100]!r} is registered already, or has no name")
        if len(self._regions) >= _MAX_REGIONS:
            raise InvalidInputError(f"{_MAX_REGIONS} regions are registered: unregister some first")
        if not (0 <= offset <= _MAX_SIZE and 0 < nbytes <= _MAX_SIZE - offset):
            raise InvalidInputError(f"a region has an offset from 0 on and a size from 1 on, got {offset} and {nbytes}")
        file = _opened(key)
        if os.fstat(file.number).st_size < offset + nbytes:
            raise InvalidInputError(f"shared memory {key[:100]!r} is smaller than {offset} and {nbytes} bytes")
        self._regions[name] = Region(name, key, offset, nbytes, file)

    def unregister(self, name: str = "") -> None:
        """Forget one region, or all; names that are not registered are ignored, as Triton does.

        Requests under way read and write it still.
        """
        self._require_allowed()
        if name:
            self._regions.pop(name, None)
        else:
            self._regions.clear()

    def status(self, name: str = "") -> list[dict[str, Any]]:
        """Return one region, or all.

        Raises:
            UnknownRegionError: it is not registered.
        """
        found = [self._find(name)] if name else list(self._regions.values())
        return [{"name": each.name, "key": each.key, "offset": each.offset, "byte_size": each.nbytes} for each in found]

    def placement(self, parameters: Mapping[str, Parameter], what: str) -> Placement | None:
        """Return where a tensor lies by its parameters; None: not in shared memory.

        Raises:
            UnsupportedError: the operator has not allowed shared memory.
            UnknownRegionError: no such region.
            InvalidInputError: the place is not within it.
        """
        if REGION not in parameters:
            return None
        if not self.is_allowed:
            raise UnsupportedError(f"{what} is in shared memory, which needs the server's option --shared-memory")
        region = self._find(str(parameters[REGION]))
        nbytes, offset = _whole(parameters, "shared_memory_byte_size", what), _whole(parameters, _OFFSET, what)
        if offset + nbytes > region.nbytes:
            raise InvalidInputError(
                f"{what} lies at {offset} with {nbytes} bytes, and shared memory {region.name!r} has {region.nbytes}"
            )
        return Placement(region, offset, nbytes)

    def close(self) -> None:
        """Forget all regions."""
        self._regions.clear()

    def _find(self, name: str) -> Region:
        if name not in self._regions:
            raise UnknownRegionError(f"there is no shared memory {name[:100]!r}: register it first")
        return self._regions[name]

    def _require_allowed(self) -> None:
        if not self.is_allowed:
            raise HttpError(
                "clients may not register shared memory here; the server's operator allows it with --shared-memory",
                http_status=403,
                error_code="shared_memory_off",
            )


def _whole(parameters: Mapping[str, Parameter], name: str, what: str) -> int:
    value = parameters.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidInputError(f"parameter {name!r} of {what} is a number of bytes, got {str(value)[:40]!r}")
    return value


def _opened(key: str) -> OpenFile:
    name = key.removeprefix("/")
    if not name or "/" in name or "\0" in name or name in (".", ".."):
        raise InvalidInputError(f"{key[:100]!r} is no key of shared memory: give a name without /")
    try:
        file = OpenFile(open_shared_memory(name))
    except OSError as error:
        raise InvalidInputError(f"shared memory {key[:100]!r} cannot be opened: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(file.number).st_mode):
        raise InvalidInputError(f"{key[:100]!r} is no shared memory")
    return file
