"""A trained Llama with wider rows, so that K-quants, whose blocks have 256 weights, apply: the same model in any type.

The K-quants of a small model are rare, since its rows are no multiple of 256. Here residual features, heads and inner
features are filled up with zeros, which changes no prediction: the root mean square is taken over more features, so
the norms' weights shrink by the root of that share, and their epsilon by the share. llama.cpp's own quantiser
(``ggml_quantize_chunk``) writes the types.
"""

from __future__ import annotations

import ctypes
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
from mlsys_core.errors import InvalidInputError
from numpy.typing import NDArray

from mlsys_bench.orca.peers.large import type_of

WIDTH = 256  # of a K-quant's block
Floats = NDArray[np.float32]


def up_to(count: int) -> int:
    """Return the least multiple of 256 that is not below ``count``.

    Example:
        >>> up_to(576), up_to(1536)
        (768, 1536)
    """
    return -(-count // WIDTH) * WIDTH


def filled(matrix: Floats, shape: tuple[int, ...]) -> Floats:
    """Return ``matrix`` with zeros behind it, in that shape."""
    return np.pad(matrix, [(0, new - old) for old, new in zip(matrix.shape, shape, strict=True)])


class Quantiser:
    """llama.cpp's quantiser, from the library that xllamacpp brings.

    Args:
        peers: Folder of the peers' environments.

    Raises:
        InvalidInputError: it is not installed.
    """

    def __init__(self, peers: Path) -> None:
        self._library = ctypes.CDLL(str(library_of(peers)))
        chunk = self._library.ggml_quantize_chunk
        chunk.restype = ctypes.c_size_t
        size = ctypes.c_int64
        chunk.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, size, size, size, ctypes.c_void_p]

    def __call__(self, matrix: Floats, kind: str) -> NDArray[np.uint8]:
        """Return ``matrix`` [rows, columns] in the type of that name, uint8 [rows, nbytes of a row]."""
        import gguf

        stored = gguf.GGMLQuantizationType[kind]
        length, nbytes = gguf.GGML_QUANT_SIZES[stored]
        rows, columns = matrix.shape
        data = np.ascontiguousarray(matrix, np.float32)
        out = np.empty((rows, columns // length * nbytes), np.uint8)
        self._library.ggml_quantize_chunk(int(stored), data.ctypes.data, out.ctypes.data, 0, rows, columns, None)
        return out


def library_of(peers: Path) -> Path:
    """Return the file of llama.cpp's library in the peers' environments.

    Raises:
        InvalidInputError: it is not installed.
    """
    for path in sorted((peers / "llama-cpp").glob("lib/python3*/site-packages/xllamacpp/*.so")):
        return path
    raise InvalidInputError("llama.cpp is not installed: benchmarks/peers/install.sh llama-cpp")


def tensor_type(tensor: str, layer: int, num_layers: int, kind: str) -> str:
    """Return a matrix's type in a file of ``kind``: ``"q4_0"``, ``"q8_0"``, ``"q4_k_m"``, ``"q5_k"`` or ``"q6_k"``.

    The embedding is the head, too: llama.cpp gives it six bits at least.

    Example:
        >>> tensor_type("ffn_up", 0, 30, "q5_k"), tensor_type("token_embd", 0, 30, "q4_0")
        ('Q5_K', 'Q6_K')
    """
    if kind in ("q5_k", "q6_k"):
        return "Q6_K" if tensor == "token_embd" else kind.upper()
    return type_of("output" if tensor == "token_embd" else tensor, layer, num_layers, kind)


def write(source: Path, kind: str, path: Path, quantiser: Quantiser) -> None:
    """Write the Llama in ``source``, a GGUF of any type whose embedding is its head, with wide rows as ``kind``."""
    import gguf

    reader = gguf.GGUFReader(source)
    found = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    sizes = {name: int(found[f"llama.{name}"]) for name in ("embedding_length", "attention.head_count")}
    heads = sizes["attention.head_count"]
    shared_by = heads // int(found["llama.attention.head_count_kv"])
    hidden, head_dim = sizes["embedding_length"], sizes["embedding_length"] // heads
    wide = up_to(hidden)
    share = hidden / wide
    changed: dict[str, Any] = {
        "llama.embedding_length": wide,
        "llama.feed_forward_length": up_to(int(found["llama.feed_forward_length"])),
        "llama.attention.head_count": wide // head_dim,
        "llama.attention.head_count_kv": wide // head_dim // shared_by,
        "llama.attention.layer_norm_rms_epsilon": found["llama.attention.layer_norm_rms_epsilon"] * share,
    }
    if wide % (head_dim * shared_by) or wide // head_dim * head_dim != wide:
        raise InvalidInputError(f"{wide} features hold no whole number of groups of heads of {head_dim} features")
    writer = gguf.GGUFWriter(path, "llama")
    for name, field in reader.fields.items():
        if name in found and name not in ("general.architecture", "general.file_type"):
            value = changed.get(name, found[name])
            writer.add_key_value(name, value, field.types[0], field.types[-1] if len(field.types) > 1 else None)
    num_layers = int(found["llama.block_count"])
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, filled(values * np.float32(sqrt(share)), (wide,)))
            continue
        own = tensor.name.split(".")[-2]
        layer = int(tensor.name.split(".")[1]) if tensor.name.startswith("blk.") else 0
        own_rows = {"token_embd": len(values), "attn_k": wide // shared_by, "attn_v": wide // shared_by}
        rows = own_rows.get(own, up_to(len(values)))
        called = tensor_type(own, layer, num_layers, kind)
        data = quantiser(filled(values, (rows, up_to(values.shape[1]))), called)
        writer.add_tensor(tensor.name, data, raw_dtype=gguf.GGMLQuantizationType[called])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
