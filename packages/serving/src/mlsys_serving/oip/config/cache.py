"""Answers of models that are asked again: Triton's response cache. Pure; used from one event loop."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict

import numpy as np

from mlsys_serving.oip.datatypes import Array
from mlsys_serving.oip.messages import InferRequest, InferResponse

CACHE_NBYTES = 64 << 20
_OVERHEAD = 512  # bytes of an entry beside its arrays


class ResponseCache:
    """Responses by request, the least recently used of which leave when there is no room.

    Args:
        max_nbytes: Of all responses.

    Example:
        >>> cache = ResponseCache(2000)
        >>> for key in (b"a", b"b", b"c"):
        ...     cache.put(key, InferResponse({"y": np.zeros(50, "f4")}))
        >>> cache.get(b"a") is None, cache.get(b"c") is None
        (True, False)
    """

    def __init__(self, max_nbytes: int = CACHE_NBYTES) -> None:
        self._max_nbytes, self._nbytes = max_nbytes, 0
        self._responses: OrderedDict[bytes, tuple[InferResponse, int]] = OrderedDict()

    def get(self, key: bytes) -> InferResponse | None:
        """Return the response that was put, or None."""
        found = self._responses.get(key)
        if found is None:
            return None
        self._responses.move_to_end(key)
        return found[0]

    def put(self, key: bytes, response: InferResponse) -> None:
        """Keep a response, copied; one that is too large for the cache is not kept."""
        nbytes = _OVERHEAD + sum(map(_nbytes, response.outputs.values()))
        if nbytes > self._max_nbytes or key in self._responses:
            return
        kept = InferResponse({name: np.array(array) for name, array in response.outputs.items()}, response.parameters)
        self._responses[key] = (kept, nbytes)
        self._nbytes += nbytes
        while self._nbytes > self._max_nbytes:
            _, (_, freed) = self._responses.popitem(last=False)
            self._nbytes -= freed


def cache_key(request: InferRequest, version_number: int) -> bytes:
    """Return a digest of all that a response depends on.

    Args:
        request: Checked.
        version_number: Of the model in this process; a model that is loaded again has another.
    """
    digest = hashlib.sha256()
    head = [version_number, sorted(request.outputs), sorted(request.parameters.items())]
    digest.update(json.dumps(head, default=str).encode())
    for name in sorted(request.inputs):
        array = request.inputs[name]
        digest.update(f"\0{name}\0{array.dtype.str}\0{array.shape}\0".encode())
        _add(digest, array)
    return digest.digest()


def _add(digest: hashlib._Hash, array: Array) -> None:
    if array.dtype != np.object_:
        digest.update(np.ascontiguousarray(array).data.cast("B") if array.size else b"")
        return
    for element in array.ravel().tolist():
        digest.update(b"%d:" % len(element) + element)


def _nbytes(array: Array) -> int:
    if array.dtype != np.object_:
        return array.nbytes
    return sum(64 + len(element) for element in array.ravel().tolist())
